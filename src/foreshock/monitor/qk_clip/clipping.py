"""QK-Clip as an act: when it is on, which layers it may scale, and what it did, in events and in words.

It may scale layers whose largest score is known exactly and whose weights are the optimizer's own. Processes that hold
the same heads must scale them by the same factors.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.decision import cause_of, is_active
from foreshock.monitor.apart import apart
from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.attention.backend_selector import BackendSelector
from foreshock.monitor.attention.layout_check import LayoutCheck
from foreshock.monitor.attention.watched_layer import WatchedLayer
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import Guard, logger
from foreshock.monitor.model.discovery import listed
from foreshock.monitor.model.layers import Projection
from foreshock.monitor.qk_clip.scaling import QKClip, parameters_of
from foreshock.monitor.sampling.collector import Counted
from foreshock.monitor.sampling.stride import passes


def group_of_replicas(given: "torch.distributed.ProcessGroup | None") -> "torch.distributed.ProcessGroup | None":
    """The group that was given, else all processes of the job; None where that is this process alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group = given if given is not None else torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def alike(group: "torch.distributed.ProcessGroup", state: Tensor, what: tuple[object, ...]) -> bool:
    """Whether all processes of the group hold the same heads with the same settings. It waits for them, once."""
    digest = float(zlib.crc32(repr(what).encode()))
    both = torch.tensor([digest, -digest], dtype=torch.float64, device=state.device)
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    return bool(both[0] == digest and both[1] == -digest)


_COPIED: Final = ("main_param", "_hp_mapping", "ds_id")
"""What Megatron and DeepSpeed put on a parameter whose master copy the optimizer owns."""


def projection_of(
    layer: WatchedLayer, layout: LayoutCheck, selector: BackendSelector, optimizers: Sequence[Any]
) -> Projection | str:
    """Where the weights of a layer lie, or why it is not scaled."""
    if layer.sampled and (why := selector.why_not_in_full(layer)) is not None:
        return why
    if layer.unserved:
        return f"some of its calls are not watched ({next(iter(layer.unserved))})"
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


