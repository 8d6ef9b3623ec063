"""QK-Clip: switch it on and off, choose the layers that it may scale, scale W_Q and W_K after a step, and report it.

Kimi K2 (arXiv 2507.20534, section 2.1): with S the largest score of a head in the last step and tau the threshold,
gamma = min(1, tau / S). W_Q and the bias of the queries are multiplied by gamma^alpha, W_K and the bias of the keys by
gamma^(1 - alpha), so that the same inputs would give scores of at most tau. In multi-head latent attention, this
applies to the part of the keys that each head has for itself; for the part that all heads share, the queries are
multiplied by gamma and the keys are not changed. A layer can be scaled if its largest score is known exactly and the
optimizer trains its weights directly. Processes with replicas of the same heads must scale them by the same factors.

QK-Clip helps against scores that grow because the learning rate is too high. It does not help against drift by
rounding: there the large scores are a shift that softmax ignores, and scaling would damage what the head has learnt.
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
from foreshock.monitor.sampling import Counted, passes

ALPHA: Final = 0.5
"""Exponent of gamma for the queries, as in Kimi K2."""
_QUERY, _KEY, _QUERY_ALONE = range(3)
"""Role of a part of the weights: queries or keys that are both scaled, or queries that are scaled for both."""


def _scaler(views: list[Tensor], places: list[int]) -> Callable[[Tensor], None]:
    """Return a function that multiplies parts of weights, all of one dtype, by factors, float64 [N].

    places: for each part, the index of its factor.
    """
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
    """Scale the heads of a model's layers in place, without waiting for the device.

    layers, projections: of the watched layers, in the order of the state's rows. A sentence in place of a projection is
    the reason why its layer is not scaled. state: int64 [N, SLOT_COUNT]; its SCORE_MAX must be the maximum over all
    rows of the step. For layers that `find` marked as native, `largest`, float32 [N], is used instead: the maximum in
    steps in which all rows were scanned, and -inf in other steps, in which these layers are not scaled.
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
        """Reasons why layers are not scaled, by layer number."""
        self.group: torch.distributed.ProcessGroup | None = None
        """Processes with replicas of the same heads, which must be scaled alike; None: only this process. In every
        step, they exchange their largest scores and whether each may scale (one packed MAX all-reduce)."""
        self._layers: Final = tuple(layers)
        self._threshold = threshold
        self._scores = state.view(torch.float64)[:, Slot.SCORE_MAX]
        self._in_full = torch.full_like(self._scores, -math.inf) if largest is None else largest
        self._kept = torch.zeros_like(self._scores, dtype=torch.bool)
        self._any_kept = False
        self._held_back = torch.full_like(self._scores, -math.inf)
        """Largest scores since the last sample; the state only contains those of the current step."""
        self._total = len(self._scores)
        self._sources: list[tuple[nn.Module, str, nn.Parameter, int]] = []
        """Parameters that are scaled: module, name, parameter, and its data pointer when it was found."""
        self._scalers: list[Callable[[Tensor], None]] = []
        exponents = [[ALPHA], [1.0 - ALPHA], [1.0]]
        self._exponents: Final = torch.tensor(exponents, dtype=torch.float64, device=state.device)
        """Exponents of gamma, by role (_QUERY, _KEY, _QUERY_ALONE)."""
        self._unfit = torch.ones_like(self._scores)
        """1 for heads of layers that are not scaled, else 0."""
        self.done = torch.zeros((2, self._total), dtype=torch.float64, device=state.device)
        """Smallest gamma of each head since `forget`, and the number of its scalings."""
        self.wishes = torch.zeros(2, dtype=torch.float64, device=state.device)
        """Whether any process of the group requested clipping in the last step, and whether any could not take part."""
        self.forget()
        self.find(projections)

    def find(self, projections: Sequence[Projection | str], kept: Sequence[bool] = ()) -> None:
        """Find the present storage of W_Q and W_K. kept: whether each layer keeps its native attention."""
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
        """Add the rows of each head that this process stores; `place` is the index of the first head's factor."""
        for name, parameter in _of(side):
            held = local_tensor(parameter)
            self._sources.append((side.holder, name, parameter, held.data_ptr()))
            views, places = parts.setdefault(held.dtype, ([], []))
            dim = 1 if held.dim() == 2 and is_conv1d(side.holder) else 0
            low, high = spans_of(parameter)[dim]
            for head, first in enumerate(side.starts):
                start, stop = max(first - low, 0), min(first + side.head_dim, high) - low
                if start < stop:
                    views.append(held[:, start:stop] if dim else held[start:stop])
                    places.append(place + head)

    @property
    @torch.no_grad()
    def stale(self) -> bool:
        """Whether a parameter was replaced since `find`, or its storage moved."""
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
        """Save the counts so far for the next sample, because clipping only uses the steps after this call."""
        self._held_back.copy_(self.largest)
        self._scores.fill_(-math.inf)
        if self._any_kept:
            self._in_full.fill_(-math.inf)

    @torch.no_grad()
    def after_step(self, *, on: bool = True, broken: bool = False) -> None:
        """Scale heads whose scores exceeded the threshold in the last step. Call it once, after the optimizer's step.

        on: whether this process requests clipping; one process of the group is enough. broken: whether this process
        cannot take part; then no process scales.
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
            return  # on a CPU, this is known without waiting
        gamma = torch.where(passed, self._threshold / scores, 1.0)
        torch.minimum(self.done[0], gamma, out=self.done[0])
        self.done[1] += passed
        factors = gamma.pow(self._exponents).view(-1)
        for scale in self._scalers:
            scale(factors)

    def _agreed(self, scores: Tensor, unfit: Tensor, *, on: bool, broken: bool) -> tuple[Tensor, Tensor]:
        """Return the group's largest scores, and which heads are unfit in any process.

        All heads are unfit if no process requests clipping, or if one cannot take part.
        """
        wishes = [torch.full_like(scores[:1], float(wish)) for wish in (on, broken)]
        finite = torch.nan_to_num(scores, nan=math.inf, posinf=math.inf, neginf=-math.inf)
        packed = torch.cat([finite, unfit, *wishes])
        torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX, group=self.group)
        self.wishes.copy_(packed[-2:])
        unfit = packed[self._total : -2] + (self.wishes[1] - self.wishes[0] + 1)
        return packed[: self._total], unfit

    @torch.no_grad()
    def before_sample(self) -> None:
        """Write the largest scores since the last sample back into the state, just before a sample is taken."""
        self._scores.copy_(self.largest)
        self._held_back.fill_(-math.inf)

    @torch.no_grad()
    def forget(self) -> None:
        """Reset `done`."""
        self.done[0].fill_(1.0)
        self.done[1].zero_()


def _roles(projection: Projection, heads: int) -> Iterator[tuple[HeadRows, int]]:
    """Yield the parts of the weights that are scaled, with the role of each."""
    # Query heads with a common key head exceed the threshold independently. So only queries are scaled: the scores of
    # one head change by its gamma, and the other heads of its group do not change.
    grouped = len(projection.key.starts) < heads
    yield projection.query, _QUERY_ALONE if grouped else _QUERY
    if not grouped:
        yield projection.key, _KEY
    if projection.query_of_shared is not None:
        yield projection.query_of_shared, _QUERY_ALONE


def refusals(
    layers: Sequence[wire.Layer], projections: Sequence[Projection | str], device: torch.device
) -> dict[int, str]:
    """Return the reasons why layers are not scaled, by layer number."""
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
    """Return the reason why the heads of a layer cannot be scaled, or None."""
    if isinstance(projection, str):
        return projection
    for side in projection.sides:
        weight = stored(side.holder, side.weight)
        if not isinstance(weight, nn.Parameter):
            return "its weight is computed from other tensors"
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
    """Yield the weights and biases of queries and keys."""
    for side in projection.sides:
        yield from (parameter for _, parameter in _of(side))


def _of(side: HeadRows) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weight and the bias of one side, by name."""
    weight = stored(side.holder, side.weight)
    if isinstance(weight, nn.Parameter):
        yield side.weight, weight
    name = "in_proj_bias" if isinstance(side.holder, nn.MultiheadAttention) else "bias"
    bias = stored(side.holder, name)
    if isinstance(bias, nn.Parameter):
        yield name, bias


