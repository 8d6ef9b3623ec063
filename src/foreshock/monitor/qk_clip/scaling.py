"""QK-Clip: after an optimizer step, W_Q and W_K of heads whose largest score passed a threshold are scaled down.

Kimi K2 (arXiv 2507.20534, section 2.1): with S the largest score of a head in the step just made and tau the threshold,
gamma = min(1, tau / S); W_Q and the bias of the queries are scaled by gamma^alpha, W_K and the bias of the keys by
gamma^(1 - alpha), so that the same scores would be tau at most. In multi-head latent attention that is so for the part
of the keys that is each head's own; the queries of the part that all heads share are scaled by gamma, its keys not at
all. It changes the weights, so it is asked for by itself.

It mends scores that grow by a learning rate that is too high. It does not mend a drift by rounding: there the large
scores are a shift that softmax does not see, and scaling would cut what the head has learnt.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot
from foreshock.monitor.model.layers import HeadRows, Projection
from foreshock.monitor.model.weights import is_conv1d, is_sharded, is_wrapped, local_tensor, spans_of, stored

ALPHA: Final = 0.5
"""The share of the queries in the scaling, as in Kimi K2."""
_QUERY, _KEY, _QUERY_ALONE = range(3)
"""What a part of the weights is to the scores: scaled together with the other, or for both."""
logger: Final = logging.getLogger("foreshock")


class _Source(NamedTuple):
    """A parameter that is scaled, and where its numbers lay when it was found."""

    holder: nn.Module
    name: str
    parameter: nn.Parameter
    address: int


class _Parts:
    """Parts of weights, all of one dtype, with the place of each one's factor."""

    def __init__(self, views: list[Tensor], places: list[int]) -> None:
        self._views, self._places = views, places
        self._scale: Callable[[Tensor], None] = self._one_by_one
        if views[0].is_cuda:
            from foreshock.kernels import scaling  # Triton's

            table, largest = scaling.table_of(views, places), max(view.numel() for view in views)
            self._scale = functools.partial(scaling.scale, table, dtype=views[0].dtype, largest=largest)

    def scale(self, factors: Tensor) -> None:
        """Multiply each part by its factor, float64 [N]."""
        self._scale(factors)

    def _one_by_one(self, factors: Tensor) -> None:
        known = factors.tolist()
        for view, place in zip(self._views, self._places, strict=True):
            if known[place] != 1.0:
                view.mul_(known[place])


