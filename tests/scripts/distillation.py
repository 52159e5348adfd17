"""Distillation: a frozen teacher, soft targets at a temperature, labels beside them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import optexp


def mlp(width):
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 5))


def train_knowledge_distillation(teacher, student, train_loader, epochs, T, soft_weight, device):
    ce_loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    teacher.eval()
    student.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in optexp.steps(train_loader, model=student, optimizer=optimizer):
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
            loss = soft_weight * soft_loss + (1 - soft_weight) * ce_loss(student_logits, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(train_loader)}")


if __name__ == "__main__":
    torch.manual_seed(42)
    data = TensorDataset(torch.randn(96, 20), torch.randint(5, (96,)))
    train_knowledge_distillation(mlp(64), mlp(16), DataLoader(data, 24, shuffle=True), 2, 2, 0.25, "cpu")
