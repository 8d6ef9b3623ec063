"""Compares the results of a model with and without foreshock: bit-identical, or within rounding.

Float32 results are compared with float64 results of the same model. Some models are chaotic: one rounding of their
weights changes a gradient of the third step by a third of its norm. For these models two conditions apply: perturbing
the weights by one rounding must change the results by as much, and in float64, where chaos cannot grow as far, the
results with and without foreshock must agree.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Final

import torch
from tests.zoo.running import Case, Results
from torch import Tensor, nn

Run = Callable[[nn.Module, Case], Results]

MAX_ERROR_RATIO: Final = 8.0
MIN_TOLERANCE: Final = 2e-5
"""Tolerated relative error against float64: MAX_ERROR_RATIO times the plain model's error, or MIN_TOLERANCE."""
CHAOTIC: Final = 1e-2
"""A tensor with a larger error in the plain model cannot be compared with float64."""
MIN_TOLERANCE_FLOAT64: Final = 1e-9
PERTURBED_COPIES: Final = 3
"""Copies with perturbed weights that measure how sensitive a model is to rounding."""


def first_difference(plain: Results, watched: Results) -> str | None:
    """The first tensor that is not bit-identical, with its difference; None if all are."""
    typical_norms = _typical_norms(plain)
    for name, plain_value, watched_value in _pairs(plain, watched):
        if isinstance(watched_value, str):
            return watched_value
        if not torch.equal(plain_value.nan_to_num(0.5), watched_value.nan_to_num(0.5)):
            error = _relative(watched_value, plain_value, typical_norms[_kind(name)] / 100)
            return f"{name} differs by {error:.2g} of its norm"
    return None


class Rounding:
    """The effect of rounding on one model in one case. The runs that measure it are made once, when needed."""

    def __init__(self, pristine: nn.Module, case: Case, run: Run, plain: Results) -> None:
        self._pristine, self._case, self._run, self._plain = pristine, case, run, plain
        self._reference: Results | None = None
        self._perturbed: list[Results] = []

    def excess(self, watched: Results, watched_run: Run) -> str | None:
        """The first tensor of `watched` with an error beyond rounding; `watched_run` repeats the watched run."""
        reference = self._reference = self._reference or self._in_float64(self._run)
        typical_norms = _typical_norms(self._plain)
        suspects = []
        for name, plain_value, watched_value in _pairs(self._plain, watched):
            if isinstance(watched_value, str):
                return watched_value
            if torch.equal(plain_value.nan_to_num(0.5), watched_value.nan_to_num(0.5)):
                continue
            # a gradient whose exact value is zero is only rounding, small compared with others of its kind
            min_norm = typical_norms[_kind(name)] / 100
            exact = reference.tensors.get(name)
            if (
                exact is None
                or exact.shape != plain_value.shape
                or (plain_error := _relative(plain_value, exact, min_norm)) > CHAOTIC
            ):
                suspects.append((name, _relative(watched_value, plain_value, min_norm)))
            elif not (error := _relative(watched_value, exact, min_norm)) <= max(
                MAX_ERROR_RATIO * plain_error, MIN_TOLERANCE
            ):
                suspects.append((name, error))
        if not suspects:
            return None
        if (excess := self._beyond_perturbation(suspects)) is not None:
            return excess
        return self._excess_in_float64(reference, watched_run)

    def _beyond_perturbation(self, errors: list[tuple[str, float]]) -> str | None:
        """The first tensor whose error exceeds the effect of perturbed weights."""
        if not self._perturbed:
            eager = dataclasses.replace(self._case, compiled=False)
            self._perturbed = [
                self._run(_perturbed(self._pristine, seed), eager) for seed in range(1, PERTURBED_COPIES + 1)
            ]
        typical_norms = _typical_norms(self._plain)
        for name, error in errors:
            plain_value, min_norm = self._plain.tensors[name], typical_norms[_kind(name)] / 100
            perturbed = [results.tensors.get(name) for results in self._perturbed]
            plain_error = max(
                (
                    _relative(x, plain_value, min_norm)
                    for x in perturbed
                    if x is not None and x.shape == plain_value.shape
                ),
                default=0.0,
            )
            if not error <= max(MAX_ERROR_RATIO * plain_error, MIN_TOLERANCE):
                return (
                    f"{name} is off by {error:.2g} of its norm, a rounding of the weights moves it by {plain_error:.2g}"
                )
        return None

    def _excess_in_float64(self, reference: Results, watched_run: Run) -> str | None:
        if not reference.tensors:  # a model for float32 only: the comparison with perturbed weights must suffice
            return None
        watched = self._in_float64(watched_run)
        typical_norms = _typical_norms(reference)
        perturbed: Results | None = None
        for name, plain_value, watched_value in _pairs(reference, watched):
            if isinstance(watched_value, str):
                return f"in float64 {watched_value}"
            min_norm = typical_norms[_kind(name)] / 100
            error = _relative(watched_value, plain_value, min_norm)
            if error > MIN_TOLERANCE_FLOAT64:
                perturbed = perturbed or self._in_float64(self._run, perturb_seed=1)
                plain_error = _relative(perturbed.tensors[name], plain_value, min_norm)
                if not error <= MAX_ERROR_RATIO * plain_error:
                    return (
                        f"in float64 {name} is off by {error:.2g} of its norm, a rounding moves it by {plain_error:.2g}"
                    )
        return None

    def _in_float64(self, run: Run, perturb_seed: int | None = None) -> Results:
        model = copy.deepcopy(self._pristine).double()
        case, inputs = dataclasses.replace(self._case, compiled=False), {}
        for name, value in case.given.items():
            inputs[name] = value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        if perturb_seed is not None:
            model = _perturbed(model, perturb_seed)
        try:
            return run(model, dataclasses.replace(case, given=inputs))
        except Exception:  # a model for float32 only
            return Results()