class QKClip:
    """Scales the heads of a model's layers in place, without waiting for the device.

    layers, projections: those of the watched layers, in the order of the state's rows; a sentence in the place of a
    projection gives why its layer is not scaled. state: int64 [N, SLOT_COUNT], of which SCORE_MAX must be that of all
    rows of the step. For layers that `find` marked as native, `largest`, float32 [N], replaces it: the maximum in steps
    in which all of their rows were looked at, and -inf in others, which scale nothing of them.
    """

    def __init__(
        self,
        layers: Sequence[wire.Layer],
        projections: Sequence[Projection | str | None],
        state: Tensor,
        *,
        threshold: float,
        largest: Tensor | None = None,
    ) -> None:
        if not (math.isfinite(threshold) and threshold > 0):
            raise ValueError(f"the threshold of QK-Clip is {threshold}; give a largest score above 0, for example 100")
        self.refused: dict[int, str] = {}
        """Why a layer is not scaled, by its number."""
        self.group: torch.distributed.ProcessGroup | None = None
        """The processes whose replicas of a head must be scaled alike; None: none but this one. In every step they are
        asked for their largest scores, and whether each may scale (one packed MAX all-reduce)."""
        self._layers: Final = tuple(layers)
        self._threshold = threshold
        self._scores = state.view(torch.float64)[:, Slot.SCORE_MAX]
        self._in_full = torch.full_like(self._scores, -math.inf) if largest is None else largest
        self._kept = torch.zeros_like(self._scores, dtype=torch.bool)
        self._any_kept = False
        self._held_back = torch.full_like(self._scores, -math.inf)
        """Largest scores since the last sample; the state holds those of the step under way alone."""
        self._total = len(self._scores)
        self._sources: list[_Source] = []
        self._parts: list[_Parts] = []
        exponents = [[ALPHA], [1.0 - ALPHA], [1.0]]
        self._exponents: Final = torch.tensor(exponents, dtype=torch.float64, device=state.device)
        """Of each head's gamma, by what a part is to the scores."""
        self._unfit = torch.ones_like(self._scores)
        """1 for heads of layers that are refused, else 0."""
        self.done = torch.zeros((2, self._total), dtype=torch.float64, device=state.device)
        """The smallest gamma of each head since `forget`, and how often it was scaled."""
        self.wishes = torch.zeros(2, dtype=torch.float64, device=state.device)
        """Whether any process of the group asked for clipping in the last step, and whether any could not take part."""
        self.forget()
        self.find(projections)

    def find(self, projections: Sequence[Projection | str | None], kept: Sequence[bool] = ()) -> None:
        """Look where W_Q and W_K lie now, and which layers' own attention is kept."""
        heads_kept = [own for layer, own in zip(self._layers, kept, strict=False) for _ in layer.heads]
        self._any_kept = any(heads_kept)
        if self._any_kept:
            self._kept.copy_(torch.tensor(heads_kept))
        self.refused, self._sources = {}, []
        whys = [_why_refused(projection, self._scores.device) for projection in projections]
        owners: dict[int, set[int]] = {}
        for place, projection in enumerate(projections):
            for parameter in parameters_of(projection) if isinstance(projection, Projection) else ():
                owners.setdefault(id(parameter), set()).add(place)
        for sharing in owners.values():
            for place in sharing if len(sharing) > 1 else ():
                others = ", ".join(str(self._layers[other].layer) for other in sorted(sharing - {place}))
                whys[place] = whys[place] or f"it shares W_Q or W_K with layer {others}, which would be scaled with it"
        unfit = np.ones(self._total)
        parts: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
        start = 0
        for layer, projection, why in zip(self._layers, projections, whys, strict=True):
            if why is not None:
                self.refused[layer.layer] = why
            elif isinstance(projection, Projection):
                unfit[start : start + len(layer.heads)] = 0.0
                for side, role in _roles(projection, len(layer.heads)):
                    self._add(side, role * self._total + start, parts)
            start += len(layer.heads)
        self._unfit.copy_(torch.from_numpy(unfit))
        self._parts = [_Parts(*of_dtype) for of_dtype in parts.values() if of_dtype[0]]

    def _add(self, side: HeadRows, place: int, parts: dict[torch.dtype, tuple[list[Tensor], list[int]]]) -> None:
        """The rows of each head that lie here, whose factors stand from `place` on."""
        for name, parameter, offset in _of(side):
            held = local_tensor(parameter)
            self._sources.append(_Source(side.holder, name, parameter, held.data_ptr()))
            views, places = parts.setdefault(held.dtype, ([], []))
            dim = 1 if held.dim() == 2 and is_conv1d(side.holder) else 0
            low, high = spans_of(parameter)[dim] if is_sharded(parameter) else (0, held.shape[dim])
            for head, first in enumerate(side.starts):
                first += offset
                rows = range(first, first + side.stride * side.head_dim, side.stride)
                if here := [row - low for row in rows if low <= row < high]:
                    span = slice(here[0], here[-1] + 1, side.stride)
                    views.append(held[:, span] if dim else held[span])
                    places.append(place + head)

    @property
    @torch.no_grad()
    def stale(self) -> bool:
        """Whether a parameter was replaced since `find`, or its numbers moved."""
        return any(
            stored(source.holder, source.name) is not source.parameter
            or local_tensor(source.parameter).data_ptr() != source.address
            for source in self._sources
        )

    @property
    def largest(self) -> Tensor:
        """The largest score of each head since the last sample, float64 [N]."""
        return torch.maximum(self._held_back, self._scores)

    @torch.no_grad()
    def begin(self) -> None:
        """Leave what was counted until now to the next sample: clipping goes by the steps that follow."""
        self._held_back.copy_(self.largest)
        self._scores.fill_(-math.inf)
        if self._any_kept:
            self._in_full.fill_(-math.inf)

    @torch.no_grad()
    def after_step(self, *, on: bool = True, broken: bool = False) -> None:
        """Scale what passed the threshold in the step that is done. Call it once, after the optimizer's step.

        on: whether this process asks for it; one of the group is enough. broken: whether it cannot take part; then
        nobody does.
        """
        scores, unfit = self._scores.clone(), self._unfit
        if self._any_kept:
            scores = torch.maximum(scores, self._in_full)
            unfit = torch.maximum(unfit, (self._kept & (self._in_full == -math.inf)).to(unfit.dtype))
        self.begin()
        if self.group is not None:
            scores, unfit = self._agreed(scores, unfit, on=on, broken=broken)
        if broken or (self.group is None and not on):
            return
        passed = (scores > self._threshold) & (scores < math.inf) & (unfit <= 0)
        if not passed.is_cuda and not bool(passed.any()):
            return  # known here without waiting for anything
        gamma = torch.where(passed, self._threshold / scores, 1.0)
        torch.minimum(self.done[0], gamma, out=self.done[0])
        self.done[1] += passed
        factors = gamma.pow(self._exponents).view(-1)
        for parts in self._parts:
            parts.scale(factors)

    def _agreed(self, scores: Tensor, unfit: Tensor, *, on: bool, broken: bool) -> tuple[Tensor, Tensor]:
        """Largest scores of the group's processes, and which heads are unfit in any of them: all, where nobody asks or
        one cannot take part."""
        wishes = [torch.full_like(scores[:1], float(wish)) for wish in (on, broken)]
        finite = torch.nan_to_num(scores, nan=math.inf, posinf=math.inf, neginf=-math.inf)
        packed = torch.cat([finite, unfit, *wishes])
        torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX, group=self.group)
        self.wishes.copy_(packed[-2:])
        unfit = packed[self._total : -2] + (self.wishes[1] - self.wishes[0] + 1)
        return packed[: self._total], unfit

    @torch.no_grad()
    def before_sample(self) -> None:
        """Put the largest scores since the last sample back into the state, for the sample that is taken now."""
        self._scores.copy_(self.largest)
        self._held_back.fill_(-math.inf)

    @torch.no_grad()
    def forget(self) -> None:
        """Begin `done` anew."""
        self.done[0].fill_(1.0)
        self.done[1].zero_()


