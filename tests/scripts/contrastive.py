"""Contrastive learning in the manner of CLIP: two towers, a learned temperature, labels from positions."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import optexp


class TwoTowers(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.GELU(), nn.Linear(32, dim))
        self.text = nn.EmbeddingBag(60, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def encode(self, images, texts):
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)

    def forward(self, images, texts):
        image_features, text_features = self.encode(images, texts)
        return self.logit_scale.exp() * image_features @ text_features.T


if __name__ == "__main__":
    torch.manual_seed(0)
    pairs = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(60, (64, 5)))
    loader = DataLoader(pairs, batch_size=16, shuffle=True, drop_last=True)
    model = TwoTowers()
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
    for images, texts in optexp.steps(loader, model=model, optimizer=optimizer):
        logits = model(images, texts)
        labels = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
