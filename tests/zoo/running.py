"""Trains or runs a small model and returns its outputs, gradients and weights."""

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
LEARNING_RATE: Final = 0.02
SEED: Final = 3
DEVIATION: Final = 0.3
"""Standard deviation of weights. Usual initialisation makes attention so uniform that mask errors hardly show."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to call a model."""

    name: str
    given: dict[str, Any]
    real: Tensor | None = None
    """True at positions of the (encoder's) sequence that are not padding, [B, S]."""
    generates: bool = False
    """If true, run with a key-value cache under no_grad; otherwise make three training steps."""
    compiled: bool = False
    """Use torch.compile, with one token less in each step."""


@dataclass(slots=True)
class Results:
    """Outputs and gradients of each step and the final weights, by name and in order."""

    tensors: dict[str, Tensor] = field(default_factory=dict)


def draw_weights(model: nn.Module, seed: int = SEED, deviation: float = DEVIATION) -> None:
    """Draw every floating-point parameter from N(0, deviation), or N(1, deviation) for norm scales."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator) * deviation
                is_norm_scale = parameter.dim() == 1 and name.endswith("weight")
                parameter.copy_(noise + 1 if is_norm_scale else noise)


def without_dropout(model: nn.Module) -> None:
    """Disable all dropout, because its random masks would differ."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
        for name in ("layerdrop", "layer_drop", "activation_dropout", "mask_time_prob", "mask_feature_prob"):
            if isinstance(getattr(getattr(module, "config", None), name, None), float):
                setattr(module.config, name, 0.0)
        if hasattr(getattr(module, "config", None), "apply_spec_augment"):
            module.config.apply_spec_augment = False  # type: ignore[union-attr]


def train(model: nn.Module, case: Case, *, after_step: Callable[[Tensor], None] | None = None) -> Results:
    """Three steps of gradient descent; `after_step` is called with each loss."""
    results = Results()
    _seed()
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, LEARNING_RATE)
    if case.compiled:
        torch._dynamo.reset()
    callable_model: Any = torch.compile(model, backend="aot_eager") if case.compiled else model
    for step in range(STEPS):
        outputs = dict(floats(callable_model(**(_shorter(case.given, step) if case.compiled else case.given))))
        loss = _loss(outputs, case)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        for name, value in outputs.items():
            results.tensors[f"step {step}: {name}"] = _without_padding(name, value.detach(), case)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                results.tensors[f"step {step}: gradient of {name}"] = parameter.grad.clone()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if after_step is not None:
            after_step(loss.detach())
    for name, parameter in model.named_parameters():
        results.tensors[f"{name} after {STEPS} steps"] = parameter.detach().clone()
    return results


def _shorter(given: dict[str, Any], count: int) -> dict[str, Any]:
    """Token ids [B, S] without the last `count`, so torch.compile sees other lengths from the second step."""
    return {n: v[:, : v.shape[1] - count] if n.endswith("input_ids") else v for n, v in given.items()}


def generate(model: nn.Module, case: Case) -> Results:
    """Run the first tokens with a cache, then one more, then the rest."""
    results = Results()
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
            results.tensors[f"{part} tokens: {first[0]}"] = first[1]
    return results


class NoCacheError(Exception):
    """The model does not return a cache."""


def floats(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Every floating-point tensor in a model's output, by name, without caches."""
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


def _without_padding(name: str, value: Tensor, case: Case) -> Tensor:
    """`value` without padding positions, whose rows are undefined."""
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
            visible = _without_padding(name, value, case)
            weights = torch.randn(visible.shape, generator=torch.Generator().manual_seed(number)).to(visible.dtype)
            parts.append((torch.where(visible.isfinite(), visible, 0.0) * weights).mean())
    if not parts:
        raise ValueError("no output depends on the weights")
    return torch.stack([p.to(parts[0].dtype) for p in parts]).sum()


def _seed() -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)


class TimeLimitExceededError(BaseException):
    """Not an Exception, because torch.compile and the judge would catch it as an error of the model."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitExceededError if the body takes more CPU time, which does not depend on the machine's load."""

    def raise_timeout(*_: object) -> None:
        raise TimeLimitExceededError(f"took more than {seconds} s of processor time")

    previous_handler = signal.signal(signal.SIGPROF, raise_timeout)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous_handler)
