"""Recurrent networks, speech, time series and state spaces."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class LSTMTagger(nn.Module):
    def __init__(self, vocab_size=50, embedding_dim=16, hidden_dim=16, tagset_size=5):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, num_layers=2, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * hidden_dim, tagset_size)

    def forward(self, sentence):
        out, _ = self.lstm(self.word_embeddings(sentence))
        return F.log_softmax(self.hidden2tag(out), dim=-1)


def lstm_tagger_inputs():
    return [torch.randint(0, 50, (4, 12)), torch.randint(0, 5, (4, 12))]


def lstm_tagger_loss(outputs, batch):
    return F.nll_loss(outputs.flatten(0, 1), batch[1].flatten())


class GRUForecaster(nn.Module):
    def __init__(self, features=6, hidden=24, horizon=3):
        super().__init__()
        self.gru = nn.GRU(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x):
        _, h = self.gru(x)
        return self.head(h[-1])


def gru_forecaster_inputs():
    return [torch.randn(8, 20, 6), torch.randn(8, 3)]


def gru_forecaster_loss(outputs, batch):
    return F.huber_loss(outputs, batch[1], delta=0.5)


def gru_forecaster_train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    return loss


class HandWrittenCell(nn.Module):
    """A minimal gated unit written by hand, unrolled in Python."""

    def __init__(self, inputs=8, hidden=16):
        super().__init__()
        self.gate = nn.Linear(inputs + hidden, hidden)
        self.candidate = nn.Linear(inputs + hidden, hidden)
        self.hidden = hidden

    def forward(self, x):
        h = x.new_zeros(len(x), self.hidden)
        outputs = []
        for t in range(x.shape[1]):
            f = torch.sigmoid(self.gate(torch.cat([x[:, t], h], 1)))
            c = torch.tanh(self.candidate(torch.cat([x[:, t], f * h], 1)))
            h = (1 - f) * h + f * c
            outputs.append(h)
        return torch.stack(outputs, 1)


def hand_written_cell_inputs():
    return [torch.randn(4, 10, 8)]


class PackedEncoder(nn.Module):
    """Sequences of different lengths, packed; dot-product attention over states."""

    def __init__(self, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(40, hidden, padding_idx=0)
        self.rnn = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Parameter(torch.randn(hidden))

    def forward(self, tokens):
        lengths = torch.tensor([12, 9, 7, 4])
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        scores = states @ self.query
        mask = torch.arange(states.shape[1], device=tokens.device)[None] >= lengths.to(tokens.device)[:, None]
        weights = scores.masked_fill(mask, float("-inf")).softmax(1)
        return (weights[..., None] * states).sum(1)


def packed_encoder_inputs():
    return [torch.randint(1, 40, (4, 12))]


class SpeechCTC(nn.Module):
    """A tiny DeepSpeech: convolutions over a spectrogram, a GRU, and CTC."""

    def __init__(self, mels=20, classes=8):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(mels, 24, 5, stride=2, padding=2), nn.BatchNorm1d(24), nn.ReLU(),
            nn.Conv1d(24, 24, 5, padding=2), nn.BatchNorm1d(24), nn.ReLU(),
        )  # fmt: skip
        self.rnn = nn.GRU(24, 16, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(32, classes)

    def forward(self, spectrogram):
        x, _ = self.rnn(self.conv(spectrogram).transpose(1, 2))
        return self.fc(x).log_softmax(-1)


def speech_ctc_inputs():
    return [torch.randn(3, 20, 40), torch.randint(1, 8, (3, 6))]


def speech_ctc_loss(outputs, batch):
    lengths = torch.full((len(outputs),), outputs.shape[1], dtype=torch.long)
    targets = torch.full((len(outputs),), batch[1].shape[1], dtype=torch.long)
    return F.ctc_loss(outputs.transpose(0, 1), batch[1], lengths, targets, zero_infinity=True)


class Spectrogram(nn.Module):
    """STFT, power, mel filters, logarithm with a floor."""

    def __init__(self, n_fft=64, mels=12):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("mel", torch.rand(mels, n_fft // 2 + 1, generator=torch.Generator().manual_seed(1)))
        self.scale = nn.Parameter(torch.ones(mels, 1))

    def forward(self, wave):
        spectrum = torch.stft(wave, self.n_fft, 16, window=self.window, return_complex=True)
        power = spectrum.real.square() + spectrum.imag.square()
        return self.scale * torch.log(torch.clamp(self.mel @ power, min=1e-10))


def spectrogram_inputs():
    return [torch.randn(4, 512)]


class ComplexMask(nn.Module):
    """Speech enhancement: a mask of complex numbers over the STFT, and back to a wave."""

    def __init__(self, n_fft=32):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.net = nn.Sequential(nn.Linear(2 * (n_fft // 2 + 1), 32), nn.ReLU(), nn.Linear(32, 2 * (n_fft // 2 + 1)))

    def forward(self, wave):
        spectrum = torch.stft(wave, self.n_fft, 8, window=self.window, return_complex=True)
        features = torch.view_as_real(spectrum).permute(0, 2, 1, 3).flatten(2)
        mask = torch.tanh(self.net(features)).unflatten(-1, (-1, 2)).permute(0, 2, 1, 3).contiguous()
        return torch.istft(
            spectrum * torch.view_as_complex(mask), self.n_fft, 8, window=self.window, length=wave.shape[-1]
        )


def complex_mask_inputs():
    return [torch.randn(2, 256)]


class WaveNet(nn.Module):
    """Dilated causal convolutions with gated activations, residuals and skips."""

    def __init__(self, channels=12, layers=4):
        super().__init__()
        self.start = nn.Conv1d(1, channels, 1)
        self.filters = nn.ModuleList(nn.Conv1d(channels, channels, 2, dilation=2**i) for i in range(layers))
        self.gates = nn.ModuleList(nn.Conv1d(channels, channels, 2, dilation=2**i) for i in range(layers))
        self.residuals = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers))
        self.skips = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, channels, 1), nn.ReLU(), nn.Conv1d(channels, 16, 1))

    def forward(self, x):
        x, skip = self.start(x), 0
        for i, (f, g, r, s) in enumerate(zip(self.filters, self.gates, self.residuals, self.skips, strict=True)):
            padded = F.pad(x, (2**i, 0))
            h = torch.tanh(f(padded)) * torch.sigmoid(g(padded))
            skip = skip + s(h)
            x = x + r(h)
        return self.end(skip)


def wave_net_inputs():
    return [torch.randn(2, 1, 64), torch.randint(0, 16, (2, 64))]


def wave_net_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class TCN(nn.Module):
    """A temporal convolutional network with weight norm."""

    def __init__(self, channels=(4, 12, 12), kernel=3):
        super().__init__()
        self.convs = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(a, b, kernel, padding=(kernel - 1) * 2**i, dilation=2**i))
            for i, (a, b) in enumerate(pairwise(channels))
        )
        self.trims = [(kernel - 1) * 2**i for i in range(len(self.convs))]
        self.linear = nn.Linear(channels[-1], 3)

    def forward(self, x):
        for conv, trim in zip(self.convs, self.trims, strict=True):
            x = torch.relu(conv(x)[:, :, :-trim])
        return self.linear(x[:, :, -1])


def tcn_inputs():
    return [torch.randn(8, 4, 30), torch.randint(0, 3, (8,))]


def tcn_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class SelectiveScan(nn.Module):
    """Mamba's recurrence, step by step: input-dependent discretisation, softplus of the step size."""

    def __init__(self, dim=8, state=4):
        super().__init__()
        self.log_a = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(dim, 1))
        self.project = nn.Linear(dim, 2 * state + 1)
        self.bias = nn.Parameter(torch.full((dim,), -2.0))
        self.skip = nn.Parameter(torch.ones(dim))
        self.state = state

    def forward(self, x):
        b, length, dim = x.shape
        delta, input_, output = self.project(x).split([1, self.state, self.state], -1)
        delta = F.softplus(delta + self.bias)
        decay = torch.exp(-delta[..., None] * self.log_a.exp())
        driven = delta[..., None] * input_[:, :, None] * x[..., None]
        h, ys = x.new_zeros(b, dim, self.state), []
        for t in range(length):
            h = decay[:, t] * h + driven[:, t]
            ys.append((h * output[:, t, None]).sum(-1))
        return torch.stack(ys, 1) + self.skip * x