_BEGIN_TOGETHER: Final = (
    "several processes can only begin to clip in the same step: start them with qk_clip='warned' or 'always', or call "
    "agent.set_qk_clip in all of them at the same step"
)
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
        self._watched: Final[Sequence[WatchedLayer]] = attached.selector.layers
        self._heads: Final = wire.head_refs(attached.layers)
        self._asked = config.qk_clip != "never"
        self._held = False
        self._over = ""
        """Why nothing is scaled any more."""
        self._clip: QKClip | None = None
        self._ready = False
        """Whether the processes that are to agree have found each other."""
        self._found: list[tuple[object, ...]] = []
        self._optimizers: Sequence[Any] = ()
        self._group: torch.distributed.ProcessGroup | None = None
        self._unreported: dict[wire.HeadRef, tuple[int, float]] = {}
        """As `_done`, since the last event that reported scalings."""
        self._reported_at: int | None = None
        self._last_step = 0
        """The step of the newest sample that showed scalings."""
        self._done: dict[wire.HeadRef, tuple[int, float]] = {}
        """Heads that were ever scaled: how often, and by what factor the scores were scaled altogether at most."""
        self._looked: tuple[list[tuple[object, ...]], dict[int, str]] | None = None
        """The state of the layers when the last search found which can be scaled, and why others cannot."""
        self._ask_for_all_rows(0, 1)

    # ---- people and policy ----------------------------------------------------------------------------------------

    def optimizers(self) -> Sequence[Any]:
        """Those that were given."""
        return self._optimizers

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
            self._optimizers = several
        self._group = group if group is not None else self._group
        self._found, self._looked = [], None

    def take_over(self, other: "Clipping") -> None:
        """Begin where another stands, of the same model with other layers."""
        self._optimizers, self._group = other._optimizers, other._group
        self.on, self._asked, self._held = other.on, other._asked, other._held

    def why_not(self) -> str | None:
        """Why it cannot be switched on now, in a sentence; None where it can."""
        if self._over:
            return f"QK-Clip stays off: {self._over}"
        if not self._ready and group_of_replicas(self._group) is not None:
            return _BEGIN_TOGETHER
        now = self._fingerprint()
        if self._looked is None or self._looked[0] != now:
            self._looked = now, self._trial().refused
        refused = self._looked[1]
        if len(refused) < len(self._watched):
            return None
        return f"QK-Clip can scale none of the layers: {'; '.join(self._refusals(refused))}"

    @property
    def state(self) -> wire.ClipState | None:
        """As `Started` gives it."""
        if self.on:
            return "on"
        return None if self.why_not() else "warned" if self._config.qk_clip == "warned" else "never"

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
            self._clip = self._clip or self._new_clip()
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
            if is_active(verdict) and cause_of(verdict) == "score growth" and (new or not self._held):
                self._held = False
                self._switched(True, step, f"qk_clip warned: {verdict.sentence}")
                return

    def _trial(self) -> QKClip:
        layers, tau = self._attached.layers, self._config.qk_clip_threshold
        return QKClip(layers, self._projections(), self._attached.state, threshold=tau)

    def _projections(self) -> list[Projection | str]:
        both, selector = zip(self._watched, self._attached.layouts, strict=True), self._attached.selector
        return [projection_of(*each, selector, self._optimizers) for each in both]

    def _fingerprint(self) -> list[tuple[object, ...]]:
        """What shows, where it changes, that weights are to be looked for anew."""
        both = zip(self._watched, self._attached.layouts, strict=True)
        why_not_in_full = self._attached.selector.why_not_in_full
        return [(layer.sampled, why_not_in_full(layer), len(layer.unserved), layout.proved) for layer, layout in both]

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
        if clip is None or not self._ready or (clip.group is None and (self._over or not self.on)):
            return
        if not self._over and self._guard.run(self._look_again, clip) is None:
            self._end("a fault in finding the weights")
        if self._guard.run(self._scale, clip) is None and not self._over:
            self._end("a fault in scaling")

    def _ask_for_all_rows(self, step: int, next_step: int) -> None:
        """While it is on, some steps look at every row of what is kept; at the same numbers on every process."""
        due = self.on and not self._over and passes(step, next_step, self._config.qk_clip_every_steps)
        self._attached.selector.compute_in_full(due)

    def _scale(self, clip: QKClip) -> bool:
        clip.after_step(on=self.on, broken=bool(self._over))
        return True

    def _end(self, why: str) -> None:
        self.on, self._over = False, why
        logger.warning("foreshock: QK-Clip is off from now on: %s", why)

    def _start(self) -> None:
        group = group_of_replicas(self._group)
        layers, state = self._attached.layers, self._attached.state
        own = self._config.qk_clip_threshold, self._config.qk_clip_every_steps
        what = [(layer.layer, layer.heads) for layer in layers], own
        if group is not None and not alike(group, state, what):
            self._asked = False
            self._end(_OTHER_HEADS)
            return
        self._clip = self._clip or self._new_clip()
        self._clip.group, self._ready = group, True

    def _new_clip(self) -> QKClip:
        layers, selector = self._attached.layers, self._attached.selector
        unknown = ["no call has shown it yet"] * len(layers)
        tau = self._config.qk_clip_threshold
        with apart(self._attached.state.device):
            return QKClip(layers, unknown, self._attached.state, threshold=tau, largest=selector.largest)

    def _look_again(self, clip: QKClip) -> bool:
        """Find the weights anew where a call has shown them, or they or those who serve them have changed."""
        layouts, now = self._attached.layouts, self._fingerprint()
        if now == self._found and not clip.stale and not any(layout.waits for layout in layouts):
            return True
        before = clip.refused
        clip.find(self._projections(), [layer.sampled for layer in self._watched])
        self._found = [(*each[:3], layout.proved) for each, layout in zip(now, layouts, strict=True)]
        if clip.refused and clip.refused != before and (self.on or clip.group is not None):
            logger.warning("foreshock: QK-Clip leaves out %s", "; ".join(self._refusals(clip.refused)))
        return True

    # ---- what was done --------------------------------------------------------------------------------------------

    def before_sample(self) -> dict[str, Tensor]:
        """A sample is taken now: it gets the largest scores of all steps since the last, and what was done in them."""
        clip = self._clip
        if clip is None:
            return {}
        clip.before_sample()
        done = {
            "clip_factor": clip.done[0].clone(),
            "clipped_steps": clip.done[1].clone(),
            "wishes": clip.wishes.clone(),
        }
        clip.forget()
        return done

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
        group = None if self._clip is None else self._clip.group
        return group is None or torch.distributed.get_rank(group) == 0

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

    def _refusals(self, refused: dict[int, str]) -> list[str]:
        by_why: dict[str, list[str]] = {}
        names = {layer.layer: layer.name for layer in self._attached.layers}
        for number, why in refused.items():
            by_why.setdefault(why, []).append(names[number])
        return [f"{len(each)} layers ({listed(each)}): {why}" for why, each in by_why.items()]

    def report(self) -> str:
        """Whether it is on and what it did, in a line; "" where it was never asked for."""
        if not self._asked and not self._over and not self._done:
            return ""
        now = (
            "on"
            if self.on
            else "off until scores grow"
            if self._config.qk_clip == "warned" and not self._over
            else "off"
        )
        line = f"QK-Clip is {now} at {self._config.qk_clip_threshold:g}"
        if self._over:
            line += f", {self._over}"
        if self._done:
            scalings = sum(times for times, _ in self._done.values())
            least = min(least for _, least in self._done.values())
            line += f"; {len(self._done)} heads were scaled, {scalings} times in all, smallest factor {least:.3g}"
        clip = self._clip if self._clip is None or self.on or self._over else self._trial()  # while off, nobody looks
        refused = [] if clip is None else self._refusals(clip.refused)
        return line + (f"; left out: {'; '.join(refused)}" if refused else "")

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
