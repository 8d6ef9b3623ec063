"""Cost of a training step with foreshock: `foreshock bench agent --json FILE`.

Three variants train the same weights in one process, and take turns after each block of steps:
- none: PyTorch's attention without foreshock, measured for each of its backends; the fastest one counts as `none`;
- kernels_agent: `attach(model, attention="kernels")` with default settings, and the address of a service that is down;
- keep_agent: `attach(model)`, the default, with the fastest of PyTorch's backends.
The result is the median over blocks of a block's mean step time, from its first kernel to its last. A block is at least
as long as the sampling interval, so that each contains a sample. The mean over all blocks, which includes the spectral
norms of every hundredth step, is reported too.
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
    """A model and its batch size; sequences have the full context length."""

    name: str
    model: ModelConfig
    batch: int
    whole: bool
    """whether torch.compile gets the whole model, or each layer separately, as is usual for large models"""
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
    """Attention by one of PyTorch's backends, in a call that `attach` finds."""

    backend: SDPBackend

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention. The backend is selected here because torch.compile ignores a context outside the graph."""
        with sdpa_kernel(self.backend):
            return super().core(query, key, value)


class UnwatchedAttention(NativeAttention):
    """The same with PyTorch's original function, which an attached agent replaces in torch.nn.functional."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention as NativeAttention does."""
        with sdpa_kernel(self.backend):
            return SDPA(query, key, value, is_causal=True, enable_gqa=self.n_head != self.n_kv_head)


FAST_BACKENDS: Final = {"cuda": ("flash", "cudnn", "efficient"), "cpu": ("flash", "math")}
WATCHED: Final = ("kernels_agent", "keep_agent")


@dataclass(slots=True)
class Variant:
    """One way to train the shared weights. seconds: mean step time of each block."""

    name: str
    model: Callable[[Tensor, Tensor], Tensor]
    backend: str | None = None
    agent: Agent | None = None
    seconds: list[float] = field(default_factory=list)


class Bench:
    """Shared weights, their optimizer and the variants that train them."""

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
        """Add a variant with the shared weights, unless its first steps fail; this is reported on standard error."""
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
        except Exception:  # an unsupported shape is a result; the other variants continue
            print(f"{name} does not take {self.shape.name}:\n{traceback.format_exc()}", file=sys.stderr)
            self.optimizer.zero_grad()
        else:
            self.variants[name] = variant

    def step(self, variant: Variant, ids: Tensor) -> None:
        """Run one training step in its usual form."""
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
        """Train `rounds` blocks of `steps` steps with every variant in turn, and record each block's mean step time."""
        gc.collect()
        gc.disable()
        for round_ in range(rounds):
            variants = list(self.variants.values())
            for variant in (
                variants[round_ % len(variants) :] + variants[: round_ % len(variants)]
            ):  # rotate the order, so that a variant does not always follow the same one
                self.step(variant, self.ids[0])  # warm-up, because the caches contain data of the previous variant
                self._wait()
                began = time.perf_counter()
                for index in range(steps):
                    self.step(variant, self.ids[index % len(self.ids)])
                self._wait()
                variant.seconds.append((time.perf_counter() - began) / steps)
        gc.enable()


@contextmanager
def nobody_listens() -> Iterator[dict[str, Any]]:
    """In a with block, agent settings for a service that is down, so that sender, spool and retries are active."""
    with socket.create_server(("127.0.0.1", 0)) as unused, tempfile.TemporaryDirectory() as spool:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        unused.close()
        yield {"url": url, "spool_directory": spool, "run": "bench", "quiet": True, "strict": True}


def measure(shape: Shape, rounds: int, compiler: str = "inductor", variants: Sequence[str] = WATCHED) -> dict[str, Any]:
    """Return the results of one shape in milliseconds per step; None for variants that are not in `variants`."""
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
    """Measure the shape `only`, by default all GPU shapes; print the results, and write them to `json_path`."""
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
    # The autograd cache would reuse a graph traced with another SDPA backend (pytorch #185449).
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.recompile_limit = 32  # each variant compiles the same code again
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
