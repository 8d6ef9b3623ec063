"""What a training step costs with foreshock in it: `foreshock bench agent --json FILE`.

Three variants train the same weights in turn, block of steps by block of steps, in one process:
- none: PyTorch's attention, without any of us, once for each backend of it; the fastest one is `none`;
- kernels_agent: `attach(model, attention="kernels")` with everything on at its default schedule, and a service that is
  down, at an address where nobody listens;
- keep_agent: `attach(model)`, as most people call it, over the fastest of PyTorch's backends.
A figure is the median over the rounds of a block's mean step, from the block's first kernel to its last: a block is at
least as long as the time between two samples, so that each holds one. The mean over all blocks, with the spectral norms
of every hundredth step, is given too.
"""

import copy
import gc
import json
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.benchmarks import machine
from foreshock.lab.training.model import GPT, CausalSelfAttention, ModelConfig
from foreshock.monitor import Agent, attach
from foreshock.monitor.model.discovery import SDPA

BACKENDS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its batch of whole contexts."""

    name: str
    model: ModelConfig
    batch: int
    whole: bool
    """torch.compile over the whole model; else layer by layer, as large models are compiled."""
    block_steps: int = 10
    device: str = "cuda"


_GPT2 = ModelConfig(layers=12, heads=12, width=768, context=1024, vocabulary=50_304, matmul_dtype="bfloat16")
_LLAMA = ModelConfig(
    layers=16,
    heads=32,
    kv_heads=8,
    width=2048,
    hidden=8192,
    context=4096,
    vocabulary=128_256,
    qkv_bias=False,
    rotary=True,
    norm="rms",
    gated=True,
    matmul_dtype="bfloat16",
)
_MINI = ModelConfig(
    layers=6, heads=6, width=384, context=256, vocabulary=4096, attention_dtype="float32", matmul_dtype="float32"
)
SHAPES: Final = (
    Shape("gpt2-small", _GPT2, 32, whole=True, block_steps=20),
    Shape("llama-1b", _LLAMA, 4, whole=False),
    Shape("gpt2-mini", _MINI, 4, whole=True, device="cpu"),
)


class NativeAttention(CausalSelfAttention):
    """By one of PyTorch's backends, in a call that `attach` finds."""

    backend: SDPBackend

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The backend is chosen inside the graph: torch.compile does not look outside."""
        with sdpa_kernel(self.backend):
            return super().core(query, key, value)


class UnwatchedAttention(NativeAttention):
    """The same by PyTorch's own function, whatever its name is bound to while an agent is attached."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As in NativeAttention."""
        with sdpa_kernel(self.backend):
            return SDPA(query, key, value, is_causal=True, enable_gqa=self.n_head != self.n_kv_head)


FAST_BACKENDS: Final = {"cuda": ("flash", "cudnn", "efficient"), "cpu": ("flash", "math")}
WATCHED: Final = ("kernels_agent", "keep_agent")


@dataclass(slots=True)
class Variant:
    """One way to train the shared weights. `seconds` are the mean steps of its blocks."""

    name: str
    model: Callable[[Tensor, Tensor], Tensor]
    backend: str | None = None
    agent: Agent | None = None
    seconds: list[float] = field(default_factory=list)


class Bench:
    """The weights, their optimizer and the variants that train them."""

    def __init__(self, shape: Shape, compiler: str) -> None:
        torch.manual_seed(0)
        self.shape, self.device, self.compiler = shape, torch.device(shape.device), compiler
        with self.device:
            self.model = GPT(shape.model)
            self.ids = [torch.randint(shape.model.vocabulary, (shape.batch, shape.model.context + 1)) for _ in range(4)]
        self.weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4, fused=self.device.type == "cuda")
        self.variants: dict[str, Variant] = {}

    def variant(
        self,
        name: str,
        kind: type[CausalSelfAttention],
        backend: str | None,
        attached: Callable[[nn.Module], Agent] | None = None,
    ) -> None:
        """Add a variant over the same weights; one that fails says so and is left out."""
        model = copy.deepcopy(self.model, {id(p): p for p in self.weights})
        for module in model.modules():
            if isinstance(module, CausalSelfAttention):
                module.__class__ = kind
                if isinstance(module, NativeAttention):
                    module.backend = BACKENDS[str(backend)]
        agent = attached(model) if attached is not None else None
        if self.shape.whole:
            variant = Variant(name, torch.compile(model, fullgraph=True, backend=self.compiler), backend, agent)
        else:
            for block in model.h:
                block.compile(fullgraph=True, backend=self.compiler)
            variant = Variant(name, model, backend, agent)
        try:
            for ids in self.ids[:3]:
                self.step(variant, ids)
            self._wait()
        except Exception:  # a refusal is a result; the other variants go on
            print(f"{name} does not take {self.shape.name}:\n{traceback.format_exc()}", file=sys.stderr)
            self.optimizer.zero_grad()
        else:
            self.variants[name] = variant

    def step(self, variant: Variant, ids: Tensor) -> None:
        """One training step, as people write it."""
        loss = variant.model(ids[:, :-1], ids[:, 1:])
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if variant.agent is not None:
            variant.agent.step(loss, norm, 1e-4)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, rounds: int, steps: int) -> None:
        """Let every variant train a block of `steps`, `rounds` times over, from its first kernel to its last."""
        gc.collect()
        gc.disable()
        for round_ in range(rounds):
            variants = list(self.variants.values())
            for variant in (
                variants[round_ % len(variants) :] + variants[: round_ % len(variants)]
            ):  # no variant always follows the same one
                self.step(variant, self.ids[0])  # what the variant before it left in the caches
                self._wait()
                began = time.perf_counter()
                for index in range(steps):
                    self.step(variant, self.ids[index % len(self.ids)])
                self._wait()
                variant.seconds.append((time.perf_counter() - began) / steps)
        gc.enable()


