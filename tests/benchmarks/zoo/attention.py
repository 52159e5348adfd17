"""Transformers and their attention: masked, rotary, ALiBi, windowed, cross, cached."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd=32, n_head=4, block_size=64):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, n_embd=32):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(approximate="tanh"), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """minGPT with the embedding tied to the head; a training step with micro-batches and clipping."""

    def __init__(self, vocab_size=65, block_size=32, n_embd=32, n_layer=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(GPTBlock(n_embd) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def gpt_inputs():
    tokens = torch.randint(0, 65, (8, 33))
    return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


def gpt_optimizer(params):
    params = list(params)
    decay = [p for p in params if p.dim() >= 2]
    rest = [p for p in params if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


def gpt_train_step(model, batch, optimizer):
    tokens, targets = batch
    total = 0.0
    for x, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
        loss = F.cross_entropy(model(x).view(-1, 65), y.reshape(-1)) / 2
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Llama(nn.Module):
    """One LLaMA layer: RMSNorm, rotary embedding, grouped queries, SwiGLU."""

    def __init__(self, dim=32, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, 3 * dim, bias=False)
        self.w2 = nn.Linear(3 * dim, dim, bias=False)
        inv_freq = 1.0 / (10000 ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.attention_norm(x)
        q = self.wq(h).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.wk(h).view(b, t, self.kv_heads, -1).transpose(1, 2)
        v = self.wv(h).view(b, t, self.kv_heads, -1).transpose(1, 2)
        angles = torch.outer(torch.arange(t, device=x.device, dtype=self.inv_freq.dtype), self.inv_freq)
        emb = torch.cat((angles, angles), dim=-1)
        cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(out.transpose(1, 2).reshape(b, t, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def llama_inputs():
    return [torch.randn(2, 24, 32)]


class ComplexRotary(nn.Module):
    """Rotary embedding by complex numbers, as the first LLaMA has it."""

    def __init__(self, dim=16, length=32, theta=10000.0):
        super().__init__()
        freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
        self.register_buffer("angles", torch.outer(torch.arange(length).float(), freqs))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        x = self.proj(x)
        freqs_cis = torch.polar(torch.ones_like(self.angles), self.angles)
        x_ = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(x_ * freqs_cis).flatten(2)


def complex_rotary_inputs():
    return [torch.randn(4, 32, 16)]


class AlibiAttention(nn.Module):
    """Causal attention with linear biases, one slope a head."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.register_buffer("slopes", torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)]))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        position = torch.arange(t, device=x.device)
        distance = (position[None, :] - position[:, None]).to(x.dtype)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads) + self.slopes[:, None, None] * distance
        scores = scores + torch.full((t, t), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def alibi_attention_inputs():
    return [torch.randn(2, 20, 32)]


class WindowAttention(nn.Module):
    """Swin: windows of the image, a learned relative bias, shifted windows by roll and a mask."""

    def __init__(self, dim=16, window=4, heads=2, shift=2, side=8):
        super().__init__()
        self.window, self.heads, self.shift, self.side = window, heads, shift, side
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        region = torch.zeros(1, side, side, 1)
        slices = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
        for number, (h, w) in enumerate((h, w) for h in slices for w in slices):
            region[:, h, w] = number
        ids = self.split(region).squeeze(-1)
        self.register_buffer("mask", (ids[:, None, :] != ids[:, :, None]).float() * -100.0)

    def split(self, x):
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def forward(self, x):
        b, h, w, c = x.shape
        windows = self.split(torch.roll(x, (-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(windows).view(len(windows), -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attention = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(self.window**2, self.window**2, -1).permute(2, 0, 1)
        attention = attention + bias
        attention = attention.view(b, -1, self.heads, *attention.shape[-2:]) + self.mask[:, None]
        out = (attention.flatten(0, 1).softmax(-1) @ v).transpose(1, 2).reshape(len(windows), -1, c)
        out = self.proj(out).view(b, h // self.window, w // self.window, self.window, self.window, c)
        out = out.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(out, (self.shift, self.shift), (1, 2))


def window_attention_inputs():
    return [torch.randn(2, 8, 8, 16)]


class CrossAttention(nn.Module):
    """A decoder layer with a padding mask over the memory (True: padding)."""

    def __init__(self, dim=32):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, target, memory, padding):
        size = target.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=target.device).triu(1)
        return self.layer(target, memory, tgt_mask=causal, memory_key_padding_mask=padding)


def cross_attention_inputs():
    lengths = torch.randint(4, 13, (3,))
    return [torch.randn(3, 10, 32), torch.randn(3, 12, 32), torch.arange(12)[None] >= lengths[:, None]]


class LinearAttention(nn.Module):
    """Kernel feature map elu + 1, normalised by the sum of keys; an eps in the denominator."""

    def __init__(self, dim=32, heads=4, eps=1e-6):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhtd,bhte->bhde", k, v)
        z = 1 / (torch.einsum("bhtd,bhd->bht", q, k.sum(2)) + self.eps)
        return self.out(torch.einsum("bhtd,bhde,bht->bthe", q, kv, z).flatten(2))


def linear_attention_inputs():
    return [torch.randn(2, 40, 32)]


class CheckpointedEncoder(nn.Module):
    """Activation checkpointing over blocks of pre-norm attention."""

    def __init__(self, dim=32, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


def checkpointed_encoder_inputs():
    return [torch.randn(4, 12, 32), torch.randn(4, 12, 32)]


def checkpointed_encoder_loss(outputs, batch):
    return F.mse_loss(outputs, batch[1])


class CachedDecoding(nn.Module):
    """One token against a key and value cache that is written at a given position."""

    def __init__(self, dim=32, rows=16):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.register_buffer("keys", torch.zeros(2, rows, dim))
        self.register_buffer("values", torch.zeros(2, rows, dim))

    def forward(self, token, position):
        self.keys.index_copy_(1, position, self.k(token).detach())
        self.values.index_copy_(1, position, self.v(token).detach())
        seen = torch.arange(self.keys.shape[1], device=token.device) <= position
        scores = (self.q(token) @ self.keys.transpose(1, 2)) / 32**0.5
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ self.values


def cached_decoding_inputs():
    return [torch.randn(2, 1, 32), torch.randint(0, 16, (1,))]


class CountedDecoding(nn.Module):
    """The same with the position kept in a Python integer, as generation loops do."""

    def __init__(self, dim=32, rows=16):
        super().__init__()
        self.key, self.query = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.register_buffer("cache", torch.zeros(2, rows, dim))
        self.rows, self.position = rows, 0

    def forward(self, token):
        self.cache[:, self.position % self.rows] = self.key(token)[:, 0].detach()
        self.position += 1
        return (self.query(token) @ self.cache.transpose(1, 2)).softmax(-1) @ self.cache


def counted_decoding_inputs():
    return [torch.randn(2, 1, 32)]


class SinusoidalEncoder(nn.Module):
    """Fixed sinusoidal positions; a padding mask; mean over what is no padding."""

    def __init__(self, vocabulary=100, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, padding_idx=0)
        position = torch.arange(32).unsqueeze(1)
        div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table = torch.zeros(32, dim)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
        self.register_buffer("table", table)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)

    def forward(self, tokens):
        padding = tokens == 0
        padding = padding & (padding.cumsum(1) < tokens.shape[1])  # never everything
        x = self.embed(tokens) * math.sqrt(self.table.shape[1]) + self.table[: tokens.shape[1]]
        x, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        keep = (~padding).unsqueeze(-1).to(x.dtype)
        return (x * keep).sum(1) / keep.sum(1).clamp(min=1e-9)


def sinusoidal_encoder_inputs():
    return [torch.randint(0, 100, (4, 20))]


class RegisteredRotary(nn.Module):
    """Rotary tables that the forward registers as buffers, and again where a sequence is longer."""

    def __init__(self, dim=16):
        super().__init__()
        self.query, self.head = nn.Linear(dim, dim), nn.Linear(dim, 5)
        self.cached = 0

    def tables(self, length, like):
        if length > self.cached:
            half = like.shape[-1] // 2
            frequency = 10000 ** (-torch.arange(half, device=like.device).to(like.dtype) / half)
            angle = torch.outer(torch.arange(length, device=like.device).to(like.dtype), frequency).repeat(1, 2)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)
            self.cached = length
        return self.cos[:length], self.sin[:length]

    def forward(self, x):
        query = self.query(x)
        cos, sin = self.tables(x.shape[1], query.float() if query.dtype is torch.bfloat16 else query)
        return self.head(query * cos + rotate_half(query) * sin).mean(1)


def registered_rotary_inputs():
    return [torch.randn(4, 6, 16), torch.randint(0, 5, (4,))]


def registered_rotary_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


MODES = {"CachedDecoding": ("forward",), "CountedDecoding": ("forward",)}
