"""`assess`: report to which of the two failures a model is open, what foreshock watches, and what to change first."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words
from foreshock.monitor.attention.self_check import wrong_attention
from foreshock.monitor.config import make_config
from foreshock.monitor.detect.levels import wrong_rows
from foreshock.monitor.model.discovery import Found, find_attention
from foreshock.monitor.model.layers import device_of
from foreshock.monitor.model.openness import KeyBias, openness, rounding

_COSTS: Final = {
    "cuda": 'attention="keep" (default) leaves it as it is, at 0.7 % of a step (GPT-2 small) or 0.6 % (Llama 1B); '
    '"kernels" counts every row and costs 2.2 % and 1.3 % (measured on one H200)',
    "cpu": 'attention="keep" (default) leaves it as it is; "kernels" runs a slow reference here, for tests',
}
_SHAPES: Final = 4
"""Limit of head shapes that are checked on random inputs."""
_EXACT: Final = "Drift by rounding: not in this run. Its attention ran in float32, and the drift needs 16 bits."
_APART: Final[Any] = {"url": None, "spool_directory": None, "quiet": True}
_BACKENDS: Final = {
    "CUDNN_ATTENTION": "cuDNN",
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "MATH": "math",
}


@dataclass(frozen=True, slots=True)
class Assessment:
    """Result of `assess`. `str()` of it is the report, with a line for each question."""

    watched: int
    found: int
    key_bias: KeyBias
    rotary: bool
    qk_norm: bool
    lines: tuple[str, ...]

    @property
    def open_to_rounding(self) -> bool:
        """Whether the model has the properties of all models that drifted by rounding in docs/evidence.md."""
        return self.key_bias == "trained" and not self.rotary and not self.qk_norm

    def __str__(self) -> str:
        return "\n".join(self.lines)


def assess(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[], Tensor] | None = None,
) -> Assessment:
    """Inspect `model`, and its optimizer if given, without changing either.

    The report contains: the layers that foreshock would watch, and how; the attention kernel that PyTorch picks on the
    model's device, and the cost of watching; the type in which scores are computed; and to which of the two failures of
    docs/failure.md and docs/score-growth.md the model is open, with evidence and the first remedy.

    loss: runs the model on a sample batch as the training does, including autocast, and returns the loss with its
    graph; one forward and backward then count the rows that the batch's mask hides. Raises ValueError if `model` is not
    a torch.nn.Module or `optimizer` is not an optimizer.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"assess takes a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer is a torch.optim.Optimizer, got {type(optimizer).__name__}")
    found = find_attention(model, make_config(None, {}).heads)
    batch = _Batch(found)
    if loss is not None and any(each.problem is None for each in found):
        batch = _run(model, found, loss)
    found = batch.found
    watched = [each for each in found if each.problem is None]
    bias, rotary, normalised = openness(model, watched)
    lines = [_watching(found, watched), *_unwatched(found)]
    if not watched:
        lines += batch.lines
    else:
        device = device_of(model).type
        types = batch.types or {p.dtype for p in model.parameters() if p.is_floating_point()}
        likely = next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in types), None)
        dtype = likely or (torch.float32 if batch.types else torch.bfloat16)
        lines += [
            f"Attention: {pytorchs_choice(device, watched[0].head_dim or 64, dtype)}.",
            *_checked(device, watched, dtype),
            f"Cost: {costs(device)}.",
            f"Types: {_types(model, batch)}",
            *_scores(watched, likely),
            *batch.lines,
            *_adapters(watched),
            *(rounding(bias, rotary, normalised) if likely or not batch.types else [_EXACT]),
            *_growth(normalised=normalised),
        ]
    lines += _of_optimizer(optimizer) if optimizer is not None else []
    return Assessment(len(watched), len(found), bias, rotary, normalised, tuple(lines))


