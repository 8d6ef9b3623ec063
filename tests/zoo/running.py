"""Runs a small model for some steps, and says what came out of it."""

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

STEPS: Final = 3
RATE: Final = 0.02
SEED: Final = 3
DEVIATION: Final = 0.3
"""Of drawn weights. At initialisation attention is so uniform that an error of its mask or scale hardly shows."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to call a model."""

    name: str
    given: dict[str, Any]
    real: Tensor | None = None
    """True where a position of the (encoder's) sequence is not padding, [B, S]."""
    generates: bool = False
    """Under no_grad, the first tokens into a cache and then the next; otherwise three training steps."""
    compiled: bool = False
    """Through torch.compile, each step with a token less than the one before."""


@dataclass(slots=True)
class Course:
    """What a model said, by name and in order: outputs and gradients of each step, and the weights at the end."""

    tensors: dict[str, Tensor] = field(default_factory=dict)


def draw_weights(model: nn.Module, seed: int = SEED, deviation: float = DEVIATION) -> None:
    """Give every floating parameter a value of its own: N(0, deviation), round 1 where it scales a norm."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator) * deviation
                scales = parameter.dim() == 1 and name.endswith("weight")
                parameter.copy_(drawn + 1 if scales else drawn)


def without_dropout(model: nn.Module) -> None:
    """Take every dropout out: what it draws is not what is compared here."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
        for name in ("layerdrop", "layer_drop", "activation_dropout", "mask_time_prob", "mask_feature_prob"):
            if isinstance(getattr(getattr(module, "config", None), name, None), float):
                setattr(module.config, name, 0.0)
        if hasattr(getattr(module, "config", None), "apply_spec_augment"):
            module.config.apply_spec_augment = False  # type: ignore[union-attr]


def train(model: nn.Module, case: Case, *, after_step: Callable[[Tensor], None] | None = None) -> Course:
    """Three steps of gradient descent; `after_step` is given each loss."""
    course = Course()
    _seed()
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, RATE)
    if case.compiled:
        torch._dynamo.reset()
    runs: Any = torch.compile(model, backend="aot_eager") if case.compiled else model
    for step in range(STEPS):
        outputs = dict(floats(runs(**(_shorter(case.given, step) if case.compiled else case.given))))
        loss = _loss(outputs, case)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        for name, value in outputs.items():
            course.tensors[f"step {step}: {name}"] = _real(name, value.detach(), case)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                course.tensors[f"step {step}: gradient of {name}"] = parameter.grad.clone()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if after_step is not None:
            after_step(loss.detach())
    for name, parameter in model.named_parameters():
        course.tensors[f"{name} after {STEPS} steps"] = parameter.detach().clone()
    return course


def _shorter(given: dict[str, Any], by: int) -> dict[str, Any]:
    """Words [B, S] without the last `by` of them: the second step shows torch.compile that lengths differ."""
    return {n: v[:, : v.shape[1] - by] if n.endswith("input_ids") else v for n, v in given.items()}


def generate(model: nn.Module, case: Case) -> Course:
    """The first tokens into a cache, then one more, then the rest."""
    course = Course()
    _seed()
    model.eval()
    key = "decoder_input_ids" if "decoder_input_ids" in case.given else "input_ids"
    ids = case.given[key]
    cut = ids.shape[1] - 4
    cache = None
    with torch.no_grad():
        for part, piece in (("first", ids[:, :cut]), ("next", ids[:, cut : cut + 1]), ("rest", ids[:, cut + 1 :])):
            out = model(**{**case.given, key: piece, "use_cache": True}, past_key_values=cache)
            cache = out.past_key_values
            if cache is None:
                raise NoCacheError
            first = next(floats({n: v for n, v in out.items() if n != "past_key_values"}))
            course.tensors[f"{part} tokens: {first[0]}"] = first[1]
    return course


class NoCacheError(Exception):
    """The model returns no cache."""


def floats(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Every floating tensor in what a model returns, by name, caches left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if "past_key" not in str(key) and "cache" not in str(key):
                yield from floats(inner, str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from floats(inner, f"{name}[{number}]")
    elif hasattr(value, "sample") and isinstance(value.sample, Tensor):
        yield from floats(value.sample, name)


def _real(name: str, value: Tensor, case: Case) -> Tensor:
    """`value` without the positions of padding, whose rows mean nothing."""
    if case.real is not None and value.shape[:2] == case.real.shape:
        if "decoder_input_ids" in case.given and not name.startswith("encoder"):
            return value
        return value[case.real]
    if case.real is not None and value.dim() and len(value) == len(case.real) and not name.startswith("encoder"):
        return value[case.real[:, 0]]  # a pooler reads the first position, which may be padding
    return value


def _loss(outputs: dict[str, Tensor], case: Case) -> Tensor:
    parts = []
    for number, (name, value) in enumerate(outputs.items()):
        if value.requires_grad:
            kept = _real(name, value, case)
            weights = torch.randn(kept.shape, generator=torch.Generator().manual_seed(number)).to(kept.dtype)
            parts.append((torch.where(kept.isfinite(), kept, 0.0) * weights).mean())
    if not parts:
        raise ValueError("no output depends on the weights")
    return torch.stack([p.to(parts[0].dtype) for p in parts]).sum()


def _seed() -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)


class TookTooLongError(BaseException):
    """No Exception: torch.compile turns those into errors of the model that it traces, and the judge into findings."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TookTooLongError when the body takes more processor time, which a busy machine does not make longer."""

    def stop(*_: object) -> None:
        raise TookTooLongError(f"took more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