def _perturbed(pristine: nn.Module, seed: int) -> nn.Module:
    """A copy with each weight perturbed by about one rounding."""
    model = copy.deepcopy(pristine)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                unit = torch.finfo(parameter.dtype).eps / 2
                parameter.mul_(1 + 2 * unit * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def _pairs(plain: Results, watched: Results) -> list[tuple[str, Tensor, Tensor | str]]:
    """Name, tensor, and its counterpart or an error message."""
    if list(plain.tensors) != list(watched.tensors):
        unmatched = sorted(set(plain.tensors) ^ set(watched.tensors))
        return [
            (
                "",
                torch.empty(0),
                f"{unmatched[0]} exists only once" if unmatched else "its tensors come in another order",
            )
        ]
    pairs: list[tuple[str, Tensor, Tensor | str]] = []
    for name, plain_value in plain.tensors.items():
        watched_value = watched.tensors[name]
        same = plain_value.shape == watched_value.shape
        pairs.append(
            (
                name,
                plain_value,
                watched_value
                if same
                else f"{name} has shape {list(watched_value.shape)}, not {list(plain_value.shape)}",
            )
        )
    return pairs


def _kind(name: str) -> str:
    return name.partition(" of ")[0] if " of " in name else name


def _typical_norms(results: Results) -> dict[str, float]:
    """The root mean square of the norms of all tensors of a kind, for example the gradients of a step."""
    squares: dict[str, list[float]] = {}
    for name, value in results.tensors.items():
        squares.setdefault(_kind(name), []).append(float(_finite(value).norm() ** 2))
    return {kind: (sum(of) / len(of)) ** 0.5 for kind, of in squares.items()}


def _relative(value: Tensor, of: Tensor, min_norm: float) -> float:
    return float((_finite(value) - _finite(of)).norm()) / max(float(_finite(of).norm()), min_norm, 1e-30)


def _finite(value: Tensor) -> Tensor:
    return value.detach().double().nan_to_num(0.0, 1e30, -1e30)
