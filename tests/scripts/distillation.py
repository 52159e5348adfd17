"""Distillation: a frozen teacher, and a projection of features that the student's optimizer trains with it."""

import torch
import torch.nn.functional as F
from torch import nn

import optexp


class CNN(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.BatchNorm2d(width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.SiLU(),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        features = self.body(x).mean((-1, -2))
        return self.head(features), features


def distillation_loss(student, teacher, labels, T=4.0):
    soft = F.kl_div(F.log_softmax(student / T, 1), F.softmax(teacher / T, 1), reduction="batchmean") * T * T
    return 0.7 * soft + 0.3 * F.cross_entropy(student, labels)


def main():
    torch.manual_seed(3)
    teacher, student, project = CNN(12).eval(), CNN(4), nn.Linear(8, 24)
    optimizer = torch.optim.SGD([*student.parameters(), *project.parameters()], lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    data = [(torch.rand(16, 1, 12, 12), torch.randint(0, 10, (16,))) for _ in range(12)]
    for images, labels in optexp.steps(data, model=student, optimizer=optimizer):
        with torch.no_grad():
            goal, hint = teacher(images)
        logits, features = student(images)
        loss = distillation_loss(logits, goal, labels) + 0.1 * F.mse_loss(project(features), hint)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


if __name__ == "__main__":
    main()
