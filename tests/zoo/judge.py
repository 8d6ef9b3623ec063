"""Compares a model with and without foreshock: bit-identical if its attention is kept, otherwise within rounding.

`examine` records the effect of each value of attach's `attention` on a model, with every error found.
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
from tests.zoo.real_attention import record_attention
from tests.zoo.running import Case, Results, generate, train
from torch import Tensor, nn

from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach
from foreshock.monitor.config import AgentConfig, Served

WAYS: Final[tuple[Served, ...]] = typing.get_args(AgentConfig.model_fields["attention"].annotation)
"""Every value of attach's `attention`."""
BIT_IDENTICAL_WAYS: Final[tuple[Served, ...]] = ("keep",)
"""The values with bit-identical results."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    cases: Callable[[nn.Module], list[Case]]


@dataclass(slots=True)
class Record:
    """The result of one entry."""

    name: str
    family: str
    wrong: list[str] = field(default_factory=list)
    """One sentence "way, case: error" for each error."""
    layers: dict[str, dict[str, str]] = field(default_factory=dict)
    """By way and module that computes attention: "counted", the reported reason, or "missed"."""
    refused: dict[str, str] = field(default_factory=dict)
    """By way, the ValueError of attach."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Cases in which the model itself fails, with its error."""


def examine(entry: Entry, ways: tuple[Served, ...] = WAYS) -> Record:
    """Run the entry in every case, with every way."""
    record = Record(entry.name, entry.family)
    pristine = entry.build()
    cases = entry.cases(pristine)
    first_case = cases[0]
    for case in cases:
        run = generate if case.generates else train
        try:
            plain = run(plain_model := copy.deepcopy(pristine), case)
        except Exception as reason:  # a case in which the model itself fails is skipped
            if case is first_case:
                raise
            record.skipped[case.name] = f"{type(reason).__name__}: {str(reason)[:150]}"
            continue
        rounding = Rounding(pristine, case, run, plain)
        attention: dict[str, str] = {}
        if not case.generates:
            with record_attention(model := copy.deepcopy(pristine)) as attention:
                model(**case.given)
        for way in ways:
            if (case is not first_case or case.compiled) and way in BIT_IDENTICAL_WAYS and not _is_informative(case):
                continue
            label = f"{way}, {case.name}"
            log_text = _LogText()
            try:
                watched, states = _watched(
                    copy.deepcopy(pristine), case, way, log_text, record, label, _traces(plain_model)
                )
            except ValueError as refusal:
                record.refused[way] = str(refusal)
                if attention:
                    record.layers[way] = _outcome(attention, {}, log_text.text + str(refusal))
                continue
            except Exception as crash:  # every crash is an error
                record.wrong.append(f"{label}: {type(crash).__name__}: {str(crash)[:200]}")
                continue
            difference = first_difference(plain, watched)
            if difference and way not in BIT_IDENTICAL_WAYS:
                difference = rounding.excess(watched, functools.partial(_watched_without_checks, way=way))
            if difference:
                record.wrong.append(f"{label}: {difference}")
            if attention:
                layers = _outcome(attention, states, log_text.text)
                record.layers[way] = layers | {
                    n: v for n, v in record.layers.get(way, {}).items() if layers.get(n, "counted") == "counted"
                }
    for tried, layers in record.layers.items():
        record.wrong += [
            f"{tried}, any: {n or 'the model'} computes attention and is neither measured nor reported"
            for n, how in layers.items()
            if how == "missed"
        ]
    return record


def _is_informative(case: Case) -> bool:
    """If the model's attention is kept, one placement of padding is as informative as the others."""
    return case.generates or case.compiled or case.name == "padded inside"


