"""A loop with Accelerate: prepare(), accumulate(), backward(), clip_grad_norm_()."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import optexp


def training_function(config):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(config["seed"])
    data = TensorDataset(torch.randn(128, 16), torch.randint(3, (128,)))
    train_dataloader = DataLoader(data, shuffle=True, batch_size=8, drop_last=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for inputs, targets in optexp.steps(train_dataloader, model=model, optimizer=optimizer, every=2):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item()}")


if __name__ == "__main__":
    training_function({"lr": 1e-3, "num_epochs": 1, "seed": 0})
