"""Whether a model is the same with foreshock under it: to the bit where it keeps its attention, else within rounding.

`examine` gives a record of what each way of attaching does to a model, and every finding that ought not to be.
"""

import copy
import logging
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from tests.zoo.real_attention import recorded_attention
from tests.zoo.running import Case, Course, generate, train
from torch import Tensor, nn

from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach
from foreshock.monitor.config import AgentConfig, Served

WAYS: Final[tuple[Served, ...]] = typing.get_args(AgentConfig.model_fields["attention"].annotation)
"""Every value of attach's `attention`."""
EXACT_WAYS: Final = ("keep", "auto")
"""Those that change no bit on a CPU, where auto does as keep does: it is tried in the first case alone."""
LARGEST: Final = 8.0
FLOOR: Final = 2e-5
CHAOTIC: Final = 1e-2
"""Rounding: an error of at most LARGEST times that of the model itself, or FLOOR, relative, judged by float64. A tensor
whose own error is above CHAOTIC cannot be judged so: there the model with weights nudged by a digit is the judge.
No tensor may err by more than LARGEST * CHAOTIC."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    cases: Callable[[nn.Module], list[Case]]


@dataclass(slots=True)
class Record:
    """What became of one entry."""

    name: str
    family: str
    wrong: list[str] = field(default_factory=list)
    """Sentences "way, case: what", one for each finding."""
    layers: dict[str, dict[str, str]] = field(default_factory=dict)
    """By way, module by module that computes attention: "counted", or the reason given for it, or "missed"."""
    refused: dict[str, str] = field(default_factory=dict)
    """By way, why attach raised ValueError."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Cases that the model itself cannot do, and what it raises."""


def examine(entry: Entry, ways: tuple[Served, ...] = WAYS) -> Record:
    """Run the entry in every case and way."""
    record = Record(entry.name, entry.family)
    pristine = entry.build()
    cases = entry.cases(pristine)
    first = cases[0]
    for case in cases:
        run = generate if case.generates else train
        try:
            plain = run(own := copy.deepcopy(pristine), case)
        except Exception as reason:  # what the model itself cannot do is no case
            if case is first:
                raise
            record.skipped[case.name] = f"{type(reason).__name__}: {str(reason)[:150]}"
            continue
        truth: Course | None = None
        nudged: Course | None = None
        attention: dict[str, str] = {}
        if not case.generates:
            with recorded_attention(model := copy.deepcopy(pristine)) as attention:
                model(**case.given)
        for way in ways:
            if case is not first and (way == "auto" or (way == "keep" and not _tried_in_keep(case))):
                continue
            label = f"{way}, {case.name}"
            told = _Told()
            try:
                watched, states = _watched(copy.deepcopy(pristine), case, way, told, record, label, _traces(own))
            except ValueError as refusal:
                record.refused[way] = str(refusal)
                if attention:
                    record.layers[way] = _outcome(attention, {}, told.text + str(refusal))
                continue
            except Exception as crash:  # every crash is a finding
                record.wrong.append(f"{label}: {type(crash).__name__}: {str(crash)[:200]}")
                continue
            difference = _difference(plain, watched, None)
            if difference and way not in EXACT_WAYS:
                truth = truth or _in_float64(pristine, case, run)
                nudged = nudged or run(_nudged(pristine), case)
                difference = _difference(plain, watched, truth, nudged)
            if difference:
                record.wrong.append(f"{label}: {difference}")
            if attention:
                layers = _outcome(attention, states, told.text)
                record.layers[way] = layers | {
                    n: v for n, v in record.layers.get(way, {}).items() if layers.get(n, "counted") == "counted"
                }
    for tried, layers in record.layers.items():
        record.wrong += [
            f"{tried}, any: {n or 'the model'} computes attention and is neither counted nor named"
            for n, how in layers.items()
            if how == "missed"
        ]
    return record


def _tried_in_keep(case: Case) -> bool:
    """Where the model's own attention stays, one place of padding says as much as another."""
    return case.generates or case.name == "padded inside"