def selective_scan_inputs():
    return [torch.randn(2, 24, 8)]


class CumsumScan(nn.Module):
    """A diagonal linear recurrence by cumulative sums in log space (segsum), as the minimal Mamba-2 has it."""

    def __init__(self, dim=8):
        super().__init__()
        self.decay = nn.Linear(dim, dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x):
        log_a = -F.softplus(self.decay(x))
        total = log_a.cumsum(1)
        segments = total[:, :, None] - total[:, None]
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        kernel = segments.masked_fill(~mask[None, :, :, None], float("-inf")).exp()
        return torch.einsum("btsd,bsd->btd", kernel, self.mix(x))


def cumsum_scan_inputs():
    return [torch.randn(2, 20, 8)]


class FFTConvolution(nn.Module):
    """A long convolution by FFT (S4, Hyena): a kernel as long as the sequence."""

    def __init__(self, dim=6, length=64):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(dim, length) * torch.exp(-0.1 * torch.arange(length)))
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        size = 2 * x.shape[1]
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=size) * torch.fft.rfft(self.kernel, n=size)
        y = torch.fft.irfft(spectrum, n=size)[..., : x.shape[1]].transpose(1, 2)
        return y * torch.sigmoid(self.gate(x))


def fft_convolution_inputs():
    return [torch.randn(2, 64, 6)]


class FNet(nn.Module):
    """Token mixing by a two-dimensional Fourier transform, of which the real part stays."""

    def __init__(self, dim=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = self.norm1(torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real + x)
        return self.norm2(self.feed_forward(x) + x)


def f_net_inputs():
    return [torch.randn(4, 16, 32)]
