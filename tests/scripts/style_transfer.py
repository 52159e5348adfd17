"""Fast style transfer: a network of features without gradients, Gram matrices, several losses."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import optexp


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.requires_grad_(False)

    def forward(self, x):
        first = self.first(x)
        return first, self.second(first)


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


torch.manual_seed(42)
transformer = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU())
transformer.append(nn.Conv2d(8, 3, 3, padding=1))
optimizer = optim.Adam(transformer.parameters(), 1e-3)
vgg = Features()
style = torch.rand(1, 3, 12, 12)
gram_style = [gram_matrix(y) for y in vgg(style.expand(4, -1, -1, -1))]
train_loader = DataLoader(torch.rand(32, 3, 12, 12), batch_size=4, shuffle=True)
agg_content_loss = agg_style_loss = 0.0
for x in optexp.steps(train_loader, model=transformer, optimizer=optimizer):
    optimizer.zero_grad()
    y = transformer(x)
    features_y, features_x = vgg(y), vgg(x)
    content_loss = 10.0 * F.mse_loss(features_y[1], features_x[1])
    style_loss = 0.0
    for ft_y, gm_s in zip(features_y, gram_style, strict=True):
        style_loss += F.mse_loss(gram_matrix(ft_y), gm_s)
    total_loss = content_loss + 100.0 * style_loss
    total_loss.backward()
    optimizer.step()
    agg_content_loss += content_loss.item()
    agg_style_loss += style_loss.item()
print(agg_content_loss, agg_style_loss)