class _Told(logging.Handler):
    """Everything that foreshock said."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def _watched(
    model: nn.Module, case: Case, way: Served, told: _Told, record: Record, label: str, before: dict[str, Any]
) -> tuple[Course, dict[str, int]]:
    """The course of the model with foreshock under it, and the rows that each layer counted."""
    rows: dict[str, int] = {}
    logger = logging.getLogger("foreshock")
    logger.addHandler(told)
    try:
        with attach(model, url=None, quiet=True, attention=way, norms_every_steps=10**6) as agent:
            told.text += agent.report() + "\n"

            def after_step(loss: Tensor) -> None:
                for layer, state in _states(agent):
                    rows[layer] = rows.get(layer, 0) + state
                agent.step(loss)

            course = generate(model, case) if case.generates else train(model, case, after_step=after_step)
            told.text += agent.report() + "\n"
            if agent.faults:
                record.wrong.append(f"{label}: contained faults {dict(agent.faults)}")
    finally:
        logger.removeHandler(told)
    after = _traces(model)
    for name in before:
        if before[name] != after[name]:
            record.wrong.append(f"{label}: after detach {name} differ: {_odd(after[name], before[name])}")
    return course, rows


def _states(agent: Any) -> Iterator[tuple[str, int]]:
    instruments = agent._instruments
    sizes = [len(layer.heads) for layer in instruments.layers]
    for layer, state in zip(instruments.layers, torch.split(instruments.state, sizes), strict=True):
        yield layer.name, int(slot_values(state.numpy(), Slot.ROWS).sum())


def _traces(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that attach could leave behind."""
    left: dict[str, Any] = {"keys of the state dict": list(model.state_dict())}
    for name, module in model.named_modules():
        hooks = {k: list(v) for k, v in vars(module).items() if k.endswith("hooks") and isinstance(v, dict) and v}
        left[f"attributes of {name or 'the model'}"] = sorted(vars(module))
        left[f"hooks of {name or 'the model'}"] = {k: len(v) for k, v in hooks.items()}
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            left[f"attention of {name or 'the model'}"] = config._attn_implementation
    left["scaled_dot_product_attention"] = torch.nn.functional.scaled_dot_product_attention.__module__
    return left


def _odd(after: Any, before: Any) -> str:
    if isinstance(after, list) and isinstance(before, list):
        return str(sorted(set(after) ^ set(before)))
    return f"{after!r}, without foreshock {before!r}"


def _outcome(attention: dict[str, str], rows: dict[str, int], told: str) -> dict[str, str]:
    """What became of each module that computes attention."""
    outcome = {}
    lines = told.splitlines()
    for name in attention:
        path = name.split(".")
        owners = [".".join(path[:n]) for n in range(len(path), 0, -1)] or ["model"]
        if any(rows.get(owner) for owner in (*owners, "model")):
            outcome[name] = "counted"
            continue
        said = [line for owner in owners for line in lines if _names(line, owner) and not _promises(line)]
        outcome[name] = said[0].strip() if said else "missed"
    return outcome


def _names(line: str, name: str) -> bool:
    words = re.sub("[,:;()]", " ", line).split()
    return any(word == name or word.startswith(f"{name}.") for word in words)


def _promises(line: str) -> bool:
    """Whether a line of the table says that the module is served: a promise, which the count has to hold."""
    return line.rstrip().endswith(("reference", "kernel", "kept, sampled", "probe"))


def _nudged(pristine: nn.Module) -> nn.Module:
    """A copy whose weights differ in their last digits."""
    model = copy.deepcopy(pristine)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
    return model


def _in_float64(pristine: nn.Module, case: Case, run: Callable[..., Course]) -> Course:
    model = copy.deepcopy(pristine).double()
    given = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in case.given.items()}
    try:
        return run(model, Case(case.name, given, case.real, case.generates))
    except Exception:  # a model that is written for float32 is judged by itself
        return Course()


def _difference(plain: Course, watched: Course, truth: Course | None, nudged: Course | None = None) -> str | None:
    """The first tensor that differs by more than it may, and by how much; None where all agree."""
    if list(plain.tensors) != list(watched.tensors):
        odd = sorted(set(plain.tensors) ^ set(watched.tensors))
        return f"{odd[0]} exists only once"
    usual = _usual_norms(plain)
    for name, own in plain.tensors.items():
        ours = watched.tensors[name]
        if own.shape != ours.shape:
            return f"{name} has shape {list(ours.shape)}, not {list(own.shape)}"
        if torch.equal(own.nan_to_num(0.5), ours.nan_to_num(0.5)):
            continue
        # a gradient that is zero in truth is nothing but rounding, small beside those of its kind
        least = usual[_kind(name)] / 100
        if truth is None or nudged is None:
            return f"{name} differs by {_relative(ours, own, least):.2g} of its norm"
        exact = truth.tensors.get(name)
        if exact is None or exact.shape != own.shape or _relative(own, exact, least) > CHAOTIC:
            exact = own  # there is no float64 to judge by: what becomes of a last digit in the weights does
        allowed = max(LARGEST * _relative(own if exact is not own else nudged.tensors[name], exact, least), FLOOR)
        allowed = min(allowed, LARGEST * CHAOTIC)
        error = _relative(ours, exact, least)
        if not error <= allowed:
            return f"{name} is off by {error:.2g} of its norm, {allowed:.2g} is rounding"
    return None


def _kind(name: str) -> str:
    return name.partition(" of ")[0] if " of " in name else name


def _usual_norms(course: Course) -> dict[str, float]:
    """The root mean square of the norms of all tensors of a kind, such as the gradients of a step."""
    squares: dict[str, list[float]] = {}
    for name, value in course.tensors.items():
        squares.setdefault(_kind(name), []).append(float(_finite(value).norm() ** 2))
    return {kind: (sum(of) / len(of)) ** 0.5 for kind, of in squares.items()}


def _relative(value: Tensor, of: Tensor, least: float) -> float:
    return float((_finite(value) - _finite(of)).norm()) / max(float(_finite(of).norm()), least, 1e-30)


def _finite(value: Tensor) -> Tensor:
    return value.detach().double().nan_to_num(0.0, 1e30, -1e30)