def group_of_replicas(given: "torch.distributed.ProcessGroup | None") -> "torch.distributed.ProcessGroup | None":
    """Return the given group, else all processes of the job; None if that is only this process."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group = given if given is not None else torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def alike(group: "torch.distributed.ProcessGroup", device: torch.device, what: tuple[object, ...]) -> bool:
    """Whether all processes of the group have the same heads and settings; waits for all of them."""
    digest = float(zlib.crc32(repr(what).encode()))
    both = torch.tensor([digest, -digest], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    return bool(both[0] == digest and both[1] == -digest)


_COPIED: Final = ("main_param", "_hp_mapping", "ds_id")
"""Attributes that Megatron and DeepSpeed set on a parameter if the optimizer trains a master copy of it."""


def projection_of(
    layer: WatchedLayer, layout: LayoutCheck, attached: AttachedModel, optimizers: Sequence[Any]
) -> Projection | str:
    """Return the rows of a layer's weights, or the reason why it is not scaled."""
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
            f"its weights are {dtype} and may be copies of the optimizer's master weights; if they are not, call "
            "agent.qk_clip_with(optimizer=...)"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    owned = any(parameter is own for group in groups for own in group["params"])
    masters = any("master" in str(key) for one in optimizers for key in one.state.get(parameter, {}))
    return None if owned and not masters else "the optimizer trains a copy of its weights, which would undo the scaling"


