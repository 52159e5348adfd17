"""Skip-gram with negative samples, drawn by numpy for each batch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import optexp

vocabulary, dim, window, negatives = 100, 16, 2, 5


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Embedding(vocabulary, dim), nn.Embedding(vocabulary, dim)

    def forward(self, u, v, neg):
        emb_u, emb_v, emb_neg = self.u(u), self.v(v), self.v(neg)
        score = F.logsigmoid((emb_u * emb_v).sum(1).clamp(-10, 10))
        neg_score = F.logsigmoid(-torch.bmm(emb_neg, emb_u.unsqueeze(2)).clamp(-10, 10).squeeze(2)).sum(1)
        return -(score + neg_score).mean()


def batches(corpus, size):
    for _ in range(30):
        centers = np.random.randint(window, len(corpus) - window, size)
        contexts = corpus[centers + np.random.choice([-2, -1, 1, 2], size)]
        noise = np.random.randint(0, vocabulary, (size, negatives))
        yield torch.from_numpy(corpus[centers]), torch.from_numpy(contexts), torch.from_numpy(noise)


if __name__ == "__main__":
    np.random.seed(0)
    torch.manual_seed(0)
    corpus = np.random.zipf(1.5, 2000) % vocabulary
    skip_gram = SkipGram()
    optimizer = torch.optim.Adagrad(skip_gram.parameters(), lr=0.05)
    running_loss = 0.0
    for i, (u, v, neg) in enumerate(optexp.steps(batches(corpus, 32), model=skip_gram, optimizer=optimizer)):
        optimizer.zero_grad()
        loss = skip_gram(u, v, neg)
        loss.backward()
        optimizer.step()
        running_loss = running_loss * 0.9 + loss.item() * 0.1
        if i > 0 and i % 10 == 0:
            print("loss:", running_loss)
