"""What the agent does once a loss or gradient norm is not finite: it samples every step and looks at the parameters.

A healthy step costs two comparisons. A value that is on a GPU is not waited for: it is known when its sample has been
read, a step or more later. From then on, for as long as every step is sampled, the agent waits for these values, so
that it meets the next broken step while the gradients of that step exist.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from foreshock.monitor.model.sharding import is_sharded


@dataclass(frozen=True, slots=True)
class BrokenParameters:
    """Of `total` tensors in the order of the model's modules, `broken` are not finite."""

    broken: int
    total: int
    last: str
    """The last one that is not finite. A backward that breaks reaches what comes before it, and nothing after."""
    after: str
    """The next one, which is finite; empty if there is none."""


def broken_among(named: Iterable[tuple[str, Any]]) -> BrokenParameters | None:
    """The tensors that are not finite, None if all are. Of sharded tensors this process's own part is checked.

    It waits for the device, and holds one number for each tensor.
    """
    names, tensors = [], []
    for name, tensor in named:
        if tensor is None or not tensor.is_floating_point() or tensor.is_sparse or not tensor.numel():
            continue
        names.append(name)
        tensors.append((tensor.to_local() if is_sharded(tensor) else tensor).detach())
    if not tensors:
        return None
    with torch.no_grad():
        sound = [bool(norm.isfinite()) for norm in torch._foreach_norm(tensors, float("inf"))]
    if all(sound):
        return None
    last = max(place for place, is_sound in enumerate(sound) if not is_sound)
    after = names[last + 1] if last + 1 < len(names) else ""
    return BrokenParameters(sound.count(False), len(sound), names[last], after)


def sentence(what: str, found: BrokenParameters) -> str:
    """In words; what: gradients, or weights."""
    if found.broken == found.total:
        return f"None of {found.total} {what} is finite."
    bound = f", and {found.after}, which follows it, is finite" if found.after else ""
    return f"{found.broken} of {found.total} {what} are not finite: the last one is that of {found.last}{bound}."


class ParametersFound(NamedTuple):
    """What was found of a model's parameters after something broke."""

    sentence: str
    """empty: every tensor is finite"""
    weights: bool
    """Whether weights, or the state that the next update is made of, are not finite."""


_REST: Final = 20
"""After a crisis none begins for this many times its length: a run that stays broken is sampled as any other."""


class Crisis:
    """Watches the numbers of each step of one agent.

    model: gives the model that is watched, None once it is gone. optimizers: those that the agent was given. steps: the
    length of a crisis. watch: has every step sampled for that long, from the step it is given on.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        optimizers: Callable[[], Sequence[Any]],
        steps: int,
        watch: Callable[[int], None],
    ) -> None:
        self._model, self._optimizers, self._steps, self._watch = model, optimizers, steps, watch
        self._until = self._rests_until = -1
        self._weights_broken = False

    def begin(self, step: int) -> None:
        """Something is not finite at `step`."""
        if step > self._rests_until:
            self._until, self._rests_until = step + self._steps, step + _REST * self._steps
            self._weights_broken = False
            self._watch(step)

    def look(self, step: int, *values: object) -> ParametersFound | None:
        """What is not finite among the parameters if one of the step's `values` is not, until their weights are not.

        Weights that are finite after such a step show that its update was skipped, which the next step cannot show if
        its loss breaks as well.
        """
        if all(self._is_finite(value, step) for value in values):
            return None
        self.begin(step)
        if self._weights_broken or (model := self._model()) is None:
            return None
        found = broken_parameters(model, self._optimizers())
        self._weights_broken = found.weights
        return found

    def _is_finite(self, value: object, step: int) -> bool:
        """Whether a number is finite, or not known yet."""
        if isinstance(value, float):
            return math.isfinite(value)
        if not isinstance(value, Tensor) or is_sharded(value) or value.numel() != 1:
            return True
        return not (value.is_cpu or step <= self._until) or math.isfinite(float(value))


def broken_parameters(model: nn.Module, optimizers: Sequence[Any] = ()) -> ParametersFound:
    """Which gradients, weights and optimizer states are not finite."""
    parameters = list(model.named_parameters())
    gradients = broken_among((name, parameter.grad) for name, parameter in parameters)
    weights = broken_among(parameters)
    held = [optimizer.state.get(parameter, {}) for _, parameter in parameters for optimizer in optimizers]
    states = broken_among(("", value) for state in held for value in state.values() if isinstance(value, Tensor))
    if gradients is not None and gradients == weights:
        return ParametersFound(f"{sentence('gradients', gradients)} Nor are their weights.", weights=True)
    said = [sentence(what, found) for what, found in (("gradients", gradients), ("weights", weights)) if found]
    if weights is None:
        said.append("Weights are finite." if said else "Gradients and weights are finite.")
    if states is not None and weights is None:
        said.append("The optimizer's state is not finite: its next update breaks the weights.")
    return ParametersFound(" ".join(said), weights=weights is not None or states is not None)
