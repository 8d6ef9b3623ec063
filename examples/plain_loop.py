"""Use foreshock in a custom training loop: call `attach` before it, and `agent.step` after every optimizer step.

    python examples/plain_loop.py                               # detects and switches without a service
    python examples/plain_loop.py --url http://127.0.0.1:8765   # also shows the run: start `foreshock serve` first

The attention below is nanoGPT's: it calls F.scaled_dot_product_attention and does not depend on foreshock.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreshock.monitor import attach


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.c_proj(out.transpose(1, 2).reshape(batch, length, width))
        return result


class Model(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(F.layer_norm(x, x.shape[-1:]))
        result: Tensor = self.out(x)
        return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default=None, help="address of a foreshock service")
    options.add_argument("--steps", type=int, default=200)
    chosen = options.parse_args()

    text = torch.tensor(list(Path(random.__file__).read_bytes()))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with attach(model, run="plain-loop", url=chosen.url, policy="auto") as agent:  # attaches foreshock
        for step in range(1, chosen.steps + 1):
            starts = torch.randint(len(text) - 65, (8,))
            batch = torch.stack([text[start : start + 65] for start in starts.tolist()])
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            agent.step(loss, grad_norm=norm, learning_rate=1e-3)
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
