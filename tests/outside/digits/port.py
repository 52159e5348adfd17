import torch
from script import ACCUMULATE, Digits, Net, smooth_and_sparse
from torch import nn
from torch.utils.data import DataLoader

Model = Net


def get_loader():
    return DataLoader(Digits(), batch_size=32 * ACCUMULATE, shuffle=True, num_workers=2, drop_last=True)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01)


def train_step(model, batch, optimizer):
    for images, labels in zip(*(part.chunk(ACCUMULATE) for part in batch), strict=True):
        (smooth_and_sparse(model(images), labels) / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
