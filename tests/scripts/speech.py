"""Speech recognition with CTC: spectrograms and transcripts padded by a collate function, lengths beside them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import optexp


class Utterances(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        frames = 24 + index % 5
        return torch.randn(frames, 12, generator=generator), torch.randint(1, 9, (3 + index % 3,), generator=generator)


def collate(batch):
    spectrograms = nn.utils.rnn.pad_sequence([s for s, _ in batch], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([t for _, t in batch], batch_first=True)
    return spectrograms, labels, [len(s) // 2 for s, _ in batch], [len(t) for _, t in batch]


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(12, 24, 3, stride=2, padding=1)
        self.rnn, self.out = nn.GRU(24, 16, bidirectional=True, batch_first=True), nn.Linear(32, 9)

    def forward(self, x):
        hidden, _ = self.rnn(F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2)))
        return self.out(hidden)


class IterMeter:
    def __init__(self):
        self.val = 0

    def step(self):
        self.val += 1


def train(model, train_loader, criterion, optimizer, scheduler, iter_meter):
    model.train()
    for batch_idx, _data in enumerate(optexp.steps(train_loader, model=model, optimizer=optimizer)):
        spectrograms, labels, input_lengths, label_lengths = _data
        optimizer.zero_grad()
        output = F.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        optimizer.step()
        scheduler.step()
        iter_meter.step()


torch.manual_seed(7)
net = Acoustic()
adamw = torch.optim.AdamW(net.parameters(), 5e-4)
cycle = torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=5e-4, total_steps=100_000)
train(net, DataLoader(Utterances(), 8, shuffle=True, collate_fn=collate), nn.CTCLoss(), adamw, cycle, IterMeter())
