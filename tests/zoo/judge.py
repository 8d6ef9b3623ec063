"""Whether a model is the same with foreshock under it: to the bit where it keeps its attention, else within rounding.

`examine` gives a record of what each way of attaching does to a model, and every finding that ought not to be.
"""

import copy
import functools
import logging
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from tests.zoo.comparison import Rounding, first_difference
from tests.zoo.real_attention import recorded_attention
from tests.zoo.running import Case, Course, generate, train
from torch import Tensor, nn

from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach
from foreshock.monitor.config import AgentConfig, Served

WAYS: Final[tuple[Served, ...]] = typing.get_args(AgentConfig.model_fields["attention"].annotation)
"""Every value of attach's `attention`."""
EXACT_WAYS: Final[tuple[Served, ...]] = ("keep",)
"""Those that change no bit."""


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
        rounding = Rounding(pristine, case, run, plain)
        attention: dict[str, str] = {}
        if not case.generates:
            with recorded_attention(model := copy.deepcopy(pristine)) as attention:
                model(**case.given)
        for way in ways:
            if (case is not first or case.compiled) and way in EXACT_WAYS and not _tried(case):
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
            difference = first_difference(plain, watched)
            if difference and way not in EXACT_WAYS:
                difference = rounding.excess(watched, functools.partial(_quietly_watched, way=way))
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


def _tried(case: Case) -> bool:
    """Where the model's own attention stays, one place of padding says as much as another."""
    return case.generates or case.compiled or case.name == "padded inside"


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
                for layer, state, wrong in _states(agent):
                    rows[layer] = rows.get(layer, 0) + state
                    if wrong:
                        record.wrong.append(f"{label}: {wrong} rows of {layer} are reported as wrong")
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


def _quietly_watched(model: nn.Module, case: Case, *, way: Served) -> Course:
    with attach(model, url=None, quiet=True, attention=way, norms_every_steps=10**6):
        return generate(model, case) if case.generates else train(model, case)


def _states(agent: Any) -> Iterator[tuple[str, int, int]]:
    """Of each layer: its name, the rows counted, and those whose output or gradient is reported as wrong."""
    attached = agent._attached
    sizes = [len(layer.heads) for layer in attached.layers]
    for layer, state in zip(attached.layers, torch.split(attached.state, sizes), strict=True):
        words = state.numpy()
        counted = int(sum(slot_values(words, slot).sum() for slot in (Slot.ROWS, Slot.NONFINITE_ROWS)))
        yield layer.name, counted, int(words[:, [Slot.WRONG_ROWS, Slot.WRONG_GRADIENT_ROWS]].sum())


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
    return line.rstrip().endswith(("reference", "kernel", "native attention, sampled", "probe"))
