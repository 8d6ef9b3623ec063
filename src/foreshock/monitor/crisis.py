"""After a nonfinite loss or gradient norm, sample every step and inspect the parameters.

A healthy step costs two comparisons. The agent does not wait for a value on a GPU: it learns the value from a sample, a
step or more later. If it is not finite, a crisis begins, in which every step is sampled and the agent waits for these
values, so that it can inspect the gradients of the next broken step before they are freed. After the first step it also
waits, and inspects the parameters once, because loading or the first update may have broken weights after this loss.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from foreshock.monitor.model.layers import is_sharded


class Looked(NamedTuple):
    """Result of inspecting named tensors, in the order of the model's modules."""

    total: int
    broken: int = 0
    """Number of nonfinite tensors."""
    last: str = ""
    """Name of the last nonfinite tensor. A broken backward breaks the tensors before its origin, but none after it."""
    after: str = ""
    """Name of the next tensor, which is finite; empty if there is none."""
    largest: tuple[str, float] = ("", 0.0)
    """Name of the finite tensor with the largest absolute value, and that value."""

    def sentence(self, what: str) -> str:
        """Describe the result; what: "gradients" or "weights"."""
        if self.broken == self.total:
            return f"None of {self.total} {what} is finite."
        bound = f", and {self.after}, which follows it, is finite" if self.after else ""
        verb = "is" if self.broken == 1 else "are"
        return f"{self.broken} of {self.total} {what} {verb} not finite: the last one is that of {self.last}{bound}."


def look_at(*groups: Iterable[tuple[str, Any]]) -> list[Looked]:
    """Inspect each group of named tensors. Of sharded tensors, only this process's part is checked.

    It waits once for each device, and allocates two numbers per tensor.
    """
    named = [[(name, each) for name, tensor in group if (each := _checked(tensor)) is not None] for group in groups]
    known = iter(_largest([tensor for group in named for _, tensor in group]))
    return [_looked([name for name, _ in group], [next(known) for _ in group]) for group in named]


_CHECKED: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _checked(tensor: Any) -> Tensor | None:
    """Return the part of a tensor that can be checked; None if there is none."""
    if tensor is None or tensor.dtype not in _CHECKED or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if isinstance(tensor, nn.parameter.UninitializedParameter):
        return None
    part: Tensor = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
    return part if type(part) is Tensor and part.numel() else None  # quantised tensors, as from torchao, are skipped


def _largest(tensors: Sequence[Tensor]) -> list[tuple[bool, float]]:
    """Return for each tensor whether it is finite, and its largest absolute value."""
    places: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(place)
    known = [(True, 0.0)] * len(tensors)
    with torch.no_grad():
        for by_type in places.values():
            norms = [
                torch.stack(torch._foreach_norm([tensors[i] for i in each], float("inf"))) for each in by_type.values()
            ]
            both = torch.cat([torch.stack([each.isfinite().float(), each.float()]) for each in norms], 1).tolist()
            for place, finite, largest in zip(itertools.chain(*by_type.values()), *both, strict=True):
                known[place] = bool(finite), largest
    return known


def _looked(names: Sequence[str], known: Sequence[tuple[bool, float]]) -> Looked:
    finite = [(name, each) for name, (sound, each) in zip(names, known, strict=True) if sound]
    largest = max(finite, default=("", 0.0), key=lambda one: one[1])
    last = max((place for place, (sound, _) in enumerate(known) if not sound), default=None)
    if last is None:
        return Looked(len(names), largest=largest)
    after = names[last + 1] if last + 1 < len(names) else ""
    return Looked(len(names), len(names) - len(finite), names[last], after, largest)


class ParametersFound(NamedTuple):
    """Result of inspecting a model's parameters after a nonfinite value."""

    sentence: str
    """Description; empty if every tensor is finite."""
    weights: bool
    """Whether weights, or the optimizer state for the next update, are not finite."""
    every_gradient: bool = False
    """Whether all gradients are nonfinite."""
    update: bool = False
    """Whether weights are not finite although all known gradients are finite."""


_EARLY_STEPS: Final = 100
"""In this many first steps, a loss of more than twice the first one starts close sampling."""
_REST: Final = 20
"""After a crisis, no other begins for this many times its length, so that a run that stays broken costs little."""


class Crisis:
    """Watches loss and gradient norm of each step for one agent.

    model: returns the watched model, or None after it was deleted. optimizers: returns the optimizers passed to the
    agent. steps: length of a crisis. watch: starts sampling of every step for that length, from the given step on.
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
        self._is_first = True
        self._first = 0, math.nan
        """The first step and its loss."""
        self._found: ParametersFound | None = None
        """Result of this crisis's last inspection."""
        self._looked_at = -1

    def begin(self, step: int) -> None:
        """Begin a crisis, because a value is not finite at `step`, unless the last one was too recent."""
        if step > self._rests_until:
            self._until, self._rests_until = step + self._steps, step + _REST * self._steps
            self._found = None
            self._watch(step)

    def look(self, step: int, loss: object, grad_norm: object) -> ParametersFound | None:
        """Inspect the parameters if the step's loss or gradient norm is not finite; None if there is nothing new.

        The parameters are also inspected after the first step, and not any more after weights were found broken. Finite
        weights after a broken step show that its update was skipped; a later step could not show that if its loss is
        broken too. So during a crisis, every broken loss causes an inspection. Broken gradient norms, and broken losses
        after the crisis, cause only one inspection per length of a crisis.
        """
        first, self._is_first = self._is_first, False
        finite_loss = self._is_finite(loss, wait=first or step <= self._until)
        if finite_loss and self._is_finite(grad_norm, wait=first or step <= self._until):
            if first:
                self._first = step, _number(loss)
            elif step < self._first[0] + _EARLY_STEPS and _number(loss) > 2 * self._first[1] > 0:
                self._watch(step)  # a rate that is far too high shows in the rows before the loss is not finite
                self._first = 0, math.nan
            if not first or (model := self._model()) is None or not look_at(model.named_parameters())[0].broken:
                return None
        self.begin(step)
        if self._found is not None:
            if self._found.weights:
                return None
            if step < self._looked_at + (1 if step <= self._until and not finite_loss else self._steps):
                return None if finite_loss else self._found
        if (model := self._model()) is None:
            return None
        self._found, self._looked_at = broken_parameters(model, self._optimizers(), finite_loss=finite_loss), step
        return self._found

    def _is_finite(self, value: object, *, wait: bool) -> bool:
        """Whether a number is finite or unknown. wait: whether to wait for a number on a device."""
        if isinstance(value, float):
            return math.isfinite(value)
        if not isinstance(value, Tensor) or is_sharded(value) or value.numel() != 1:
            return True
        return not (value.is_cpu or wait) or math.isfinite(float(value))