def _roles(projection: Projection, heads: int) -> Iterator[tuple[HeadRows, int]]:
    """The parts of the weights that are scaled, and what each is to the scores."""
    # Query heads that read one key head pass the threshold one by one. There queries alone are scaled: the scores of a
    # head change by its own gamma, and the other heads of its group do not change at all.
    grouped = len(set(projection.key.starts)) < heads
    yield projection.query, _QUERY_ALONE if grouped else _QUERY
    if not grouped:
        yield projection.key, _KEY
    if projection.query_of_shared is not None:
        yield projection.query_of_shared, _QUERY_ALONE


def _why_refused(projection: Projection | str | None, device: torch.device) -> str | None:
    """Why the heads of a layer cannot be scaled; None where they can."""
    if projection is None:
        return "its W_Q and W_K were not found"
    if isinstance(projection, str):
        return projection
    if "norms of the weights only" in projection.layout:
        return f"its scores do not follow from its weights ({projection.layout})"
    for side in projection.sides:
        weight = stored(side.holder, side.weight)
        if not isinstance(weight, nn.Parameter):
            return "its weight is computed from others"
        if weight.dim() != 2:
            return f"its weight has shape {list(weight.shape)}: it is stored flat or in parts"
        if not weight.requires_grad:
            return "its weight is frozen"
        held = local_tensor(weight)
        if is_wrapped(held):
            return f"its weight is a {type(held).__name__}, which stores its numbers in another form"
        if held.device != device:
            return f"its weight is on {held.device} but its statistics are on {device}"
    return None


def parameters_of(projection: Projection) -> Iterator[nn.Parameter]:
    """Weights and biases of queries and keys."""
    for side in projection.sides:
        yield from (parameter for _, parameter, _ in _of(side))


def _of(side: HeadRows) -> Iterator[tuple[str, nn.Parameter, int]]:
    """The weight of one side and its bias: name, parameter, and where its rows begin beside those of the weight."""
    weight = stored(side.holder, side.weight)
    if isinstance(weight, nn.Parameter):
        yield side.weight, weight, 0
    name = "in_proj_bias" if isinstance(side.holder, nn.MultiheadAttention) else "bias"
    bias = stored(side.holder, name)
    if isinstance(bias, nn.Parameter):
        yield name, bias, len(weight) if side.weight == "k_proj_weight" and isinstance(weight, Tensor) else 0
