"""The agent: at each optimizer-step boundary it samples, detects, decides and switches; it never raises."""

import atexit
import importlib.metadata
import logging
import os
import platform
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.modes import mode_name
from foreshock.contract.slots import Slot
from foreshock.monitor.attention.keep_attention import Keeper
from foreshock.monitor.attention.running import outside
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer
from foreshock.monitor.config import AgentConfig, new_run_name
from foreshock.monitor.detect.detectors import Detectors, Readings
from foreshock.monitor.guard import Guard
from foreshock.monitor.model.layers import Projection
from foreshock.monitor.policy import decide
from foreshock.monitor.sampling import collector as collecting
from foreshock.monitor.sampling.collector import Collector, Counted
from foreshock.monitor.sampling.judging import Judge, Judged
from foreshock.monitor.sampling.norms import Measured, ModelNorms
from foreshock.monitor.sampling.sample import Draft, GramsDraft, SampleDraft
from foreshock.monitor.switch import Switchboard
from foreshock.monitor.transport.sender import Sender

logger: Final = logging.getLogger("foreshock")

Status = Literal["completed", "failed", "stopped"]
Sink = Callable[[wire.Event], None]


class Detecting(Protocol):
    """What the agent needs of its detectors (foreshock.monitor.detect.detectors.Detectors)."""

    def update(self, readings: Readings) -> list[wire.Verdict]:
        """What one merged sample says: verdicts raised, updated or cleared."""

    @property
    def risk(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """How near a warning each head is, [N] in [0, 1]."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """What `attach` put into the model. `state` int64 [N, SLOT_COUNT] and `modes` int32 [N] lie on its device."""

    state: Tensor
    modes: Tensor
    layers: tuple[wire.Layer, ...]
    watched: tuple[nn.Module, ...]
    projections: tuple[Projection | None, ...]
    report: str
    keeper: Keeper | None = None
    """Who serves each layer; None in tests without a model."""


class Agent:
    """Watches one model in one process; made by `foreshock.monitor.attach`.

    Every public method but `load_state_dict` and `set_mode` is safe to call at any time: its faults are contained and
    counted (`faults`), unless the configuration says strict. In a forked child every method does nothing.
    """

    def __init__(self, config: AgentConfig, instruments: Instruments, undo: Callable[[], None]) -> None:
        self.config: Final = config
        self.run = config.run or new_run_name(config.world_size)
        self.boot: Final = f"{time.time_ns() // 1_000_000:013d}-{config.rank}-{secrets.token_hex(4)}"
        self.faults: Counter[str] = Counter()
        """Contained faults by component, since this agent's start."""
        self.current_step = 0
        self._instruments = instruments
        self._undo: Callable[[], None] | None = undo
        self._heads = wire.head_refs(instruments.layers)
        self._pid = os.getpid()
        self._ids = 0
        self._collector = Collector(instruments.state)
        self._norms = ModelNorms(instruments.layers, instruments.projections)
        self._switchboard = Switchboard(self._heads, instruments.modes, self._new_id)
        if instruments.keeper is not None:
            self._switchboard.on_change = instruments.keeper.follow
            instruments.keeper.faults = self.faults
        self.detectors: Detecting = Detectors(self._heads, config.detectors)
        self._judging = Judge(self._judge)
        self._sinks: list[Sink] = []
        self._sender: Sender | None = None
        self._guards = {
            name: Guard(name, self.faults, strict=config.strict)
            for name in (
                "agent",
                "loss",
                "collector",
                "sample",
                "detectors",
                "policy",
                "switch",
                "norms",
                "sinks",
                "sender",
            )
        }
        self._started = self._closed = self._busy = self._sampled = self._checked = False
        self._watch_until = -1
        self._last_sample_at = self._last_step_at = time.monotonic()
        self._step_times: list[float] = []
        self._agent_seconds = 0.0
        self._norms_at: int | None = None
        self._adds_up = False
        self._began_at = 0
        self._parts: deque[GramsDraft] = deque()
        atexit.register(self.close, "stopped")

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(
        self,
        loss: Tensor | float | None = None,
        grad_norm: Tensor | float | None = None,
        learning_rate: float | None = None,
        *,
        step: int | None = None,
    ) -> None:
        """One optimizer step is done. Call it after `optimizer.step()`.

        loss: the step's raw loss, a number or a tensor of one (read later, without waiting for the device).
        grad_norm: gradient norm before clipping. step: the run's own step number, one more than the last by default.
        """
        if self._inert() or self._busy:
            return
        began = time.perf_counter()
        self._busy = True
        try:
            with self._guards["agent"] as guard:
                if guard.on:
                    self._boundary(loss, grad_norm, learning_rate, step)
        finally:
            self._busy = False
            self._agent_seconds += time.perf_counter() - began

    def _boundary(self, loss: object, grad_norm: object, learning_rate: float | None, step: int | None) -> None:
        self._begin()
        self._advance(step)
        with self._guards["loss"] as guard:
            if guard.on:
                self._collector.note(loss, grad_norm, learning_rate)
        self._settle(self._collect(sample=self._due()))
        if self._instruments.keeper is not None:
            self._instruments.keeper.plan(self.current_step, self._watch_until)

    def _advance(self, step: int | None) -> None:
        now = time.monotonic()
        self._step_times.append(now - self._last_step_at)
        self._last_step_at = now
        self.current_step = self.current_step + 1 if step is None else max(int(step), self.current_step)

    def _due(self) -> bool:
        since = self.current_step - self._collector.since_step
        if not self._sampled or self.current_step <= self._watch_until or self._collector.crowded:
            return since > 0
        return since > 0 and self.current_step % self._stride(since) == 0

    def _stride(self, since: int) -> int:
        """Samples are due at multiples of it: sample_every_steps, doubled until they take sample_every_seconds.

        Ranks make their steps together, so each comes to the same number or to another's double: the service finds the
        samples of all ranks at the same steps, without a word between them.
        """
        step_seconds = (time.monotonic() - self._last_sample_at) / since
        return _doubled(self.config.sample_every_steps, step_seconds, self.config.sample_every_seconds)

    def _snapshot(self) -> None:
        every = self.config.norms_every_steps
        due = every and (self._norms_at is None or self._norms_due())
        steps = max(len(self._step_times), 1)
        taken = self._collector.snapshot(
            self.current_step,
            self._switchboard.host,
            norms=self._measure_norms if due else None,
            step_seconds=sum(self._step_times) / steps,
            agent_seconds=self._agent_seconds / steps,
        )
        if taken:
            self._sampled = True
            self._last_sample_at = time.monotonic()
            self._step_times.clear()
            self._agent_seconds = 0.0

    def _norms_due(self) -> bool:
        every = self.config.norms_every_steps
        if not self._adds_up:
            return self.current_step - (self._norms_at or 0) >= every
        # Parts add up only if all ranks measure at the same step: as with `_stride`.
        return self.current_step % _doubled(self.config.sample_every_steps, 1, every) == 0

    def _measure_norms(self) -> Measured:
        measured = Measured({})
        with self._guards["norms"] as guard:
            if guard.on:
                measured = self._norms.measure()
                self._adds_up |= bool(measured.parts)
                self._norms_at = self.current_step
        return measured

    def _collect(self, *, sample: bool, wait: bool = False) -> list[Counted]:
        """The samples that have arrived, after starting another one if it is due."""
        counted: list[Counted] = []
        with self._guards["collector"] as guard:
            if guard.on:
                if wait:  # makes room for one more
                    counted = self._collector.landed(wait=True)
                if sample:
                    self._snapshot()
                counted = counted + self._collector.landed(wait=wait)
        return counted

    def _collect_the_rest(self) -> None:
        """Sample what was counted since the last sample, wait for it and judge it."""
        rest = self._collect(sample=self.current_step > self._collector.since_step, wait=True)
        self._settle([])
        for counted in rest:
            self._tell(self._judge(counted))

    def _settle(self, counted: list[Counted]) -> None:
        """Tell of the samples that have been judged, hand those over that have arrived, obey commands that came in."""
        for judged in self._judging.take():
            self._tell(judged)
        for sample in counted:
            self._judging.put(sample)
        if self._parts:
            with self._guards["sample"] as guard:
                if guard.on:
                    self._send_parts()
        with self._guards["switch"] as guard:
            if guard.on and self._sender is not None:
                for command in self._sender.commands():
                    done = self._switchboard.obey(command, step=self.current_step, unix_seconds=time.time())
                    if done is not None:
                        self._emit(done)

    def _judge(self, counted: Counted) -> Judged:
        """What the detectors say; in the judge's thread, but for the last sample."""
        verdicts: list[wire.Verdict] = []
        risk = None
        with self._guards["detectors"] as guard:
            if guard.on:
                verdicts = self.detectors.update(_readings(counted, self._rounds()))
                risk = self.detectors.risk
        return Judged(counted, verdicts, risk)

    def _tell(self, judged: Judged) -> None:
        counted, verdicts, risk = judged
        if not self._checked:
            self._checked = True
            self._check_that_every_layer_was_hit(counted)
        if verdicts and self._instruments.keeper is not None:
            with self._guards["detectors"] as guard:
                if guard.on:
                    verdicts = self._instruments.keeper.with_errors(verdicts, counted.words, self._heads)
        with self._guards["sample"] as guard:
            if guard.on:
                self._emit_draft(SampleDraft(counted, risk))
                if counted.parts:
                    self._send_parts(every=True)  # an older measurement's; what finds no room is dropped and counted
                    self._parts.extend(GramsDraft(part, counted.step, self._began_at) for part in counted.parts)
                    self._send_parts()
        for verdict in verdicts:
            self._emit(verdict)
        if any(v.state == "raised" and v.severity != "info" for v in verdicts):
            self._watch_until = self.current_step + self.config.close_watch_steps
        with self._guards["policy"] as guard:
            if guard.on and self.config.policy != "observe":
                self._act(verdicts)

    def _send_parts(self, *, every: bool = False) -> None:
        """Hand over as many parts of Gram matrices as the queue has room for: together they may be larger than it."""
        while self._parts and (every or self._sender is None or self._sender.has_room()):
            self._emit_draft(self._parts.popleft())

    def _rounds(self) -> bool:
        layers = (getattr(module, LAYER_ATTRIBUTE, None) for module in self._instruments.watched)
        return any(layer.rounds for layer in layers if layer is not None)

    def _act(self, verdicts: list[wire.Verdict]) -> None:
        outcome: wire.Outcome = "applied" if self.config.policy == "auto" else "proposed"
        self._switchboard.held -= {(v.layer, v.head) for v in verdicts if v.state == "raised"}
        modes = {head: mode for head, mode in self._switchboard.modes().items() if head not in self._switchboard.held}
        for decision in decide(verdicts, self.config.mitigation, modes, self.config.switch_scope):
            switched = self._switchboard.switch(
                decision.heads,
                mode_name(decision.mode),
                step=self.current_step,
                reason=f"policy {self.config.policy}: {decision.verdict.sentence}",
                outcome=outcome,
                verdict=decision.verdict.id,
            )
            self._emit(switched)

    def _check_that_every_layer_was_hit(self, counted: Counted) -> None:
        rows = counted.words[:, [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS]].sum(axis=1)
        first = 0
        for layer, module in zip(self._instruments.layers, self._instruments.watched, strict=True):
            size = len(layer.heads)
            if not rows[first : first + size].any():
                watched: WatchedLayer | None = getattr(module, LAYER_ATTRIBUTE, None)
                why = "; ".join(watched.unserved) if watched is not None else ""
                logger.warning(
                    "foreshock: layer %d (%s) counted nothing in step %d%s",
                    layer.layer,
                    layer.name,
                    counted.step,
                    f": {why}" if why else ": its forward or backward did not run through the watched attention",
                )
            first += size
        if outside.calls:
            logger.warning(
                "foreshock: scaled_dot_product_attention was called %d times outside every watched module; those "
                "calls are not watched",
                outside.calls,
            )

    # ---- events ---------------------------------------------------------------------------------------------------

    def subscribe(self, sink: Sink) -> None:
        """Hand every event from now on to `sink`, in this thread, before it is sent."""
        self._sinks.append(sink)

    def _emit_draft(self, draft: Draft) -> None:
        if self._sinks:  # somebody in this thread wants the message now
            self._emit(draft.build())
        else:
            self._send(draft)

    def _emit(self, event: wire.Event) -> None:
        for sink in self._sinks:
            with self._guards["sinks"] as guard:
                if guard.on:
                    sink(event)
        self._send(event)

    def _send(self, event: wire.Event | Draft) -> None:
        if self._sender is not None:
            with self._guards["sender"] as guard:
                if guard.on:
                    self._sender.put(event)

    def _begin(self) -> None:
        if self._started:
            return
        self._started = True
        self._began_at = self.current_step
        with self._guards["sender"]:
            if self.config.url is not None:
                self._sender = Sender(self.config, run=self.run, boot=self.boot, health=self._health)
                self._sender.start()
        self._emit(
            wire.Started(
                step=self.current_step,
                unix_seconds=time.time(),
                world_size=self.config.world_size,
                layers=self._instruments.layers,
                policy=self.config.policy,
                numerics=self.config.numerics,
                mitigation=self.config.mitigation,
                labels=self.config.labels,
                versions=_versions(),
            )
        )

    def _health(self) -> tuple[int, dict[str, int]]:
        return self.current_step, dict(self.faults)

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.boot}-{self._ids}"

    # ---- people ---------------------------------------------------------------------------------------------------

    def modes(self) -> dict[tuple[int, int], str]:
        """The present mode of every (layer, head), by name."""
        return {head: mode_name(mode) for head, mode in self._switchboard.modes().items()}

    def set_mode(self, heads: Iterable[tuple[int, int]], mode: str, reason: str) -> wire.Switched:
        """Switch `heads` ((layer, head), global numbers) to `mode` before the next step, and return the event.

        Call it between steps. Raises ValueError for a mode or a head that does not exist.
        """
        switched = self._switchboard.switch(heads, mode, step=self.current_step, reason=reason)
        self._begin()
        self._emit(switched)
        return switched

    def report(self) -> str:
        """The table of attention modules: heads, dims, layout of W_Q and W_K, and what serves each.

        Where attention is kept, with the sampling error of the last sample that measured some.
        """
        keeper = self._instruments.keeper
        return self._instruments.report + ("" if keeper is None else keeper.errors)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def begin_at(self, step: int) -> None:
        """Number the steps on from `step`, where training resumes without this agent's state. Before step 1 only."""
        if not self._started:
            self.current_step = self._collector.since_step = step

    def state_dict(self) -> dict[str, Any]:
        """Step, modes and detector state, JSON-able. Call it at a step boundary, where the checkpoint is written.

        Counts of steps not sampled yet are sampled first, so that no step before the checkpoint is lost.
        """
        detectors = None
        with self._guards["detectors"]:
            if not self._inert() and self._started:
                self._collect_the_rest()
            detectors = self.detectors.state_dict()
        return {
            "version": 1,
            "run": self.run,
            "step": self.current_step,
            "switch": self._switchboard.state_dict(),
            "detectors": detectors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, as a new boot of the same run. Call it before the first step.

        Raises ValueError after a step, or for a state that this version cannot read.
        """
        if self._started:
            raise ValueError(f"load_state_dict came after step {self.current_step}; call it before the first step")
        if state.get("version") != 1:
            raise ValueError(f"the saved state has version {state.get('version')!r}; this agent reads version 1")
        self._switchboard.load_state_dict(state["switch"])
        if state["detectors"] is not None:  # None: saving them failed and was contained
            self.detectors.load_state_dict(state["detectors"])
        self.current_step = self._collector.since_step = int(state["step"])
        if not self.config.run:
            self.run = str(state["run"])

    # ---- the end --------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take everything out of the model again, which is then exactly as before `attach`."""
        if self._undo is not None and os.getpid() == self._pid:
            undo, self._undo = self._undo, None
            undo()

    def close(self, status: Status = "completed") -> None:
        """Sample what is left, send it (at most `close_seconds`), detach. Doing it again does nothing."""
        if self._inert():
            return
        self._busy = True
        with self._guards["agent"]:
            if self._started:
                self._collect_the_rest()
                self._send_parts(every=True)
                self._emit(wire.Finished(step=self.current_step, unix_seconds=time.time(), status=status))
        self._closed = True
        self._judging.close()
        atexit.unregister(self.close)
        with self._guards["sender"]:
            if self._sender is not None:
                self._sender.close(self.config.close_seconds)
        self.detach()

    def _inert(self) -> bool:
        return self._closed or os.getpid() != self._pid

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a callback, a hook or a trainer that holds it may be copied along with a model

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # or pickled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        self.close("completed" if error is None else "stopped" if stopped else "failed")


def _doubled(steps: int, worth: float, least: float) -> int:
    """`steps`, doubled until they are worth `least`; as they are where a step is worth nothing."""
    while 0 < steps * worth < least:
        steps *= 2
    return steps


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__[:64]}
    for package in ("foreshock", "transformers", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)[:64]
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _readings(counted: Counted, rounds: bool) -> Readings:
    return Readings.from_words(
        step=counted.step,
        since_step=counted.since_step,
        words=counted.words,
        modes=counted.modes,
        loss=collecting.mean(counted.losses),
        grad_norm=collecting.largest(counted.grad_norms),
        learning_rate=counted.learning_rate,
        rounds=rounds,
        **{name: values.astype(np.float64) for name, values in counted.norms.items()},
    )