def _number(value: object) -> float:
    """Return a number that is on the host; NaN for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.is_cpu and value.numel() == 1 else math.nan
    return value if isinstance(value, float) else math.nan


def broken_parameters(model: nn.Module, optimizers: Sequence[Any] = (), *, finite_loss: bool) -> ParametersFound:
    """Find nonfinite gradients, weights and optimizer states after a step.

    optimizers: those passed to the agent; if empty, all optimizers in this process with a parameter of the model.
    """
    parameters = list(model.named_parameters())
    optimizers = optimizers or _optimizers_of([parameter for _, parameter in parameters])
    held = [optimizer.state.get(parameter, {}) for _, parameter in parameters for optimizer in optimizers]
    gradients, weights, states = look_at(
        ((name, parameter.grad) for name, parameter in parameters),
        parameters,
        (("", value) for state in held for value in state.values() if isinstance(value, Tensor)),
    )
    if gradients.broken and gradients[:4] == weights[:4]:
        nor = "is its weight" if gradients.broken == 1 else "are their weights"
        sentences = [f"{gradients.sentence('gradients')} Nor {nor}."]
    else:
        both = ("gradients", gradients), ("weights", weights)
        sentences = [found.sentence(what) for what, found in both if found.broken]
    every = 0 < gradients.broken == gradients.total
    if every and finite_loss:
        sentences.append(_FINITE_LOSS)
    elif gradients.broken == 1:
        sentences.append("Only this gradient is broken, so check the operation that uses it, and its other inputs.")
    no_gradients = all(parameter.grad is None for _, parameter in parameters)  # zero_grad was called before
    if weights.broken:
        if not gradients.broken and not no_gradients:
            sentences.append(_UPDATE)
        sentences += [*_rates(optimizers), *_in_half([parameter for _, parameter in parameters], optimizers)]
    elif gradients.broken or no_gradients:
        sentences.append("Weights are finite.")
    elif finite_loss:
        sentences.append(
            f"{_LARGE_NORM} The largest one, {gradients.largest[1]:.2g}, is that of {gradients.largest[0]}."
        )
    else:
        sentences.append(_SOUND_MODEL)
    if states.broken and not weights.broken:
        sentences.append("The optimizer's state is not finite: its next update breaks the weights.")
    broken = bool(weights.broken or states.broken)
    return ParametersFound(" ".join(sentences), broken, every, bool(weights.broken and not gradients.broken))


def _optimizers_of(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Find this process's optimizers of these parameters. Slow, because it scans all objects; only for a crisis."""
    wanted = set(map(id, parameters))
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [
        each
        for each in found
        if any(id(one) in wanted for group in getattr(each, "param_groups", ()) for one in group["params"])
    ]


def _rates(optimizers: Sequence[Any]) -> list[str]:
    """Describe learning rates that are not finite."""
    rates = [float(group["lr"]) for each in optimizers for group in each.param_groups if "lr" in group]
    return [f"The optimizer's learning rate is {rate:g}." for rate in rates if not math.isfinite(rate)][:1]


_UPDATE: Final = (
    "The gradients are finite, so an update of the optimizer broke these weights, or they were loaded like this."
)
_FINITE_LOSS: Final = (
    "The loss was finite: look at how it is computed, at rows that it leaves out, and at whether clipping spread this."
)
_SOUND_MODEL: Final = (
    "Gradients and weights are finite: look at the labels, and at the factors and divisors of the loss."
)
_LARGE_NORM: Final = "Gradients and weights are finite: the gradients are so large that their norm overflows."
_LEAST_HALF: Final = 2.0**-24
"""The smallest positive number of float16; half of it and less rounds to 0."""


def _in_half(parameters: Sequence[nn.Parameter], optimizers: Sequence[Any]) -> list[str]:
    """Describe an eps that breaks weights which an optimizer updates in float16."""
    if not any(each.requires_grad and each.dtype == torch.float16 for each in parameters):
        return []
    known = [group.get("eps") for optimizer in optimizers for group in optimizer.param_groups]
    small = [eps for eps in known if isinstance(eps, float) and eps <= _LEAST_HALF / 2]
    if known and not small:
        return []
    eps = f"the eps of {small[0]:g}" if small else "Adam's default eps of 1e-08"
    return [
        f"Weights are in float16, where {eps} is 0: "
        "a gradient of 0 gives NaN. Keep the weights in float32 and train under autocast with a GradScaler, or set "
        "eps=1e-4."
    ]
