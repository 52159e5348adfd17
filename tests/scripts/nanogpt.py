"""A character model in the manner of nanoGPT: get_batch, micro-steps, clipping, a learning rate per iteration."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import optexp

block_size, batch_size, vocab, n_embd, n_head = 16, 8, 32, 32, 4
gradient_accumulation_steps, max_iters, warmup_iters, learning_rate, grad_clip = 2, 12, 4, 1e-3, 1.0
torch.manual_seed(1337)
data = torch.randint(vocab, (4096,))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        heads = (t.unflatten(-1, (n_head, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, targets):
        logits = self.head(self.blocks(self.wte(idx) + self.wpe.weight[: idx.shape[1]]))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    return learning_rate * 0.5 * (1 + math.cos(math.pi * min(it, max_iters) / max_iters))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
iter_num = 0
for batches in optexp.steps(lambda: [get_batch() for _ in range(2)], model=model, optimizer=optimizer):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for X, Y in batches:
        logits, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 4 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break
