"""A word language model in the manner of torch's examples: a hidden state carried over, indices as batches."""

import torch
from torch import nn
from torch.nn import functional as F

import optexp

bptt, ntokens = 8, 40
torch.manual_seed(0)
train_data = torch.randint(ntokens, (200, 6))


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(ntokens, 24), nn.LSTM(24, 24), nn.Linear(24, ntokens)

    def forward(self, inputs, hidden):
        output, hidden = self.rnn(self.encoder(inputs), hidden)
        return F.log_softmax(self.decoder(output).view(-1, ntokens), dim=1), hidden

    def init_hidden(self, bsz):
        return torch.zeros(1, bsz, 24), torch.zeros(1, bsz, 24)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    return source[i : i + bptt], source[i + 1 : i + 1 + bptt].reshape(-1)


model = RNNModel()
lr = 0.5
optimizer = torch.optim.SGD(model.parameters(), lr=lr)


def train():
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(6)
    for batch, i in enumerate(optexp.steps(range(0, 192, bptt), model=model, optimizer=optimizer)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = F.nll_loss(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total_loss += loss.item()
        if batch % 10 == 0 and batch > 0:
            print(f"{batch} batches | loss {total_loss / 10:5.2f}")
            total_loss = 0


for epoch in range(2):
    train()
