"""A model that an agent watches: its state on the device, its layers, and what computes and measures each."""

import importlib.metadata
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor.attention.backend_selector import BackendSelector
from foreshock.monitor.attention.coverage import UnwatchedAttentionFinder
from foreshock.monitor.attention.layout_check import LayoutCheck
from foreshock.monitor.config import AgentConfig, versions
from foreshock.monitor.detect.levels import KERNEL
from foreshock.monitor.detect.non_finite import FIRST_UPDATE, place_by_outputs
from foreshock.monitor.detect.readings import Readings, head_readings
from foreshock.monitor.sampling import collector as collecting
from foreshock.monitor.sampling.collector import Counted, nonfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedModel:
    """What `attach` put into the model. `state` int64 [N, SLOT_COUNT] and `modes` int32 [N] lie on its device."""

    state: Tensor
    modes: Tensor
    layers: tuple[wire.Layer, ...]
    layouts: tuple[LayoutCheck, ...]
    """Where W_Q and W_K of each layer lie, once its calls showed it."""
    kernels: str
    """Which of our kernels compute attention here, as `Started` calls them."""
    report: str
    danger: Callable[[], str]
    """Says in a line whether this run is open to the drift by rounding."""
    selector: BackendSelector
    """What computes each layer."""
    finder: UnwatchedAttentionFinder
    """Looks out for attention that is not watched."""
    model: "weakref.ref[nn.Module]"
    leave: Callable[[], None]
    """Takes everything out of the model again."""
    corrected: "Callable[[AttachedModel], AttachedModel | None]"
    """Of this, the model watched as its first step showed, after `leave`; None: as it is."""
    weights: tuple["weakref.ref[Tensor]", ...] = ()
    """Some of the parameters, which change when an optimizer steps."""
    unfit: str = ""
    """Why nothing of the model can be watched, whatever runs."""
    unwatched: int = 0
    """Attention modules that were found and cannot be watched."""

    def announced(self) -> tuple[wire.Layer, ...]:
        """`layers` as they stand now: what computes each, and the head dim that calls showed where nothing else did."""
        return tuple(
            layer.model_copy(
                update={
                    "head_dim": layer.head_dim or watched.head_dim,
                    "sampled": watched.sampled,
                    "served_by": "probe" if watched.sampled else self.kernels,
                }
            )
            for layer, watched in zip(self.layers, self.selector.layers, strict=True)
        )

    def started(self, config: AgentConfig, *, step: int, qk_clip: wire.ClipState | None) -> wire.Started:
        """What the run is that starts after `step`."""
        return wire.Started(
            step=step,
            unix_seconds=time.time(),
            world_size=config.world_size,
            layers=self.announced(),
            policy=config.policy,
            numerics=config.numerics,
            mitigation=config.mitigation,
            switch_scope=config.switch_scope,
            qk_clip=qk_clip,
            labels=config.labels,
            versions=versions(),
        )

    def is_served_as(self, layers: Sequence[wire.Layer]) -> bool:
        """Whether `layers`, which `announced` gave, still says what computes each layer."""
        return [layer.sampled for layer in layers] == [watched.sampled for watched in self.selector.layers]

    def computed_by(self, layer: int) -> str:
        """A sentence about what computes the attention of a layer, by its number: function, library and version."""
        by = next(
            (w.computed_by for one, w in zip(self.layers, self.selector.layers, strict=True) if one.layer == layer)
        )
        root = by.partition(".")[0]
        try:
            version = f" ({root} {importlib.metadata.version(root)})"
        except (importlib.metadata.PackageNotFoundError, ValueError):
            version = ""
        return f" It is computed by {by}{version}." if by else ""

    def with_library(self, verdict: wire.Verdict) -> wire.Verdict:
        """The same verdict; a new one about wrong rows says what computes them."""
        if verdict.signal != KERNEL or verdict.layer is None or verdict.state != "raised":
            return verdict
        return verdict.model_copy(update={"sentence": (verdict.sentence + self.computed_by(verdict.layer))[:500]})

    def readings(self, counted: Counted) -> Readings:
        """What was counted, as the detectors read it."""
        if counted.broken_step is None and (counted.parameters is None or not counted.parameters.weights):
            self.finder.broken_softmax = ""  # such rows do no harm, as where the model replaces NaN
        return Readings(
            step=counted.step,
            since_step=counted.since_step,
            **head_readings(counted.words),
            modes=counted.modes,
            loss=collecting.mean(counted.losses),
            grad_norm=collecting.largest(counted.grad_norms),
            suspect_step=counted.suspect_step,
            learning_rate=counted.learning_rate,
            rounds=any(layer.rounds for layer in self.selector.layers),
            broken_step=counted.broken_step,
            place=self._place(counted),
            softmax=self.finder.broken_softmax,
            lost_steps=max(0, nonfinite(counted.grad_norms) - nonfinite(counted.losses)),
            parameters=counted.parameters.sentence if counted.parameters else "",
            weights_broken=counted.parameters is not None and counted.parameters.weights,
        )

    def _place(self, counted: Counted) -> str:
        """Where the first broken step broke, by the outputs of its layers; empty if that is not known."""
        looked = counted.parameters
        if counted.broken_step is None and looked is not None and looked.update:
            return FIRST_UPDATE
        if counted.broken_step is None or counted.broken_loss is None:
            return ""
        seen = self.selector.outputs_at(counted.broken_step)
        outputs = [(self.layers[place].layer, broken) for place, broken in seen]
        # after a later step all gradients are broken
        every_gradient = looked is not None and looked.every_gradient and counted.step == counted.broken_step
        return place_by_outputs(outputs, loss=counted.broken_loss, every_gradient=every_gradient)
