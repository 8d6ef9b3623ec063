"""`assess`: which of the two failures a model is open to, what is watched of it, and what to change first."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from foreshock.monitor.config import make_config
from foreshock.monitor.model.discovery import Found, find_attention
from foreshock.monitor.model.layers import normalises_heads
from foreshock.monitor.model.weights import base_of, device_of, stored

KeyBias = Literal["trained", "frozen", "none", "unknown"]

COSTS: Final = (
    'attention="keep" (default) leaves it as it is, at 0.4 % of a step (GPT-2 small) or 1.0 % (Llama 1B); '
    '"kernels" counts every row and costs 2.2 % and 1.3 % (one H200; docs/agent.md)'
)
_BACKENDS: Final = {
    "CUDNN_ATTENTION": "cuDNN",
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "MATH": "math",
}
_OF_LATENT: Final = ("kv_b_proj", "wkv_b")
"""What makes the keys of latent attention, but for their rotary part, of the latent that all heads share. What biases
the latent itself is none of the keys': the latent is normalised before."""
_ROTARY: Final = re.compile(r"rotary|(?<![a-z])rope(?![a-z])|freqs_cis|rotate_half", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Assessment:
    """What `assess` found. `str()` of it is the report, a line for each question."""

    watched: int
    found: int
    key_bias: KeyBias
    rotary: bool
    qk_norm: bool
    lines: tuple[str, ...]

    @property
    def open_to_rounding(self) -> bool:
        """Whether the model has what every model had that drifted by rounding here: docs/evidence.md."""
        return self.key_bias == "trained" and not self.rotary and not self.qk_norm

    def __str__(self) -> str:
        return "\n".join(self.lines)


def assess(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Assessment:
    """Look at `model`, and at the optimizer that trains it if one is given, without running or changing either.

    Says what foreshock would watch and how, which attention PyTorch picks on the model's device and what watching
    costs, which of the two failures of docs/failure.md and docs/score-growth.md the model is open to and on what
    evidence, and the first remedy of each. Raises ValueError for anything but a torch.nn.Module and an optimizer.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"assess takes a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer is a torch.optim.Optimizer, got {type(optimizer).__name__}")
    found = find_attention(model, make_config(None, {}).heads)
    watched = [each for each in found if each.problem is None]
    bias, rotary, normalised = openness(model, watched)
    lines = [_watching(found, watched), *_unwatched(found)]
    if watched:
        lines += [
            f"Attention: {pytorchs_choice(device_of(model).type, watched[0].head_dim or 64)}.",
            f"Cost: {COSTS}.",
            f"Types: {_types(model)}",
            *rounding(bias, rotary, normalised),
            *_growth(normalised=normalised),
        ]
    lines += _of_optimizer(optimizer) if optimizer is not None else []
    return Assessment(len(watched), len(found), bias, rotary, normalised, tuple(lines))


def key_bias_of(watched: Iterable[Found]) -> KeyBias:
    """Whether the keys of any layer have a bias: one that is trained goes before one that is frozen, before none."""
    holders = [_of_keys(found) for found in watched]
    kinds: list[KeyBias] = ["unknown" if holder is None else _bias(holder) for holder in holders]
    ranked: tuple[KeyBias, ...] = ("trained", "unknown", "frozen", "none")
    return next((kind for kind in ranked if kind in kinds), "unknown")


def _of_keys(found: Found) -> nn.Module | None:
    """The projection that makes the keys; None where names do not show it."""
    if found.projection is not None:
        return found.projection.key.holder
    children = (getattr(found.module, name, None) for name in _OF_LATENT)
    return next((child for child in children if isinstance(child, nn.Module)), None)


def _bias(projection: nn.Module) -> KeyBias:
    name = "in_proj_bias" if isinstance(projection, nn.MultiheadAttention) else "bias"
    holder = base_of(projection)
    bias = stored(holder, name)
    if bias is None:
        return "none" if getattr(holder, name, None) is None else "unknown"
    if not isinstance(bias, Tensor) or bias.requires_grad:
        return "trained"
    return "frozen"


def has_rotary(model: nn.Module, watched: Iterable[Found]) -> bool:
    """Whether a name in the model, or in the code of its attention, says that positions rotate queries and keys."""
    named = ((name.rpartition(".")[2], type(m).__name__, *m._buffers.keys()) for name, m in model.named_modules())
    return any(any(map(_ROTARY.search, names)) for names in chain(named, (found.looks_up for found in watched)))


def openness(model: nn.Module, watched: Sequence[Found]) -> tuple[KeyBias, bool, bool]:
    """Kind of the keys' bias, whether positions rotate, whether every watched layer normalises queries and keys."""
    normalised = bool(watched) and all(normalises_heads(_owner(each)) for each in watched)
    return key_bias_of(watched), has_rotary(model, watched), normalised


def pytorchs_choice(device: str, head_dim: int = 64) -> str:
    """Which kernel PyTorch picks for causal attention in bf16 on `device`."""
    query = torch.empty(1, 8, 1024, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    name = SDPBackend(torch._fused_sdp_choice(query, query, query, is_causal=True)).name
    return (
        f"PyTorch {torch.__version__} picks {_BACKENDS.get(name, name)} on {device} (bf16, causal, head dim {head_dim})"
    )


def _owner(found: Found) -> nn.Module:
    return found.module if found.projection is None else found.projection.owner


def _watching(found: Sequence[Found], watched: Sequence[Found]) -> str:
    if not found:
        return "Watched: nothing. No module of the model was seen to call an attention function that foreshock knows."
    sizes = Counter(f"{each.heads} heads of {each.head_dim or '?'}" for each in watched)
    shapes = ", ".join(f"{count} with {size}" for size, count in sizes.items())
    return f"Watched: {len(watched)} of {len(found)} attention layers{': ' * bool(shapes)}{shapes}."


def _unwatched(found: Sequence[Found]) -> list[str]:
    problems = Counter(each.problem for each in found if each.problem is not None)
    return [f"Not watched: {count} layers, because {why}." for why, count in problems.items()]


def _types(model: nn.Module) -> str:
    names = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    held = f"parameters are {' and '.join(names) or 'not there'}. "
    if names == ["float32"]:
        return held + "Rounding matters where attention runs in 16 bits: under autocast or FSDP's mixed precision."
    return held + "Attention runs in 16 bits where its inputs do, and there its output is rounded."


def rounding(bias: KeyBias, rotary: bool, normalised: bool) -> list[str]:
    """Whether the model is open to the drift by rounding, and on what evidence; then the first remedy."""
    if bias == "trained" and not rotary and not normalised:
        return [
            "Drift by rounding: open to it. The keys have a bias, without rotary positions and qk-norm; 15 of 22 "
            "unseen runs of small models of this kind reached scores past 512 (docs/evidence.md).",
            "  First remedy: drop the bias of the keys or freeze it at zero. In this model it changes no output.",
        ]
    if bias == "trained":
        beside, seen = (
            ("qk-norm", "it held the one run that was tried at 20 nats instead of 120")
            if normalised
            else ("rotary positions", "none of five runs drifted far")
        )
        return [
            f"Drift by rounding: perhaps. The keys have a bias, beside {beside}: {seen} (docs/evidence.md).",
            "  First remedy: watch it; a switch of mode is there if a head is warned about.",
        ]
    if bias == "unknown":
        return ["Drift by rounding: not known, because the projection of the keys was not found."]
    return [
        "Drift by rounding: perhaps. GPT-2 small without biases failed so, in the paper and here, at a rate of 1e-3 "
        "(docs/evidence.md).",
        "  First remedy: watch it; a switch of mode is there if a head is warned about.",
    ]


def _growth(*, normalised: bool) -> list[str]:
    if normalised:
        return ["Scores that grow: hardly. Queries and keys are normalised, so that their weights bound each score."]
    return [
        "Scores that grow: open to it, as every model without qk-norm at a learning rate that is too high "
        "(docs/score-growth.md).",
        '  First remedy: a lower rate or a longer warm-up; in a run that goes on, qk_clip="warned".',
    ]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[str]:
    kind = type(optimizer).__name__
    groups: list[dict[str, Any]] = optimizer.param_groups
    rates = sorted({float(g["lr"]) for g in groups if "lr" in g})
    description = f"Optimizer: {kind}, learning rate {' and '.join(f'{rate:g}' for rate in rates) or 'unknown'}"
    small = [float(g["eps"]) for g in groups if isinstance(g.get("eps"), float)]
    if "adam" in kind.lower() and small and max(small) < 1e-6:
        description += (
            f", eps {' and '.join(f'{eps:g}' for eps in sorted(set(small)))}. An eps of 1e-5 held the drift of the one "
            "run that was tried at 13 nats instead of 120"
        )
    if "muon" in kind.lower():
        description += ". Muon makes scores grow at rates at which Adam does not (arXiv 2507.20534)"
    return [description + "."]
