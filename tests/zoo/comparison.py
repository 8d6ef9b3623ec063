"""Whether two courses of a model are the same, or differ by no more than rounding.

A course in float32 is judged by the same course in float64. Some models are chaotic: one rounding in their weights
moves a gradient of the third step by a third of its norm. There two things must hold: the model differs from itself by
as much when its weights are moved by a rounding, and in float64, where chaos has no room to grow, the model with
foreshock under it does what it does without.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Final

import torch
from tests.zoo.running import Case, Course
from torch import Tensor, nn

Run = Callable[[nn.Module, Case], Course]

LARGEST: Final = 8.0
FLOOR: Final = 2e-5
"""Rounding: an error of at most LARGEST times that of the model itself, or FLOOR, relative, judged by float64."""
CHAOTIC: Final = 1e-2
"""A tensor whose own error is larger cannot be judged so."""
FLOOR_IN_FLOAT64: Final = 1e-9
NUDGES: Final = 3
"""Copies with moved weights that show how far a model differs from itself."""


def first_difference(plain: Course, watched: Course) -> str | None:
    """The first tensor that is not the same to the last bit, and by how much; None where all are."""
    usual = _usual_norms(plain)
    for name, own, ours in _pairs(plain, watched):
        if isinstance(ours, str):
            return ours
        if not torch.equal(own.nan_to_num(0.5), ours.nan_to_num(0.5)):
            return f"{name} differs by {_relative(ours, own, usual[_kind(name)] / 100):.2g} of its norm"
    return None


class Rounding:
    """What rounding does to one model in one case; what it takes to know that is run once, and only where asked."""

    def __init__(self, pristine: nn.Module, case: Case, run: Run, plain: Course) -> None:
        self._pristine, self._case, self._run, self._plain = pristine, case, run, plain
        self._truth: Course | None = None
        self._nudged: list[Course] = []

    def excess(self, watched: Course, watched_run: Run) -> str | None:
        """The first tensor of `watched` that errs by more than rounding; `watched_run` runs a model as it was run."""
        truth = self._truth = self._truth or self._in_float64(self._run)
        usual = _usual_norms(self._plain)
        doubtful = []
        for name, own, ours in _pairs(self._plain, watched):
            if isinstance(ours, str):
                return ours
            if torch.equal(own.nan_to_num(0.5), ours.nan_to_num(0.5)):
                continue
            # a gradient that is zero in truth is nothing but rounding, small beside those of its kind
            least = usual[_kind(name)] / 100
            exact = truth.tensors.get(name)
            if exact is None or exact.shape != own.shape or (by := _relative(own, exact, least)) > CHAOTIC:
                doubtful.append((name, _relative(ours, own, least)))
            elif not (error := _relative(ours, exact, least)) <= max(LARGEST * by, FLOOR):
                doubtful.append((name, error))
        if not doubtful:
            return None
        if (beyond := self._beyond_chaos(doubtful)) is not None:
            return beyond
        return self._excess_in_float64(truth, watched_run)

    def _beyond_chaos(self, errors: list[tuple[str, float]]) -> str | None:
        """Of tensors and their errors the first that rounded weights do not move as far."""
        if not self._nudged:
            eager = dataclasses.replace(self._case, compiled=False)
            self._nudged = [self._run(_nudged(self._pristine, seed), eager) for seed in range(1, NUDGES + 1)]
        usual = _usual_norms(self._plain)
        for name, error in errors:
            own, least = self._plain.tensors[name], usual[_kind(name)] / 100
            moved = [course.tensors.get(name) for course in self._nudged]
            by = max((_relative(x, own, least) for x in moved if x is not None and x.shape == own.shape), default=0.0)
            if not error <= max(LARGEST * by, FLOOR):
                return f"{name} is off by {error:.2g} of its norm, a rounding of the weights moves it by {by:.2g}"
        return None

    def _excess_in_float64(self, truth: Course, watched_run: Run) -> str | None:
        if not truth.tensors:  # it is written for float32: that it differs from itself by as much has to do
            return None
        watched = self._in_float64(watched_run)
        usual = _usual_norms(truth)
        moved: Course | None = None
        for name, own, ours in _pairs(truth, watched):
            if isinstance(ours, str):
                return f"in float64 {ours}"
            least = usual[_kind(name)] / 100
            error = _relative(ours, own, least)
            if error > FLOOR_IN_FLOAT64:
                moved = moved or self._in_float64(self._run, nudge=1)
                by = _relative(moved.tensors[name], own, least)
                if not error <= LARGEST * by:
                    return f"{name} is off by {error:.2g} of its norm in float64, where rounding moves it by {by:.2g}"
        return None

    def _in_float64(self, run: Run, nudge: int | None = None) -> Course:
        model = copy.deepcopy(self._pristine).double()
        case, given = dataclasses.replace(self._case, compiled=False), {}
        for name, value in case.given.items():
            given[name] = value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        if nudge is not None:
            model = _nudged(model, nudge)
        try:
            return run(model, dataclasses.replace(case, given=given))
        except Exception:  # a model that is written for float32
            return Course()


def _nudged(pristine: nn.Module, seed: int) -> nn.Module:
    """A copy each of whose weights is moved by about one rounding."""
    model = copy.deepcopy(pristine)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                unit = torch.finfo(parameter.dtype).eps / 2
                parameter.mul_(1 + 2 * unit * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def _pairs(plain: Course, watched: Course) -> list[tuple[str, Tensor, Tensor | str]]:
    """Name, tensor, and its counterpart, or a sentence where there is none."""
    if list(plain.tensors) != list(watched.tensors):
        odd = sorted(set(plain.tensors) ^ set(watched.tensors))
        return [("", torch.empty(0), f"{odd[0]} exists only once" if odd else "its tensors come in another order")]
    pairs: list[tuple[str, Tensor, Tensor | str]] = []
    for name, own in plain.tensors.items():
        ours = watched.tensors[name]
        same = own.shape == ours.shape
        pairs.append((name, own, ours if same else f"{name} has shape {list(ours.shape)}, not {list(own.shape)}"))
    return pairs


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
