"""Greedy generation with a cache of keys and values, in inference."""

import torch
from torch import nn
from torch.nn import functional as F

import optexp


class Decoder(nn.Module):
    def __init__(self, vocab=48, dim=32):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(vocab, dim), nn.Linear(dim, 3 * dim)
        self.mlp, self.head = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)), nn.Linear(dim, vocab)

    def forward(self, ids, cache=None):
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.head(x + self.mlp(x)), (k, v)


@torch.no_grad()
def generate(model, prompts, new_tokens):
    answers = []
    for prompt in optexp.steps(prompts, model=model):
        ids, cache, tokens = prompt, None, [prompt]
        for _ in range(new_tokens):
            logits, cache = model(ids, cache)
            ids = logits[:, -1:].argmax(-1)
            tokens.append(ids)
        completed = torch.cat(tokens, 1)
        answers.append(completed)
    return answers


if __name__ == "__main__":
    torch.manual_seed(0)
    decoder = Decoder().eval()
    print(len(generate(decoder, [torch.randint(48, (2, 8)) for _ in range(10)], 6)))
