"""Mixed precision by hand: autocast around the forward pass, a GradScaler, a fused optimizer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import optexp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 32), torch.randint(4, (128,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
loss_fn = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

for epoch in range(1):
    for input, target in optexp.steps(loader, model=net, optimizer=opt):
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            output = net(input.to(device))
            loss = loss_fn(output, target.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    print(epoch, loss.item())
