"""Sequence to sequence: an encoder and a decoder with an optimizer each, teacher forcing by chance."""

import random

import torch
from torch import nn
from torch.nn import functional as F

import optexp


class Encoder(nn.Module):
    def __init__(self, words, hidden):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(words, hidden), nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


class Decoder(nn.Module):
    def __init__(self, hidden, words):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(words, hidden), nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, words)

    def forward(self, token, hidden):
        output, hidden = self.gru(F.relu(self.embedding(token)), hidden)
        return self.out(output), hidden


def train(encoder, decoder, pairs, teacher_forcing_ratio=0.5):
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for source, target in optexp.steps(pairs, model=decoder, optimizer=decoder_optimizer):
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        _, hidden = encoder(source)
        token, loss = torch.zeros(len(source), 1, dtype=torch.long), 0
        forced = random.random() < teacher_forcing_ratio
        for place in range(target.shape[1]):
            logits, hidden = decoder(token, hidden)
            loss = loss + criterion(logits.squeeze(1), target[:, place])
            token = target[:, place : place + 1] if forced else logits.argmax(-1).detach()
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    data = [(torch.randint(30, (8, 6)), torch.randint(1, 30, (8, 5))) for _ in range(20)]
    train(Encoder(30, 24), Decoder(24, 30), data)
