"""Segmentation and detection networks, small, as their repositories write them."""

import torch
import torch.nn.functional as F
from torch import nn


class DoubleConv(nn.Module):
    """(convolution => BatchNorm => activation) * 2; the convolutions keep their bias, which BatchNorm cancels."""

    def __init__(self, in_channels, out_channels, activation=nn.ReLU):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_channels),
            activation(),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_channels),
            activation(),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels=3, n_classes=4, width=8, activation=nn.ReLU):
        super().__init__()
        self.inc = DoubleConv(n_channels, width, activation)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width, activation))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width, activation))
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(4 * width, 2 * width, activation)
        self.up2 = nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
        self.conv2 = DoubleConv(2 * width, width, activation)
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def u_net_inputs():
    return [torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32))]


def dice_loss(logits, target, smooth=1e-6):
    probabilities = logits.softmax(1)
    one_hot = F.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).to(logits.dtype)
    intersection = (probabilities * one_hot).sum((0, 2, 3))
    union = probabilities.sum((0, 2, 3)) + one_hot.sum((0, 2, 3))
    return 1 - ((2 * intersection + smooth) / (union + smooth)).mean()


def u_net_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1]) + dice_loss(outputs, batch[1])


class UNetSoftmax(UNet):
    """The variant with a softmax over the width in place of each ReLU."""

    def __init__(self):
        super().__init__(width=16, activation=lambda: nn.Softmax(dim=-1))


def u_net_softmax_inputs():
    return [torch.rand(1, 3, 16, 64)]


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling, with the pooled branch upsampled."""

    def __init__(self, in_channels=8, out_channels=8, rates=(1, 2, 4)):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 3, padding=rate, dilation=rate, bias=False),
                nn.BatchNorm2d(out_channels),
                nn.ReLU(inplace=True),
            )
            for rate in rates
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_channels, out_channels, 1), nn.ReLU())
        self.project = nn.Conv2d(out_channels * (len(rates) + 1), out_channels, 1)

    def forward(self, x):
        features = [branch(x) for branch in self.branches]
        pooled = F.interpolate(self.pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.project(torch.cat([*features, pooled], 1))


class DeepLab(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.aspp = ASPP()
        self.classifier = nn.Conv2d(8, classes, 1)

    def forward(self, x):
        size = x.shape[-2:]
        x = self.classifier(self.aspp(self.backbone(x)))
        return {"out": F.interpolate(x, size=size, mode="bilinear", align_corners=False)}


def deep_lab_inputs():
    return [torch.randn(2, 3, 32, 32), torch.randint(0, 5, (2, 32, 32))]


def deep_lab_loss(outputs, batch):
    return F.cross_entropy(outputs["out"], batch[1], ignore_index=0)


class RetinaHead(nn.Module):
    """A detection head over a pyramid: class logits and boxes of every level, flattened and joined."""

    def __init__(self, channels=16, anchors=3, classes=4):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, channels, 1) for c in (8, 16))
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.SiLU())
        self.deeper = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.SiLU())
        self.classify = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(),
            nn.Conv2d(channels, anchors * classes, 3, padding=1),
        )  # fmt: skip
        self.regress = nn.Conv2d(channels, anchors * 4, 3, padding=1)
        self.classes = classes

    def forward(self, images):
        c3 = self.stem(images)
        c4 = self.deeper(c3)
        p4 = self.lateral[1](c4)
        p3 = self.lateral[0](c3) + F.interpolate(p4, scale_factor=2, mode="nearest")
        logits, boxes = [], []
        for level in (p3, p4):
            logits.append(self.classify(level).permute(0, 2, 3, 1).reshape(len(images), -1, self.classes))
            boxes.append(self.regress(level).permute(0, 2, 3, 1).reshape(len(images), -1, 4))
        return torch.cat(logits, 1), torch.cat(boxes, 1).exp().clamp(max=1000.0)


def retina_head_inputs():
    return [torch.randn(2, 3, 32, 32), (torch.rand(2, 960, 4) < 0.05).float(), torch.rand(2, 960, 4)]


def focal_loss(logits, targets, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
    return (alpha_t * ce * (1 - p_t) ** gamma).sum() / targets.sum().clamp(min=1)


def retina_head_loss(outputs, batch):
    logits, boxes = outputs
    _, labels, target = batch
    positive = labels.sum(-1) > 0
    return focal_loss(logits, labels) + F.smooth_l1_loss(boxes[positive], target[positive], beta=0.1)


class BoxDecoder(nn.Module):
    """Anchor boxes: deltas to corners, pairwise IoU, and the best anchor of each ground truth."""

    def forward(self, anchors, deltas, truth):
        width, height = anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]
        cx = anchors[:, 0] + 0.5 * width + deltas[:, 0] * width
        cy = anchors[:, 1] + 0.5 * height + deltas[:, 1] * height
        w, h = width * deltas[:, 2].clamp(max=4.135).exp(), height * deltas[:, 3].clamp(max=4.135).exp()
        boxes = torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], -1)
        lt = torch.max(boxes[:, None, :2], truth[None, :, :2])
        rb = torch.min(boxes[:, None, 2:], truth[None, :, 2:])
        inter = (rb - lt).clamp(min=0).prod(-1)
        area = w * h
        truth_area = (truth[:, 2:] - truth[:, :2]).prod(-1)
        iou = inter / (area[:, None] + truth_area - inter)
        best, index = iou.max(0)
        return boxes, best, index


def box_decoder_inputs():
    corner = torch.rand(64, 2) * 50
    truth = torch.rand(5, 2) * 50
    return [
        torch.cat([corner, corner + 5 + 20 * torch.rand(64, 2)], 1),
        0.1 * torch.randn(64, 4),
        torch.cat([truth, truth + 5 + 20 * torch.rand(5, 2)], 1),
    ]


MODES = {"BoxDecoder": ("forward",), "UNetSoftmax": ("forward", "train")}


class YoloHead(nn.Module):
    """A grid of predictions: offsets within a cell by sigmoid, sizes by exponential of priors."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.1),
            nn.Conv2d(16, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.LeakyReLU(0.1),
            nn.Conv2d(24, 3 * 7, 1),
        )  # fmt: skip
        self.register_buffer("anchors", torch.tensor([[1.0, 1.5], [2.0, 1.0], [3.0, 3.0]]))

    def forward(self, x):
        raw = self.body(x)
        b, _, h, w = raw.shape
        raw = raw.view(b, 3, 7, h, w).permute(0, 1, 3, 4, 2)
        grid_y, grid_x = torch.meshgrid(
            torch.arange(h, device=x.device), torch.arange(w, device=x.device), indexing="ij"
        )
        grid = torch.stack([grid_x, grid_y], -1).to(raw.dtype)
        xy = raw[..., :2].sigmoid() + grid
        wh = raw[..., 2:4].exp() * self.anchors[:, None, None]
        return torch.cat([xy, wh, raw[..., 4:].sigmoid()], -1)


def yolo_head_inputs():
    return [torch.randn(2, 3, 32, 32)]
