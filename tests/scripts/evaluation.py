"""An evaluation loop: no gradients, counts of hits, results collected in a list."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import optexp


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    correct = total = 0
    predictions = []
    for images, labels in optexp.steps(loader, model=model):
        scores = model(images.to(device)).softmax(1)
        predictions.append(scores.argmax(1))
        correct += (predictions[-1] == labels.to(device)).sum().item()
        total += len(labels)
    return correct / total, torch.cat(predictions)


if __name__ == "__main__":
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    images = TensorDataset(torch.rand(96, 3, 8, 8), torch.randint(10, (96,)))
    print(evaluate(network, DataLoader(images, batch_size=16), "cpu")[0])