class _LogText(logging.Handler):
    """Collects foreshock's log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def _watched(
    model: nn.Module, case: Case, way: Served, log_text: _LogText, record: Record, label: str, before: dict[str, Any]
) -> tuple[Results, dict[str, int]]:
    """The results of the model with foreshock attached, and the rows counted in each layer."""
    rows: dict[str, int] = {}
    logger = logging.getLogger("foreshock")
    logger.addHandler(log_text)
    try:
        with attach(model, url=None, quiet=True, attention=way, norms_every_steps=10**6) as agent:
            log_text.text += agent.report() + "\n"

            def after_step(loss: Tensor) -> None:
                for layer, state, wrong in _states(agent):
                    rows[layer] = rows.get(layer, 0) + state
                    if wrong:
                        record.wrong.append(f"{label}: {wrong} rows of {layer} are reported as wrong")
                agent.step(loss)

            course = generate(model, case) if case.generates else train(model, case, after_step=after_step)
            log_text.text += agent.report() + "\n"
            if agent.faults:
                record.wrong.append(f"{label}: contained faults {dict(agent.faults)}")
    finally:
        logger.removeHandler(log_text)
    after = _traces(model)
    for name in before:
        if before[name] != after[name]:
            record.wrong.append(f"{label}: after detach {name} differ: {_difference(after[name], before[name])}")
    return course, rows


def _watched_without_checks(model: nn.Module, case: Case, *, way: Served) -> Results:
    with attach(model, url=None, quiet=True, attention=way, norms_every_steps=10**6):
        return generate(model, case) if case.generates else train(model, case)


def _states(agent: Any) -> Iterator[tuple[str, int, int]]:
    """For each layer: name, counted rows, and rows whose output or gradient is reported as wrong."""
    attached = agent._attached
    sizes = [len(layer.heads) for layer in attached.layers]
    for layer, state in zip(attached.layers, torch.split(attached.state, sizes), strict=True):
        words = state.numpy()
        counted = int(sum(slot_values(words, slot).sum() for slot in (Slot.ROWS, Slot.NONFINITE_ROWS)))
        yield layer.name, counted, int(words[:, [Slot.WRONG_ROWS, Slot.WRONG_GRADIENT_ROWS]].sum())


def _traces(model: nn.Module) -> dict[str, Any]:
    """All state of a model that attach could leave changed."""
    traces: dict[str, Any] = {"keys of the state dict": list(model.state_dict())}
    for name, module in model.named_modules():
        hooks = {k: list(v) for k, v in vars(module).items() if k.endswith("hooks") and isinstance(v, dict) and v}
        traces[f"attributes of {name or 'the model'}"] = sorted(vars(module))
        traces[f"hooks of {name or 'the model'}"] = {k: len(v) for k, v in hooks.items()}
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            traces[f"attention of {name or 'the model'}"] = config._attn_implementation
    traces["scaled_dot_product_attention"] = torch.nn.functional.scaled_dot_product_attention.__module__
    return traces


def _difference(after: Any, before: Any) -> str:
    if isinstance(after, list) and isinstance(before, list):
        return str(sorted(set(after) ^ set(before)))
    return f"{after!r}, without foreshock {before!r}"


def _outcome(attention: dict[str, str], rows: dict[str, int], log_text: str) -> dict[str, str]:
    """The outcome for each module that computes attention."""
    outcome = {}
    lines = log_text.splitlines()
    for name in attention:
        path = name.split(".")
        owners = [".".join(path[:n]) for n in range(len(path), 0, -1)] or ["model"]
        if any(rows.get(owner) for owner in (*owners, "model")):
            outcome[name] = "counted"
            continue
        reasons = [line for owner in owners for line in lines if _names(line, owner) and not _claims_supported(line)]
        outcome[name] = reasons[0].strip() if reasons else "missed"
    return outcome


def _names(line: str, name: str) -> bool:
    words = re.sub("[,:;()]", " ", line).split()
    return any(word == name or word.startswith(f"{name}.") for word in words)


def _claims_supported(line: str) -> bool:
    """Whether a line of the table says that the module is supported, so its rows must be counted."""
    return line.rstrip().endswith(("reference", "kernel", "native attention, sampled", "probe"))