def pytorchs_choice(device: str, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> str:
    """Describe the kernel that PyTorch picks for causal attention in this type on `device`."""
    query = torch.empty(1, 8, 1024, head_dim, dtype=dtype, device=device, requires_grad=True)
    name = SDPBackend(torch._fused_sdp_choice(query, query, query, is_causal=True)).name
    picked = _BACKENDS.get(name, name)
    return f"PyTorch {torch.__version__} picks {picked} on {device} ({_name(dtype)}, causal, head dim {head_dim})"


def costs(device: str) -> str:
    """Describe the cost of each setting of `attention` on a device of this type."""
    return _COSTS["cuda" if device == "cuda" else "cpu"]


@dataclass(slots=True)
class _Batch:
    """Results of a sample batch."""

    found: list[Found]
    """The attention modules: those that the batch ran, or candidates if there is no batch."""
    types: set[torch.dtype] = field(default_factory=set)
    """Types in which attention ran."""
    lines: list[str] = field(default_factory=list)


def _run(model: nn.Module, found: list[Found], loss: Callable[[], Tensor]) -> _Batch:
    """Run a batch forward and backward, and restore the parameters' gradients."""
    from foreshock.monitor.attaching import attach  # imported here, because only a sample batch needs the agent

    batch, samples = _Batch(found), list[wire.Sample]()

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
        if (x := next(given, None)) is not None:
            autocast = torch.is_autocast_enabled(x.device.type)
            batch.types.add(torch.get_autocast_dtype(x.device.type) if autocast else x.dtype)

    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        # remove our hooks before the agent ends: it would take them for its own and leave its mark on the modules
        with attach(model, sample_every_steps=1, **_APART) as agent, ExitStack() as hooks:
            agent.subscribe(lambda event: samples.append(event) if isinstance(event, wire.Sample) else None)
            for module in [each.module for each in found if each.problem is None]:
                hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
            value = loss()
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            agent.step(value.detach())
            batch.found = agent._attached.found
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
    if not bool(value.isfinite().all()):
        batch.lines.append("Batch: its loss is not finite. Run foreshock diagnose, which names the first such place.")
    unmeasured = (line.strip() for line in agent.report().splitlines() if "native attention, not measured" in line)
    batch.lines += [f"Batch: {line}." for line in unmeasured]
    for words in (words for sample in samples if (words := sample.words()) is not None):
        batch.lines += [*_hidden(words), *_wrong(words, agent)]
    return batch


def _checked(device: str, watched: Sequence[Found], dtype: torch.dtype) -> list[str]:
    """Check PyTorch's attention on random inputs of the model's shapes; return lines with the results."""
    shapes = sorted({(each.heads, each.kv_heads or each.heads, each.head_dim or 64) for each in watched})[:_SHAPES]
    lines = []
    for heads, kv_heads, head_dim in shapes:
        shape = f"with {heads} heads of {head_dim} on {device} in {_name(dtype)}"
        wrong = wrong_attention(heads, kv_heads, head_dim, dtype, device)
        lines += [f"Wrong attention: PyTorch's {shape}: {what}." for what in wrong]
        if not wrong:
            lines.append(f"Checked: PyTorch's attention {shape}: output and gradients are within rounding of float64.")
    return lines


def _wrong(words: Words, agent: Any) -> list[str]:
    """Return lines about layers whose native attention computed wrong rows in a sample."""
    found = wrong_rows(words, agent._attached.heads, step=1).values()
    return [f"Wrong attention: {agent._attached.with_library(verdict).sentence}" for verdict in found]


def _hidden(words: Words) -> list[str]:
    """Return lines about the head of a sample with the most rows that do not see any key."""
    empty = words[:, Slot.EMPTY_ROWS]
    if not empty.any():
        return []
    head = int(empty.argmax())
    rows = int(empty[head] + words[head, Slot.ROWS] + words[head, Slot.NONFINITE_ROWS])
    return [
        f"Mask: {empty[head]} of {rows} rows of the sample batch see no key, as with left padding and a causal mask; "
        "such rows can give NaN.",
        "  Remedy: let every row see a key, at least its own, or pad on the right.",
    ]


def _scores(watched: Sequence[Found], dtype: torch.dtype | None) -> list[str]:
    """Describe the rounding of scores before the softmax by type and implementation; fused kernels use float32."""
    configs = (getattr(each.module, "config", None) for each in watched)
    eager = any(getattr(config, "_attn_implementation", None) == "eager" for config in configs)
    lines = []
    if eager and dtype == torch.float16:
        lines = [
            "Scores: eager attention multiplies queries and keys in float16 before it scales the products, which "
            "overflow beyond 65,504.",
            '  Remedy: attn_implementation="sdpa", or bfloat16.',
        ]
    elif eager and dtype == torch.bfloat16:
        lines = [
            "Scores: eager attention rounds them to bfloat16 before their softmax.",
            '  Remedy: attn_implementation="sdpa" computes them in float32.',
        ]
    if dtype == torch.float16:
        lines.append(
            "Loss scale: gradients in float16 underflow without torch.amp.GradScaler, which skips the steps whose "
            "gradients overflow; bfloat16 does not need it."
        )
    return lines


def _adapters(watched: Sequence[Found]) -> list[str]:
    count = sum("has adapters" in (each.unmeasured or "") for each in watched)
    if not count:
        return []
    return [
        f"Adapters: {count} of {len(watched)} layers have them on queries or keys. Scores are measured as in other "
        "layers, norms of W_Q and W_K after the adapters are merged."
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _watching(found: Sequence[Found], watched: Sequence[Found]) -> str:
    if not found:
        return (
            "Watched: 0 layers. The model does not have a module that looks like attention; the first step will show "
            "whether one computes it."
        )
    sizes = Counter(f"{each.heads} heads of {each.head_dim or '?'}" for each in watched)
    shapes = ", ".join(f"{count} with {size}" for size, count in sizes.items())
    return f"Watched: {len(watched)} of {len(found)} attention layers{': ' * bool(shapes)}{shapes}."


def _unwatched(found: Sequence[Found]) -> list[str]:
    problems = Counter(each.problem for each in found if each.problem is not None)
    return [f"Not watched: {count} layers, because {why}." for why, count in problems.items()]


def _types(model: nn.Module, batch: _Batch) -> str:
    names = sorted({_name(p.dtype) for p in model.parameters() if p.is_floating_point()})
    held = f"parameters are {' and '.join(names) or 'not there'}. "
    if batch.types:
        return f"{held}In the sample batch attention ran in {' and '.join(sorted(map(_name, batch.types)))}."
    if names == ["float32"]:
        return held + "Rounding matters if attention runs in 16 bits: under autocast or FSDP's mixed precision."
    return held + "Attention runs in 16 bits if its inputs have 16 bits, and its output is then rounded."


def _growth(*, normalised: bool) -> list[str]:
    if normalised:
        return ["Scores that grow: unlikely. Queries and keys are normalised, so their weights bound each score."]
    return [
        "Scores that grow: possible, as in every model without qk-norm if the learning rate is too high.",
        '  First remedy: a lower rate or a longer warm-up; in a run that cannot restart, qk_clip="warned".',
    ]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[str]:
    kind = type(optimizer).__name__
    groups: list[dict[str, Any]] = optimizer.param_groups
    rates = sorted({float(g["lr"]) for g in groups if "lr" in g})
    description = f"Optimizer: {kind}, learning rate {' and '.join(f'{rate:g}' for rate in rates) or 'unknown'}"
    small = [float(g["eps"]) for g in groups if isinstance(g.get("eps"), float)]
    if "adam" in kind.lower() and small and max(small) < 1e-6:
        description += (
            f", eps {' and '.join(f'{eps:g}' for eps in sorted(set(small)))}. In the one run that was tried, an eps of "
            "1e-5 limited the drift to 13 nats instead of 120"
        )
    if "muon" in kind.lower():
        description += ". Muon makes scores grow at rates at which Adam does not (arXiv 2507.20534)"
    return [description + "."]