_REPORT_EVERY_STEPS: Final = 100
"""An event reports all scalings of this many steps, because a run may scale heads in every step."""
_OTHER_HEADS: Final = (
    "the processes have different heads, layers or settings; pass the group of the processes with the same heads to "
    "agent.qk_clip_with(group=...)"
)


class Clipping:
    """Switches QK-Clip on and off, and records its scalings. After an error in it, `guard` contains the error, and
    QK-Clip stays off."""

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
        self._asked = config.qk_clip != "never"
        self._held = False
        self._over = ""
        """Reason why QK-Clip ended for good; empty if it did not."""
        self._ready = False
        """Whether the group of processes is known and agrees on heads and settings."""
        self._looked: object = None
        """The layers' condition when their weights were last searched, and whether they were to be scaled."""
        self._left_out: dict[int, str] = {}
        """Layers that the log reported as not scaled, with reasons."""
        self.optimizers: Sequence[Any] = ()
        """Optimizers passed by the user or a callback."""
        self._group: torch.distributed.ProcessGroup | None = None
        self._unreported: dict[wire.HeadRef, tuple[int, float]] = {}
        """Like `_done`, but only since the last event that reported scalings."""
        self._reported_at: int | None = None
        self._last_step = 0
        """The step of the newest sample that showed scalings."""
        self._done: dict[wire.HeadRef, tuple[int, float]] = {}
        """Heads that were ever scaled: number of scalings, and smallest factor."""
        unknown, largest = ["no call has shown it yet"] * len(attached.layers), attached.largest
        with default_torch_modes(attached.state.device):
            tau = config.qk_clip_threshold
            self._clip: Final = QKClip(attached.layers, unknown, attached.state, threshold=tau, largest=largest)
        self._ask_for_all_rows(0, 1)

    # ---- people and policy ----------------------------------------------------------------------------------------

    def given(self, optimizer: object, group: "torch.distributed.ProcessGroup | None") -> None:
        """Set the optimizer of the weights, and the processes with the same heads; None does not change a setting."""
        if group is not None and self._ready:
            raise ValueError("QK-Clip has already chosen its process group; pass group before the first step")
        if optimizer is not None:
            several = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
            if not several or not all(hasattr(one, "param_groups") and hasattr(one, "state") for one in several):
                raise ValueError(
                    f"optimizer is {optimizer!r:.100}; pass the training's optimizer, or a list of optimizers"
                )
            self.optimizers = several
        self._group = group if group is not None else self._group
        self._looked = None

    def take_over(self, other: "Clipping") -> None:
        """Copy the settings of another Clipping, of the same model but with other layers."""
        self.optimizers, self._group = other.optimizers, other._group
        self.on, self._asked, self._held = other.on, other._asked, other._held

    @property
    def state(self) -> wire.ClipState | None:
        """State as in `Started`: None while QK-Clip cannot be switched on."""
        if self.on:
            return "on"
        # several processes must begin in the same step
        if self._over or (not self._ready and group_of_replicas(self._group) is not None):
            return None
        if len(self._refused()) == len(self._attached.watched):
            return None
        return "warned" if self._config.qk_clip == "warned" else "never"

    def set(self, on: bool, *, step: int, reason: str) -> wire.Clipped:
        """Switch QK-Clip on or off at a person's request. Raises ValueError if it cannot be switched on."""
        if not isinstance(on, bool):  # "never" would switch it on
            raise ValueError(f"set_qk_clip takes True or False, not {on!r:.100}; its words are for attach(qk_clip=...)")
        if on and self._over:
            raise ValueError(f"QK-Clip stays off: {self._over}")
        self._held = not on
        return self._switched(on, step, reason)

    def _switched(self, on: bool, step: int, reason: str) -> wire.Clipped:
        after = "" if on else "; scaled weights are not restored, because training continued from them"
        event = wire.Clipped(id=self._new_id(), step=step, on=on, total=self._total, reason=f"{reason}{after}"[:500])
        if on and not self.on:
            self._clip.begin()
        self.on, self._asked = on, self._asked or on
        self._ask_for_all_rows(step, step + 1)
        logger.warning("foreshock, step %d: QK-Clip is %s: %s%s", step, "on" if on else "off", reason, after)
        self._emit(event)
        return event

    def follow(self, verdicts: Iterable[wire.Verdict], *, step: int) -> None:
        """Switch on at a warning of score growth, if the setting is "warned"."""
        if self.on or self._over or self._config.qk_clip != "warned":
            return
        for verdict in verdicts:
            new = verdict.state == "raised" or verdict.corrected_step == verdict.step
            grows = cause_of(verdict) == "score growth" and verdict.signal != LEVEL  # a level does not predict growth
            if is_active(verdict) and grows and (new or not self._held):
                self._held = False
                self._switched(True, step, f"qk_clip warned: {verdict.sentence}")
                return

    def _refused(self) -> dict[int, str]:
        """Return the reasons why layers are not scaled, by layer number.

        Searches the weights again if a call has located them, or if they or the layers' backends changed.
        """
        attached, clip = self._attached, self._clip
        scales = self.on or clip.group is not None
        both = list(zip(self._attached.watched, attached.layouts, strict=True))
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
            clip.find(projections, [layer.sampled for layer in self._attached.watched])
            if clip.refused and clip.refused != self._left_out:
                self._left_out = clip.refused
                logger.warning("foreshock: QK-Clip does not scale %s", "; ".join(self._by_reason()))
        return clip.refused

    # ---- the step -------------------------------------------------------------------------------------------------

    def after_step(self, step: int, next_step: int) -> None:
        """Scale heads that exceeded the threshold in the completed optimizer step `step`.

        next_step: number that the next step will probably have. Processes that share heads call this in the same steps,
        and all take part in its collective, even after an error in one of them.
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
            self._end("an error occurred while finding the weights")
        if self._guard.run(self._scale) is None and not self._over:
            self._end("an error occurred while scaling")

    def _ask_for_all_rows(self, step: int, next_step: int) -> None:
        """While QK-Clip is on, scan all rows of native attention in some steps, the same ones in every process."""
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
        """Find weights whose rows calls have located since the last step."""
        for layout in self._attached.layouts:
            layout.locate()
        self._refused()
        return True

    # ---- results --------------------------------------------------------------------------------------------------

    def before_sample(self) -> dict[str, Tensor]:
        """Restore the largest scores of all steps since the last sample, and return the scalings in these steps."""
        clip = self._clip
        if not self._ready and not self.on:
            return {}
        clip.before_sample()
        factors, times = clip.done.clone()
        clip.forget()
        return {"clip_factor": factors, "clipped_steps": times, "wishes": clip.wishes.clone()}

    def arrived(self, counted: Counted) -> None:
        """Process the scalings and requests in a sample that arrived on the host."""
        wishes = counted.norms.pop("wishes", None)
        if wishes is None:
            return
        self._last_step = counted.step
        for row in np.flatnonzero(counted.norms["clipped_steps"]).tolist():
            head, times = self._attached.heads[row], int(counted.norms["clipped_steps"][row])
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
            self._switched(True, counted.step, "another process requested it")

    @property
    def _reports(self) -> bool:
        """Whether this process reports scalings: only the first process of the group does."""
        return self._clip.group is None or torch.distributed.get_rank(self._clip.group) == 0

    @property
    def _total(self) -> int:
        return sum(times for times, _ in self._done.values()) if self._reports else 0

    def emit_rest(self) -> None:
        """Emit an event with the scalings since the last one."""
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
                reason=f"{len(scaled)} heads exceeded {self._config.qk_clip_threshold:g}",
            )
        )

    def _by_reason(self) -> list[str]:
        by_why: dict[str, list[str]] = {}
        names = {layer.layer: layer.name for layer in self._attached.layers}
        for number, why in self._clip.refused.items():
            by_why.setdefault(why, []).append(names[number])
        return [f"{len(each)} layers ({listed(each)}): {why}" for why, each in by_why.items()]

    def report(self) -> str:
        """Return a line with QK-Clip's state and scalings; "" if it was never requested."""
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
            line += f"; {len(self._done)} heads were scaled, {scalings} times in total, smallest factor {least:.3g}"
        left_out = self._ready and (self._clip.refused if self._over else self._refused())
        return line + (f"; not scaled: {'; '.join(self._by_reason())}" if left_out else "")

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return whether it is on, and the scalings of each head, as JSON types."""
        done = [[*head, times, least] for head, (times, least) in self._done.items()]
        return {"on": self.on, "held": self._held, "done": done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Raises ValueError or TypeError if it is damaged; then nothing is restored."""
        done = {(int(layer), int(head)): (int(times), float(least)) for layer, head, times, least in state["done"]}
        on, held = bool(state["on"]), bool(state["held"])
        self._done, self._held = done, held
        if self._config.qk_clip != "always":
            self.on, self._asked = on, self._asked or on
