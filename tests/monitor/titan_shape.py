"""A Trainer with torchtitan's interface and a tiny model with its module names; torchtitan itself needs a GPU.

It has model_parts, optimizers, checkpointer, forward_backward_step, train and close, like torchtitan 0.3.0.
`python -P titan_shape.py --url URL` trains it with foreshock.
"""

import argparse
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from foreshock.monitor.callbacks.torchtitan import watch


class ScaledDotProductAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # [B, L, N, H] each
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


class QKVLinear(nn.Module):
    def __init__(self, width: int, kv_width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv_width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.unflatten(w(x), 2, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))


class GQAttention(nn.Module):
    def __init__(self, width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, width // n_heads
        self.qkv_linear = QKVLinear(width, n_kv_heads * self.head_dim, self.head_dim)
        self.inner_attention = ScaledDotProductAttention()
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.inner_attention(*self.qkv_linear(x)).flatten(2))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = GQAttention(width, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, width)
        self.layers = nn.ModuleDict({str(n): TransformerBlock(width) for n in range(layers)})
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


class OptimizersContainer(Optimizer):
    """Several optimizers that step as one."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
        Optimizer.__init__(self, [p for part in parts for p in part.parameters()], {})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class CheckpointManager:
    """Saves the model every `interval` steps to `folder`/step-N, and loads the last checkpoint or a given one.
    Deletes all paths named step-N except the newest `keep_latest_k`; 0 keeps all."""

    last_save_model_only = False
    keep_latest_k = 0

    def __init__(self, trainer: "Trainer", folder: Path, interval: int) -> None:
        self.trainer, self.folder, self.interval = trainer, str(folder), interval

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step % self.interval and not last_step:
            return False
        at = Path(self.folder) / f"step-{curr_step}"
        at.mkdir(parents=True, exist_ok=True)
        optimizer = self.trainer.optimizers.optimizers[0]
        state = {"model": self.trainer.model_parts[0].state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"step": curr_step}, at / "state.pt")
        named = [
            (int(found[1]), path) for path in at.parent.iterdir() if (found := re.search(r"step-(\d+)", path.name))
        ]
        for _, old in sorted(named)[: -self.keep_latest_k] if self.keep_latest_k else ():
            shutil.rmtree(old)
        return True

    def load(self, step: int = -1) -> bool:
        known = {int(path.name[5:]): path for path in Path(self.folder).glob("step-*")}
        found = known.get(max(known, default=-1) if step < 0 else step)
        if found is None:
            return False
        state = torch.load(found / "state.pt", weights_only=True)
        self.trainer.model_parts[0].load_state_dict(state["model"])
        self.trainer.optimizers.optimizers[0].load_state_dict(state["optimizer"])
        self.trainer.step = state["step"]
        return True


class Trainer:
    """A trainer with torchtitan's interface."""

    def __init__(self, steps: int, folder: Path, *, interval: int = 20, accumulation: int = 1) -> None:
        torch.manual_seed(0)
        self.config = SimpleNamespace(training=SimpleNamespace(steps=steps))
        self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1, cp=1)
        self.model_parts: list[nn.Module] = [Decoder()]
        self.optimizers = OptimizersContainer(self.model_parts)
        self.checkpointer = CheckpointManager(self, folder, interval)
        self.gradient_accumulation_steps = accumulation
        self.step = 0
        self.text = torch.tensor(list(Path(random.__file__).read_bytes()))

    def batch(self, index: int) -> Tensor:
        starts = torch.randint(len(self.text) - 65, (4,), generator=torch.Generator().manual_seed(index))
        return torch.stack([self.text[start : start + 65] for start in starts.tolist()])

    def forward_backward_step(self, *, input_dict: dict[str, Tensor], labels: Tensor) -> Tensor:
        prediction = self.model_parts[0](input_dict["input"])
        loss = F.cross_entropy(prediction.flatten(0, 1), labels.flatten()) / self.gradient_accumulation_steps
        torch.autograd.backward(loss)
        return loss

    def train_step(self) -> None:
        self.optimizers.zero_grad()
        for part in range(self.gradient_accumulation_steps):
            tokens = self.batch(self.step * self.gradient_accumulation_steps + part)
            self.forward_backward_step(input_dict={"input": tokens[:, :-1]}, labels=tokens[:, 1:])
        torch.nn.utils.clip_grad_norm_([p for part in self.model_parts for p in part.parameters()], 1.0)
        self.optimizers.step()

    def train(self) -> None:
        self.checkpointer.load(step=getattr(getattr(self.config, "checkpoint", None), "load_step", -1))
        while self.step < self.config.training.steps:
            self.step += 1
            self.train_step()
            self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)

    def close(self) -> None:
        """torchtitan closes its loggers and its checkpointer here."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default=None, help="address of a foreshock service")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--output", type=Path, default=Path("titan-output"), help="where checkpoints are put")
    chosen = options.parse_args()

    trainer = Trainer(chosen.steps, chosen.output)
    watch(trainer, run="titan", url=chosen.url, policy="auto")  # the one line
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
