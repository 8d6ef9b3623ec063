"""QK-Clip: when it is on, which layers it may scale, what it did, and how it scales W_Q and W_K after a step.

Kimi K2 (arXiv 2507.20534, section 2.1): with S the largest score of a head in the step just made and tau the threshold,
gamma = min(1, tau / S); W_Q and the bias of the queries are scaled by gamma^alpha, W_K and the bias of the keys by
gamma^(1 - alpha), so that the same scores would be tau at most. In multi-head latent attention that is so for the part
of the keys that is each head's own; the queries of the part that all heads share are scaled by gamma, its keys not at
all. It may scale layers whose largest score is known exactly and whose weights are the optimizer's own. Processes that
hold the same heads must scale them by the same factors.

It repairs scores that grow by a learning rate that is too high. It does not repair a drift by rounding: there the large
scores are a shift that softmax does not see, and scaling would cut what the head has learnt.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.decision import cause_of, is_active
from foreshock.contract.slots import Slot
from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.attention.layout_check import LayoutCheck
from foreshock.monitor.attention.watched_layer import WatchedLayer
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.levels import LEVEL
from foreshock.monitor.guard import Guard, default_torch_modes, logger
from foreshock.monitor.model.discovery import listed
from foreshock.monitor.model.layers import (
    HeadRows,
    Projection,
    is_conv1d,
    is_wrapped,
    local_tensor,
    spans_of,
    stored,
)
from foreshock.monitor.sampling.collector import Counted, passes

ALPHA: Final = 0.5
"""The share of the queries in the scaling, as in Kimi K2."""
_QUERY, _KEY, _QUERY_ALONE = range(3)
"""What a part of the weights is to the scores: scaled together with the other, or for both."""


def _scaler(views: list[Tensor], places: list[int]) -> Callable[[Tensor], None]:
    """Multiplies parts of weights, all of one dtype, by those of the factors, float64 [N], that `places` number."""
    if views[0].is_cuda:
        from foreshock.kernels import scaling  # Triton's

        table, largest = scaling.table_of(views, places), max(view.numel() for view in views)
        return functools.partial(scaling.scale, table, dtype=views[0].dtype, largest=largest)

    def one_by_one(factors: Tensor) -> None:
        known = factors.tolist()
        for view, place in zip(views, places, strict=True):
            if known[place] != 1.0:
                view.mul_(known[place])

    return one_by_one


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
        projections: Sequence[Projection | str],
        state: Tensor,
        *,
        threshold: float,
        largest: Tensor | None = None,
    ) -> None:
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
        self._sources: list[tuple[nn.Module, str, nn.Parameter, int]] = []
        """Parameters that are scaled: holder, name, and where the numbers were when it was found."""
        self._scalers: list[Callable[[Tensor], None]] = []
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

    def find(self, projections: Sequence[Projection | str], kept: Sequence[bool] = ()) -> None:
        """Look where W_Q and W_K lie now, and which layers' own attention is kept."""
        heads_kept = [own for layer, own in zip(self._layers, kept, strict=False) for _ in layer.heads]
        self._any_kept = any(heads_kept)
        if self._any_kept:
            self._kept.copy_(torch.tensor(heads_kept))
        self.refused, self._sources = refusals(self._layers, projections, self._scores.device), []
        unfit = np.ones(self._total)
        parts: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
        start = 0
        for layer, projection in zip(self._layers, projections, strict=True):
            if layer.layer not in self.refused and isinstance(projection, Projection):
                unfit[start : start + len(layer.heads)] = 0.0
                for side, role in _roles(projection, len(layer.heads)):
                    self._add(side, role * self._total + start, parts)
            start += len(layer.heads)
        self._unfit.copy_(torch.from_numpy(unfit))
        self._scalers = [_scaler(*of_dtype) for of_dtype in parts.values() if of_dtype[0]]

    def _add(self, side: HeadRows, place: int, parts: dict[torch.dtype, tuple[list[Tensor], list[int]]]) -> None:
        """The rows of each head that lie here, whose factors stand from `place` on."""
        for name, parameter, offset in _of(side):
            held = local_tensor(parameter)
            self._sources.append((side.holder, name, parameter, held.data_ptr()))
            views, places = parts.setdefault(held.dtype, ([], []))
            dim = 1 if held.dim() == 2 and is_conv1d(side.holder) else 0
            low, high = spans_of(parameter)[dim]
            for head, first in enumerate(side.starts):
                start, stop = max(first + offset - low, 0), min(first + offset + side.head_dim, high) - low
                if start < stop:
                    views.append(held[:, start:stop] if dim else held[start:stop])
                    places.append(place + head)

    @property
    @torch.no_grad()
    def stale(self) -> bool:
        """Whether a parameter was replaced since `find`, or its numbers moved."""
        return any(
            stored(holder, name) is not parameter or local_tensor(parameter).data_ptr() != address
            for holder, name, parameter, address in self._sources
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
        for scale in self._scalers:
            scale(factors)

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
        """Start `done` over."""
        self.done[0].fill_(1.0)
        self.done[1].zero_()


def _roles(projection: Projection, heads: int) -> Iterator[tuple[HeadRows, int]]:
    """The parts of the weights that are scaled, and what each is to the scores."""
    # Query heads that read one key head pass the threshold one by one. There queries alone are scaled: the scores of a
    # head change by its own gamma, and the other heads of its group do not change at all.
    grouped = len(projection.key.starts) < heads
    yield projection.query, _QUERY_ALONE if grouped else _QUERY
    if not grouped:
        yield projection.key, _KEY
    if projection.query_of_shared is not None:
        yield projection.query_of_shared, _QUERY_ALONE


def refusals(
    layers: Sequence[wire.Layer], projections: Sequence[Projection | str], device: torch.device
) -> dict[int, str]:
    """Why layers are not scaled, by their numbers."""
    whys = [_why_refused(projection, device) for projection in projections]
    owners: dict[int, set[int]] = {}
    for place, projection in enumerate(projections):
        for parameter in parameters_of(projection) if isinstance(projection, Projection) else ():
            owners.setdefault(id(parameter), set()).add(place)
    for sharing in owners.values():
        for place in sharing if len(sharing) > 1 else ():
            others = ", ".join(str(layers[other].layer) for other in sorted(sharing - {place}))
            whys[place] = whys[place] or f"it shares W_Q or W_K with layer {others}, which would be scaled with it"
    return {layer.layer: why for layer, why in zip(layers, whys, strict=True) if why is not None}


def _why_refused(projection: Projection | str, device: torch.device) -> str | None:
    """Why the heads of a layer cannot be scaled; None where they can."""
    if isinstance(projection, str):
        return projection
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
    """The weight of one side and its bias: name, parameter, and where its rows begin in those of the weight."""
    weight = stored(side.holder, side.weight)
    if isinstance(weight, nn.Parameter):
        yield side.weight, weight, 0
    name = "in_proj_bias" if isinstance(side.holder, nn.MultiheadAttention) else "bias"
    bias = stored(side.holder, name)
    if isinstance(bias, nn.Parameter):
        yield name, bias, len(weight) if side.weight == "k_proj_weight" and isinstance(weight, Tensor) else 0


def group_of_replicas(given: "torch.distributed.ProcessGroup | None") -> "torch.distributed.ProcessGroup | None":
    """The group that was given, else all processes of the job; None where that is this process alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group = given if given is not None else torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def alike(group: "torch.distributed.ProcessGroup", device: torch.device, what: tuple[object, ...]) -> bool:
    """Whether all processes of the group hold the same heads with the same settings. It waits for them, once."""
    digest = float(zlib.crc32(repr(what).encode()))
    both = torch.tensor([digest, -digest], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    return bool(both[0] == digest and both[1] == -digest)


_COPIED: Final = ("main_param", "_hp_mapping", "ds_id")
"""What Megatron and DeepSpeed put on a parameter whose master copy the optimizer owns."""


def projection_of(
    layer: WatchedLayer, layout: LayoutCheck, attached: AttachedModel, optimizers: Sequence[Any]
) -> Projection | str:
    """Where the weights of a layer lie, or why it is not scaled."""
    if layer.sampled and (why := attached.why_not_in_full(layer)) is not None:
        return why
    if layer.unmeasured:
        return f"some of its calls are not watched ({next(iter(layer.unmeasured))})"
    found = layout.scalable()
    if isinstance(found, str):
        return found
    for parameter in parameters_of(found):
        if (why := _why_not_owned(parameter, optimizers)) is not None:
            return why
    return found


def _why_not_owned(parameter: nn.Parameter, optimizers: Sequence[Any]) -> str | None:
    if not optimizers:
        if parameter.element_size() > 2 and not any(hasattr(parameter, name) for name in _COPIED):
            return None
        dtype = str(parameter.dtype).removeprefix("torch.")
        return (
            f"its weights are {dtype} and may be copies of an optimizer's own; if they are not, "
            "agent.qk_clip_with(optimizer=...) shows it"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    owned = any(parameter is own for group in groups for own in group["params"])
    masters = any("master" in str(key) for one in optimizers for key in one.state.get(parameter, {}))
    return None if owned and not masters else "the optimizer trains a copy of its weights, which would undo it"


_REPORT_EVERY_STEPS: Final = 100
"""An event reports all scalings of this many steps: a run may scale in each of a million."""
_OTHER_HEADS: Final = (
    "the processes hold different heads or layers, or have other settings; name the processes that hold the same heads "
    "with agent.qk_clip_with(group=...)"
)


class Clipping:
    """Switches QK-Clip on and off, and remembers what it did. Its faults end it, and are contained by `guard`."""

    def __init__(
        self,
        config: AgentConfig,
        attached: AttachedModel,
        guard: Guard,
        new_id: Callable[[], str],
        emit: Callable[[wire.Event], None],
    ) -> None:
        self.on = config.qk_clip == "always"
        self._config: Final = config
        self._attached: Final = attached
        self._guard: Final = guard
        self._new_id: Final = new_id
        self._emit: Final = emit
        self._watched: Final[Sequence[WatchedLayer]] = attached.watched
        self._heads: Final = wire.head_refs(attached.layers)
        self._asked = config.qk_clip != "never"
        self._held = False
        self._over = ""
        """Why nothing is scaled any more."""
        self._ready = False
        """Whether the processes that are to agree have found each other."""
        self._looked: object = None
        """How the layers were when their weights were looked for last, and whether they were to be scaled."""
        self._left_out: dict[int, str] = {}
        """Layers that the log has named, and why they are not scaled."""
        self.optimizers: Sequence[Any] = ()
        """Those that were given."""
        self._group: torch.distributed.ProcessGroup | None = None
        self._unreported: dict[wire.HeadRef, tuple[int, float]] = {}
        """As `_done`, since the last event that reported scalings."""
        self._reported_at: int | None = None
        self._last_step = 0
        """The step of the newest sample that showed scalings."""
        self._done: dict[wire.HeadRef, tuple[int, float]] = {}
        """Heads that were ever scaled: how often, and by what factor the scores were scaled altogether at most."""
        unknown, largest = ["no call has shown it yet"] * len(attached.layers), attached.largest
        with default_torch_modes(attached.state.device):
            tau = config.qk_clip_threshold
            self._clip: Final = QKClip(attached.layers, unknown, attached.state, threshold=tau, largest=largest)
        self._ask_for_all_rows(0, 1)

    # ---- people and policy ----------------------------------------------------------------------------------------

    def given(self, optimizer: object, group: "torch.distributed.ProcessGroup | None") -> None:
        """Which optimizer owns the weights, and which processes hold the same heads; None leaves it as it was."""
        if group is not None and self._ready:
            raise ValueError("the processes have begun to agree; give group before the first step")
        if optimizer is not None:
            several = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
            if not several or not all(hasattr(one, "param_groups") and hasattr(one, "state") for one in several):
                raise ValueError(
                    f"optimizer is {optimizer!r:.100}; give the optimizer of the training, or a list of several"
                )
            self.optimizers = several
        self._group = group if group is not None else self._group
        self._looked = None

    def take_over(self, other: "Clipping") -> None:
        """Begin where another stands, of the same model with other layers."""
        self.optimizers, self._group = other.optimizers, other._group
        self.on, self._asked, self._held = other.on, other._asked, other._held

    @property
    def state(self) -> wire.ClipState | None:
        """As `Started` gives it: None while it cannot be switched on."""
        if self.on:
            return "on"
        # several processes can only begin in the same step
        if self._over or (not self._ready and group_of_replicas(self._group) is not None):
            return None
        if len(self._refused()) == len(self._watched):
            return None
        return "warned" if self._config.qk_clip == "warned" else "never"

    def set(self, on: bool, *, step: int, reason: str) -> wire.Clipped:
        """Switch it on or off, as a person asked. Raises ValueError where it cannot be on."""
        if not isinstance(on, bool):  # "never" would switch it on
            raise ValueError(f"set_qk_clip takes True or False, got {on!r:.100}; its words are for attach(qk_clip=...)")
        if on and self._over:
            raise ValueError(f"QK-Clip stays off: {self._over}")
        self._held = not on
        return self._switched(on, step, reason)

    def _switched(self, on: bool, step: int, reason: str) -> wire.Clipped:
        after = "" if on else "; weights that were scaled stay so: training has gone on from them"
        event = wire.Clipped(id=self._new_id(), step=step, on=on, total=self._total, reason=f"{reason}{after}"[:500])
        if on and not self.on:
            self._clip.begin()
        self.on, self._asked = on, self._asked or on
        self._ask_for_all_rows(step, step + 1)
        logger.warning("foreshock, step %d: QK-Clip is %s: %s%s", step, "on" if on else "off", reason, after)
        self._emit(event)
        return event

    def follow(self, verdicts: Iterable[wire.Verdict], *, step: int) -> None:
        """Switch on for a warning of scores that grow, if the setting is "warned"."""
        if self.on or self._over or self._config.qk_clip != "warned":
            return
        for verdict in verdicts:
            new = verdict.state == "raised" or verdict.corrected_step == verdict.step
            grows = cause_of(verdict) == "score growth" and verdict.signal != LEVEL  # a level does not show what comes
            if is_active(verdict) and grows and (new or not self._held):
                self._held = False
                self._switched(True, step, f"qk_clip warned: {verdict.sentence}")
                return

    def _refused(self) -> dict[int, str]:
        """Why layers are not scaled, by their numbers. It looks for the weights again where a call has shown them, or
        they or what computes the layers has changed."""
        attached, clip = self._attached, self._clip
        scales = self.on or clip.group is not None
        both = list(zip(self._watched, attached.layouts, strict=True))
        how = [
            (layer.sampled, attached.why_not_in_full(layer), len(layer.unmeasured), layout.describe())
            for layer, layout in both
        ]
        if (scales, how) != self._looked or (scales and clip.stale):
            self._looked = scales, how
            projections = [projection_of(*each, attached, self.optimizers) for each in both]
            if not scales:
                clip.refused = refusals(attached.layers, projections, attached.state.device)
                return clip.refused
            clip.find(projections, [layer.sampled for layer in self._watched])
            if clip.refused and clip.refused != self._left_out:
                self._left_out = clip.refused
                logger.warning("foreshock: QK-Clip leaves out %s", "; ".join(self._by_reason()))
        return clip.refused

    # ---- the step -------------------------------------------------------------------------------------------------

    def after_step(self, step: int, next_step: int) -> None:
        """Scale what passed the threshold in optimizer step `step`, the one that is done; next_step: the probable next.

        Processes that share heads call it in the same steps: none goes past it alone, whatever fails here.
        """
        self._ask_for_all_rows(step, next_step)
        if not self._asked:
            return
        if not self._ready:
            self._guard.run(self._start)
        clip = self._clip
        if not self._ready or (clip.group is None and (self._over or not self.on)):
            return
        if not self._over and self._guard.run(self._look_again) is None:
            self._end("a fault in finding the weights")
        if self._guard.run(self._scale) is None and not self._over:
            self._end("a fault in scaling")

    def _ask_for_all_rows(self, step: int, next_step: int) -> None:
        """While it is on, some steps look at every row of what is kept; at the same numbers on every process."""
        due = self.on and not self._over and passes(step, next_step, self._config.qk_clip_every_steps)
        self._attached.sampling.in_full = due

    def _scale(self) -> bool:
        self._clip.after_step(on=self.on, broken=bool(self._over))
        return True

    def _end(self, why: str) -> None:
        self.on, self._over = False, why
        logger.warning("foreshock: QK-Clip is off from now on: %s", why)

    def _start(self) -> None:
        group = group_of_replicas(self._group)
        what = [(layer.layer, layer.heads) for layer in self._attached.layers], self._config.qk_clip_threshold
        if group is not None and not alike(group, self._attached.state.device, what):
            self._asked = False
            self._end(_OTHER_HEADS)
            return
        self._clip.group, self._ready = group, True

    def _look_again(self) -> bool:
        """Find the weights that calls have shown since."""
        for layout in self._attached.layouts:
            layout.locate()
        self._refused()
        return True

    # ---- what was done --------------------------------------------------------------------------------------------

    def before_sample(self) -> dict[str, Tensor]:
        """A sample is taken now: it gets the largest scores of all steps since the last, and what was done in them."""
        clip = self._clip
        if not self._ready and not self.on:
            return {}
        clip.before_sample()
        factors, times = clip.done.clone()
        clip.forget()
        return {"clip_factor": factors, "clipped_steps": times, "wishes": clip.wishes.clone()}

    def arrived(self, counted: Counted) -> None:
        """Take in what a sample shows, once it is on the host."""
        wishes = counted.norms.pop("wishes", None)
        if wishes is None:
            return
        self._last_step = counted.step
        for row in np.flatnonzero(counted.norms["clipped_steps"]).tolist():
            head, times = self._heads[row], int(counted.norms["clipped_steps"][row])
            factor = float(counted.norms["clip_factor"][row])
            for scaled in (self._done, self._unreported):
                before, smallest = scaled.get(head, (0, 1.0))
                scaled[head] = before + times, min(smallest, factor)
        if self._unreported and (self._reported_at is None or counted.step >= self._reported_at + _REPORT_EVERY_STEPS):
            self.emit_rest()
        asked, broken = (wish > 0 for wish in wishes.tolist())
        if broken and not self._over:
            self._end("another process cannot take part")
        elif asked and not self.on and not self._over and not self._held:
            self._switched(True, counted.step, "another process asked for it")

    @property
    def _reports(self) -> bool:
        """Whether this process reports what was scaled: of those that scale alike, the first."""
        return self._clip.group is None or torch.distributed.get_rank(self._clip.group) == 0

    @property
    def _total(self) -> int:
        return sum(times for times, _ in self._done.values()) if self._reports else 0

    def emit_rest(self) -> None:
        """Emit an event of what was scaled since the last one."""
        scaled, self._unreported = self._unreported, {}
        if not scaled or not self._reports:
            return
        least = min(factor for _, factor in scaled.values())
        if self._reported_at is None:
            named = listed([f"layer {layer} head {head}" for layer, head in scaled])
            logger.warning("foreshock, step %d: QK-Clip scaled %s; smallest factor %.3g", self._last_step, named, least)
        self._reported_at = self._last_step
        self._emit(
            wire.Clipped(
                id=self._new_id(),
                step=self._last_step,
                on=True,
                heads=tuple(scaled),
                factors=tuple(factor for _, factor in scaled.values()),
                times=tuple(times for times, _ in scaled.values()),
                total=self._total,
                reason=f"{len(scaled)} heads passed {self._config.qk_clip_threshold:g}",
            )
        )

    def _by_reason(self) -> list[str]:
        by_why: dict[str, list[str]] = {}
        names = {layer.layer: layer.name for layer in self._attached.layers}
        for number, why in self._clip.refused.items():
            by_why.setdefault(why, []).append(names[number])
        return [f"{len(each)} layers ({listed(each)}): {why}" for why, each in by_why.items()]

    def report(self) -> str:
        """Whether it is on and what it did, in a line; "" where it was never asked for."""
        if not self._asked and not self._over and not self._done:
            return ""
        waits = self._config.qk_clip == "warned" and not self._over
        now = "on" if self.on else "off until scores grow" if waits else "off"
        line = f"QK-Clip is {now} at {self._config.qk_clip_threshold:g}"
        if self._over:
            line += f", {self._over}"
        if self._done:
            scalings = sum(times for times, _ in self._done.values())
            least = min(least for _, least in self._done.values())
            line += f"; {len(self._done)} heads were scaled, {scalings} times in all, smallest factor {least:.3g}"
        left_out = self._ready and (self._clip.refused if self._over else self._refused())
        return line + (f"; left out: {'; '.join(self._by_reason())}" if left_out else "")

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Whether it is on, and what it did to which head, JSON-able."""
        done = [[*head, times, least] for head, (times, least) in self._done.items()]
        return {"on": self.on, "held": self._held, "done": done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as saved. Raises ValueError and TypeError for what is damaged; then nothing is taken up."""
        done = {(int(layer), int(head)): (int(times), float(least)) for layer, head, times, least in state["done"]}
        on, held = bool(state["on"]), bool(state["held"])
        self._done, self._held = done, held
        if self._config.qk_clip != "always":
            self.on, self._asked = on, self._asked or on
