"""Image classifiers and their building blocks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 32, 2), BasicBlock(32, 32))
        self.fc = nn.Linear(32, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def images(side=16, batch=8, classes=10):
    return [torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,))]


def res_net_inputs():
    return images()


def res_net_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)


def res_net_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1], label_smoothing=0.1)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduction=4):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = F.silu(self.fc1(scale), inplace=True)
        return x * torch.sigmoid(self.fc2(scale))


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, expand=4):
        super().__init__()
        hidden = inp * expand
        self.use_res = inp == oup
        self.conv = nn.Sequential(
            nn.Conv2d(inp, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish(),
            nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish(),
            SqueezeExcite(hidden),
            nn.Conv2d(hidden, oup, 1, bias=False), nn.BatchNorm2d(oup),
        )  # fmt: skip

    def forward(self, x):
        return x + self.conv(x) if self.use_res else self.conv(x)


class MobileNet(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard swish."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), InvertedResidual(8, 8), InvertedResidual(8, 16)
        )
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


def mobile_net_inputs():
    return images()


def mobile_net_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class ConvBnDropout(nn.Module):
    """LeNet's descendant in tutorials: a bias before each BatchNorm, dropout before the classifier."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(16 * 49, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return F.log_softmax(self.fc(self.drop(x.flatten(1))), dim=1)


def conv_bn_dropout_loader():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (256,), generator=generator)
    pictures = torch.randn(256, 1, 28, 28, generator=generator) + 0.1 * labels.view(-1, 1, 1, 1)
    return DataLoader(TensorDataset(pictures, labels), batch_size=16, shuffle=True, drop_last=True)


def conv_bn_dropout_loss(outputs, batch):
    return F.nll_loss(outputs, batch[1])


def conv_bn_dropout_optimizer(params):
    return torch.optim.Adam(params, lr=1e-3)


class BiasedConvNet(nn.Module):
    """Biases before batch norms whose gradients are sums of thousands of terms, and a mean over each picture."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.classify = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 10))

    def forward(self, x):
        return self.classify(self.features(x))


def biased_conv_net_inputs():
    return images(side=24, batch=16)


def biased_conv_net_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class Patches(nn.Module):
    def __init__(self, side=16, patch=4, dim=32):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, dim))

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        return torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed


class ViT(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4):
        super().__init__()
        self.patches = Patches(dim=dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        return self.head(self.norm(self.encoder(self.patches(x)))[:, 0])


def vi_t_inputs():
    return images()


def vi_t_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class MlpBlock(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Mixer(nn.Module):
    """MLP-Mixer: one MLP across tokens, one across channels."""

    def __init__(self, dim=32, tokens=16):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens, self.channels = MlpBlock(tokens, 2 * tokens), MlpBlock(dim, 4 * dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(dim=1))


def mixer_inputs():
    return images()


class ConvNeXtBlock(nn.Module):
    """Depthwise 7×7, LayerNorm over channels last, layer scale of 1e-6."""

    def __init__(self, dim=16):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        return shortcut + x.permute(0, 3, 1, 2)


def conv_ne_xt_block_inputs():
    return [torch.randn(2, 16, 16, 16)]


class SuperResolution(nn.Module):
    """ESPCN: sub-pixel convolution by pixel shuffle."""

    def __init__(self, upscale_factor=2):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, 1, 2)
        self.conv2 = nn.Conv2d(32, 16, 3, 1, 1)
        self.conv3 = nn.Conv2d(16, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)

    def forward(self, x):
        x = torch.tanh(self.conv1(x))
        x = torch.tanh(self.conv2(x))
        return torch.sigmoid(self.pixel_shuffle(self.conv3(x)))


def super_resolution_inputs():
    return [torch.rand(2, 1, 24, 24), torch.rand(2, 1, 48, 48)]


def super_resolution_loss(outputs, batch):
    return F.l1_loss(outputs, batch[1]) - 10 * torch.log10(1 / F.mse_loss(outputs, batch[1]).add(1e-8)) / 100


class SpatialTransformer(nn.Module):
    """A localisation network predicts an affine map; the image is resampled through it."""

    def __init__(self):
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(1, 8, 7),
            nn.MaxPool2d(2, 2),
            nn.ReLU(True),
            nn.Conv2d(8, 10, 5),
            nn.MaxPool2d(2, 2),
            nn.ReLU(True),
        )
        self.fc_loc = nn.Sequential(nn.Linear(10 * 3 * 3, 32), nn.ReLU(True), nn.Linear(32, 6))
        self.fc_loc[2].weight.data.mul_(0.1)
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def forward(self, x):
        theta = self.fc_loc(self.localization(x).flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


def spatial_transformer_inputs():
    return [torch.randn(4, 1, 28, 28)]


class OffsetSampling(nn.Module):
    """Deformable in spirit: each position samples the features at an offset of its own."""

    def __init__(self, channels=8):
        super().__init__()
        self.offset = nn.Conv2d(channels, 2, 3, padding=1)
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        ys, xs = torch.linspace(-1, 1, h, device=x.device), torch.linspace(-1, 1, w, device=x.device)
        base = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).to(x.dtype).expand(b, h, w, 2)
        offset = 0.2 * torch.tanh(self.offset(x)).permute(0, 2, 3, 1)
        return self.mix(F.grid_sample(x, base + offset, mode="bilinear", padding_mode="border", align_corners=True))


def offset_sampling_inputs():
    return [torch.randn(2, 8, 12, 12)]
