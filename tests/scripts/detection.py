"""Detection with a collate function: images in a list, boxes and labels of each in a dict, different in number."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import optexp


class Boxes(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        count = 1 + index % 3
        target = {
            "boxes": torch.rand(count, 4, generator=generator),
            "labels": torch.randint(1, 5, (count,), generator=generator),
            "image_id": index,
        }
        return torch.rand(3, 16, 16, generator=generator), target


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.boxes, self.classes = nn.Linear(32, 4), nn.Linear(32, 5)

    def forward(self, images, targets):
        features = self.backbone(torch.stack(images))
        boxes = [self.boxes(f).expand_as(t["boxes"]) for f, t in zip(features, targets, strict=True)]
        logits = [self.classes(f).expand(len(t["labels"]), 5) for f, t in zip(features, targets, strict=True)]
        return {
            "loss_box_reg": F.smooth_l1_loss(torch.cat(boxes), torch.cat([t["boxes"] for t in targets])),
            "loss_classifier": F.cross_entropy(torch.cat(logits), torch.cat([t["labels"] for t in targets])),
        }


def train_one_epoch(model, optimizer, data_loader, device, epoch):
    model.train()
    for images, targets in optexp.steps(data_loader, model=model, optimizer=optimizer):
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) if hasattr(v, "to") else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    detector = Detector()
    sgd = torch.optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=0.005, momentum=0.9)
    loader = DataLoader(Boxes(), batch_size=4, shuffle=True, collate_fn=collate_fn)
    train_one_epoch(detector, sgd, loader, torch.device("cpu"), 0)