@contextmanager
def nobody_listens() -> Iterator[dict[str, Any]]:
    """Settings of an agent whose service is down, so that sender, spool and retries are all at work."""
    with socket.create_server(("127.0.0.1", 0)) as unused, tempfile.TemporaryDirectory() as spool:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        unused.close()
        yield {"url": url, "spool_directory": spool, "run": "bench", "quiet": True, "strict": True}


def measure(shape: Shape, rounds: int, compiler: str = "inductor", variants: Sequence[str] = WATCHED) -> dict[str, Any]:
    """One shape's figures, in milliseconds a step; None for what is not in `variants`."""
    bench, steps = Bench(shape, compiler), shape.block_steps
    with ExitStack() as stack:
        settings = stack.enter_context(nobody_listens())

        def watched(**options: Any) -> Callable[[nn.Module], Agent]:
            return lambda model: stack.enter_context(attach(model, **settings, **options))

        for backend in FAST_BACKENDS[shape.device]:
            bench.variant(f"none_{backend}", UnwatchedAttention, backend)
        bench.run(1, steps)
        best = min(
            (variant for variant in bench.variants.values()), key=lambda variant: statistics.median(variant.seconds)
        )
        for variant in bench.variants.values():
            variant.seconds.clear()
        added: dict[str, tuple[Any, ...]] = {
            "kernels_agent": (CausalSelfAttention, None, watched(attention="kernels")),
            "keep_agent": (NativeAttention, best.backend, watched()),
        }
        for name in variants:
            bench.variant(name, *added[name])
        bench.run(rounds, steps)
        return _figures(bench, rounds, steps)


def _figures(bench: Bench, rounds: int, steps: int) -> dict[str, Any]:
    blocks = {name: [1e3 * value for value in variant.seconds] for name, variant in bench.variants.items()}
    medians = {name: statistics.median(values) for name, values in blocks.items()}
    means = {name: statistics.fmean(values) for name, values in blocks.items()}
    best = min((name for name in medians if name.startswith("none_")), key=medians.__getitem__)
    for values in (medians, means):
        values["none"] = values[best]

    def ratios(values: dict[str, float]) -> dict[str, float | None]:
        known = ((name, values.get(name)) for name in WATCHED)
        return {f"{name} / none": None if value is None else round(value / values["none"], 4) for name, value in known}

    return {
        "shape": asdict(bench.shape),
        "best_backend": best.removeprefix("none_"),
        **{name: round(medians[name], 3) if name in medians else None for name in ("none", *WATCHED)},
        "ratios": ratios(medians),
        "ratios_of_means": ratios(means),
        "backends": {name.removeprefix("none_"): round(medians[name], 3) for name in medians if name[:5] == "none_"},
        "means": {name: round(value, 3) for name, value in means.items()},
        "rounds": rounds,
        "block_steps": steps,
        "blocks": {name: [round(value, 3) for value in values] for name, values in blocks.items()},
    }


def main(
    json_path: Path | None = None, rounds: int = 12, only: str | None = None, variants: Sequence[str] = WATCHED
) -> None:
    """Measure a shape, or those of the GPU; print their figures, and write them to `json_path`."""
    if unknown := set(variants) - set(WATCHED):
        raise ValueError(f"variant {min(unknown)!r} does not exist; allowed are {', '.join(WATCHED)}")
    chosen = [shape for shape in SHAPES if (shape.device == "cuda" if only is None else shape.name == only)]
    if not chosen:
        raise ValueError(f"shape {only!r} does not exist; allowed are {', '.join(shape.name for shape in SHAPES)}")
    if chosen[0].device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "foreshock bench agent needs a CUDA GPU, and this machine has none that PyTorch sees; "
            "--shape gpt2-mini runs on a CPU"
        )
    # A graph that was traced under one backend of SDPA would be taken for the other's (pytorch #185449).
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.recompile_limit = 32  # the variants are graphs of the same code
    shapes = []
    for shape in chosen:
        torch.compiler.reset()
        measured = measure(shape, rounds, variants=variants)
        asked = "".join(f" --variant {name}" for name in variants if tuple(variants) != WATCHED)
        measured["command"] = f"foreshock bench agent --rounds {rounds} --shape {shape.name}{asked}"
        shapes.append(measured)
        print(json.dumps({k: v for k, v in measured.items() if k not in ("blocks", "shape")}, indent=1))
        if json_path is not None:
            unit = "milliseconds a training step, median over rounds of a block's mean"
            header = machine.header("foreshock bench agent --json FILE")
            json_path.write_text(json.dumps(header | {"unit": unit, "shapes": shapes}, indent=1) + "\n")
        gc.collect()
        if shape.device == "cuda":
            torch.cuda.empty_cache()
