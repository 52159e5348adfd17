"""A U-Net with a dice loss, a poly learning rate per iteration, and a dict from the data set."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import optexp


class Masks(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(index))
        return {"image": image, "mask": (image.mean(0) > 0.5).long(), "name": f"image-{index}"}


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 2, 1)

    def forward(self, x):
        first = self.down(x)
        return self.out(torch.cat([first, self.up(self.middle(first))], 1))


def dice_loss(logits, mask):
    probabilities, target = logits.softmax(1)[:, 1], mask.float()
    return 1 - (2 * (probabilities * target).sum() + 1) / (probabilities.sum() + target.sum() + 1)


def train_model(model, device, epochs=2, max_iterations=8):
    loader = DataLoader(Masks(), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    global_step = 0
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in optexp.steps(loader, model=model, optimizer=optimizer):
            images, true_masks = batch["image"].to(device), batch["mask"].to(device)
            masks_pred = model(images)
            loss = F.cross_entropy(masks_pred, true_masks) + dice_loss(masks_pred, true_masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            global_step += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 - min(global_step, 100) / 200) ** 0.9


train_model(UNet(), torch.device("cpu"))
