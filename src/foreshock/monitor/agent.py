"""The agent: after each optimizer step it samples, detects, decides and switches; its errors never stop training."""

import atexit
import functools
import itertools
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Annotated, Any, Final, Literal, Self, SupportsInt

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.incident import page_of
from foreshock.contract.metrics.metric import GUARDED
from foreshock.contract.wire import first_error
from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.checkpoints import KnownCheckpoints, Rounds, SaveRequests, store_of_processes
from foreshock.monitor.config import AgentConfig, new_run_name
from foreshock.monitor.console import ConsoleReporter
from foreshock.monitor.coverage import CoverageReport
from foreshock.monitor.crisis import Crisis
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.levels import KERNEL, LEVEL
from foreshock.monitor.detect.readings import Readings
from foreshock.monitor.guard import Guard, default_torch_modes, logger, say
from foreshock.monitor.model.norms import ModelNorms
from foreshock.monitor.outbox import Outbox, Sink
from foreshock.monitor.qk_clip import Clipping
from foreshock.monitor.sampling import (
    Counted,
    DetectorResult,
    DetectorThread,
    SampleDraft,
    Sampler,
    SamplingSchedule,
)
from foreshock.monitor.switching import Switchboard

UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions from reading data of the wrong form."""


class OtherHeadsError(ValueError):
    """The saved state belongs to other heads than those that this process watches."""


class SavedState(BaseModel):
    """Content of `Agent.state_dict`."""

    model_config = ConfigDict(extra="ignore")

    version: Literal[1]
    run: wire.Identifier
    step: Annotated[int, Field(ge=0)]
    switch: dict[str, Any]
    qk_clip: dict[str, Any] | None = None
    """None if an agent without QK-Clip saved the state."""
    detectors: dict[str, Any] | None
    """None if the detectors' state could not be saved."""


def read_saved(state: object, heads: Sequence[wire.HeadRef]) -> SavedState:
    """Parse the state of an agent that watched these heads. Raises ValueError with a sentence."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != 1:
        raise ValueError(f"it has version {version!r}; this agent reads version 1")
    try:
        saved = SavedState.model_validate(state)
    except ValidationError as error:
        raise ValueError(f"it is damaged: {first_error(error)}") from None
    watched = (saved.detectors or {}).get("heads")
    if isinstance(watched, list) and list(map(tuple, watched)) != list(heads):
        raise OtherHeadsError(f"it has {len(watched)} heads, but this process watches {len(heads)} or different ones")
    return saved


def steps_done(step: object) -> int:
    """Convert a step number of any numeric type to int. Raises ValueError with a sentence if it is invalid."""
    done = int(step) if isinstance(step, SupportsInt) and step == step else -1  # NaN is not itself
    if done < 0:
        raise ValueError(f"begin_at takes the number of completed steps, 0 or more, not {step!r:.100}")
    return done


_agents: Final = itertools.count()
"""Numbers of this process's agents; every process of a run counts the same."""
_STEPS_WITHOUT_TRAINING: Final = 3
"""After this number of steps without a backward through the model, the agent stops waiting for one."""
_NOTHING: Final = (
    "no attention that foreshock can watch ran in the first steps. If compiled code calls it, give its number of "
    'heads: attach(model, heads={"its name": 8})'
)
Status = Literal["completed", "failed", "stopped"]


class Agent:
    """Watches one model in one process; created by `foreshock.monitor.attach`.

    Every public method except `set_mode` is safe to call at any time: its errors are contained and counted (`faults`),
    unless `strict` is set. In a forked child process, all methods do nothing.
    """

    def __init__(self, config: AgentConfig, attached: AttachedModel) -> None:
        self.config: Final = config
        """The complete settings."""
        self.run = config.run or new_run_name(config.world_size)
        """Name of the run in the service."""
        self.boot: Final = f"{time.time_ns() // 1_000_000:013d}-{config.rank}-{secrets.token_hex(4)}"
        """Id of this process instance. Later instances of the same rank sort after it."""
        self.faults: Counter[str] = Counter()
        """Contained errors by component, since this agent's start."""
        self._pid = os.getpid()
        boot, ids = self.boot, itertools.count(1)
        self._new_id = lambda: f"{boot}-{next(ids)}"
        self._detector_thread = DetectorThread(_detect)
        self._guards = {name: Guard(name, self.faults, strict=config.strict) for name in GUARDED}
        self._saved: dict[str, Any] | None = None
        """A loaded state whose heads do not match the heads found before the first step; loaded again after that."""
        self._known = self._fresh = False
        """Whether the first step has shown which modules compute attention, and whether the agent then watched other
        layers, which have not run a step yet."""
        self._empty_steps, self._nothing = 0, ""
        self._watch(attached)
        self._outbox = Outbox(self._guards, console_prints=self._console.prints)
        # a save hangs unless all processes join it
        several = config.world_size > 1
        rounds = Rounds(f"foreshock/{self.run}/{next(_agents)}", store_of_processes) if several else None
        self._saves = SaveRequests(config.save_on_warning, rounds)
        self._checkpoints = KnownCheckpoints()
        self._requested_step: int | None = None
        """Step after which a checkpoint was last requested."""
        self._started = self._closed = self._busy = False
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def _watch(self, attached: AttachedModel) -> None:
        """Connect the agent to the watched layers of a model."""
        config = self.config
        self._attached = attached
        self._undo: Callable[[], None] | None = attached.leave
        self._heads = attached.heads
        self._switchboard = Switchboard(self._heads, attached.modes, self._new_id)
        self._switchboard.on_change = attached.follow
        self._switchboard.why_refused = attached.refusal
        self._switchboard.runs_on_kernels = attached.runs_on_kernels
        attached.faults = self.faults
        head_dims = {layer.layer: layer.head_dim for layer in attached.layers}
        self.detectors = Detectors(self._heads, config.detectors, head_dims)
        self._coverage = CoverageReport(attached, config)
        self._console = ConsoleReporter(config, attached.layers)
        me = weakref.proxy(self)  # no reference cycle: a dropped agent is freed at once, not later during a step
        emit: Callable[[wire.Event], None] = lambda event: me._outbox.emit(event)  # noqa: E731
        report = self._console.report_switched

        def tell(done: Sequence[wire.Switched]) -> None:
            for switched in done:
                emit(switched)
            report(done)

        self._switchboard.tell = tell
        self._active: Sequence[wire.Verdict] = ()
        self.readings: Readings | None = None
        """The detectors' readings of the newest sample; None before the first one, and if they failed."""
        self._clipping = Clipping(config, attached, self._guards["qk_clip"], self._new_id, emit)
        self._schedule = SamplingSchedule(
            config.stride,
            least_seconds=config.sampled_seconds if config.sample_every_steps is None else 0.0,
            norms_every_steps=config.norms_every_steps,
            close_watch_steps=config.close_watch_steps,
        )
        norms = ModelNorms(attached.layers, [layout.current for layout in attached.layouts])
        before_sample = self._clipping.before_sample
        self._sampler = Sampler(self._schedule, attached.state, norms, self._guards, before_sample)
        clipping = self._clipping
        self._crisis = Crisis(
            attached.model, lambda: clipping.optimizers, config.close_watch_steps, self._schedule.watch_closely
        )

    def _look_at_the_first_step(self) -> None:
        """Watch the modules that computed attention in the first step."""
        self._known = True
        attached = self._attached
        corrected = None if self._undo is None or attached.unfit else attached.corrected()
        if corrected is not None:
            self._watch_instead(corrected)
        if self._saved is not None and self._attached.layers:
            self.load_state_dict(self._saved)
        why = self._attached.unfit or _NOTHING
        if not self._attached.layers and not attached.unfit:
            self._empty_steps += 1
            shown = corrected is not None or self._attached.finder.has_read
            if not shown and self._empty_steps < _STEPS_WITHOUT_TRAINING:
                self._known = False
                return
            if self.config.must_watch:
                self._nothing = why
            else:
                logger.warning("foreshock: no attention is watched, training continues: %s", why)
        self._attached.finder.scouted()
        if self.config.shows and self._attached.layers:
            say(f"{self._attached.danger()}\n{self._attached.report()}")

    def _watch_instead(self, attached: AttachedModel) -> None:
        """Watch other layers, before the run is announced; layers that were watched before keep their modes."""
        names = {layer.layer: layer.name for layer in self._attached.layers}
        numbers = {layer.name: layer.layer for layer in attached.layers}
        board, clipping, step = self._switchboard.state_dict(), self._clipping, self.current_step
        modes = [[numbers[names[n]], head, mode] for n, head, mode in board["modes"] if names[n] in numbers]
        if lost := sorted({names[n] for n, *_ in board["modes"]} - numbers.keys()):
            why = "in the first step, none of their calls could be intercepted"
            logger.warning("foreshock: the switch of heads of %s is refused: %s", ", ".join(lost), why)
        self._watch(attached)
        self._fresh = attached.fresh
        self.begin_at(step)
        self._switchboard.load_state_dict(board | {"modes": modes})
        self._clipping.take_over(clipping)

    @property
    def current_step(self) -> int:
        """The last completed optimizer step."""
        return self._schedule.step

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(
        self,
        loss: Tensor | float | None = None,
        grad_norm: Tensor | float | None = None,
        learning_rate: float | None = None,
        *,
        step: int | None = None,
    ) -> None:
        """Record a completed optimizer step. Call it after `optimizer.step()`.

        loss: the step's raw loss in nats, a number or one-element tensor (read later, without waiting for the device).
        grad_norm: the gradient's norm before clipping, in the same form. learning_rate: learning rate of this step.
        step: the run's own step number; by default one more than the last. The first number is the starting point.
        Numbers may be skipped; if a number is lower than the last, counting continues from the last.

        Arguments that are omitted are recorded as unknown. Raises ValueError if no supported attention ran although
        QK-Clip, `strict` or a policy that switches heads needs it. Other errors are raised only with `strict`.
        """
        if self._inert() or self._busy:
            return
        began = time.perf_counter()
        self._busy = True
        try:
            with default_torch_modes(self._attached.state.device):
                if not self._known:
                    self._guards["agent"].run(self._look_at_the_first_step)
                counted = self._guards["agent"].run(self._count, step)
                # outside the guard: other processes may wait for this one
                self._clipping.after_step(self.current_step, self._schedule.next_step)
                if counted:
                    self._guards["agent"].run(self._boundary, loss, grad_norm, learning_rate)
        finally:
            self._busy = False
            self._schedule.agent_took(time.perf_counter() - began)
        if self._nothing:
            why, self._nothing = self._nothing, ""
            self.close("failed")
            raise ValueError(why)

    def _count(self, step: int | None) -> bool:
        if not self._started and not self.current_step and step is not None:  # resumed without a saved state
            self.begin_at(max(int(step) - 1, 0))
        self._schedule.step_done(step)
        return True

    def _begin(self) -> None:
        if self._started:
            return
        self._started = True
        schedule, faults = self._schedule, self.faults  # not self: the sender's thread must not keep it alive
        health = lambda: (schedule.step, dict(faults))  # noqa: E731
        self._guards["sender"].run(self._outbox.start, self.config, self.run, self.boot, health)
        clip = self._guards["qk_clip"].run(lambda: self._clipping.state)
        self._outbox.begin(self._attached.started(step=self._schedule.before, qk_clip=clip))

    def _boundary(self, loss: object, grad_norm: object, learning_rate: float | None) -> None:
        fresh, self._fresh = self._fresh, False
        if self._known:
            self._begin()
        self._sampler.note(loss, grad_norm, learning_rate)
        found = self._guards["crisis"].run(self._crisis.look, self.current_step, loss, grad_norm)
        if found is not None:
            self._sampler.collector.note_parameters(found)
        if not self._known:
            return
        if unwatched := self._attached.finder.take_findings():
            self._coverage.add_unwatched(unwatched)
        # before the sample, which records the modes that ran
        self._guards["answers"].run(self._switchboard.settle, self._schedule.before, self.current_step, time.time())
        self._attached.step_done(self.current_step)
        self._settle(self._sampler.collect(self._switchboard.host, sample=self._sampler.due and not fresh))
        if not fresh:
            self._attached.plan(self.current_step, self._schedule.next_step, self._schedule.watch_until)

    def _collect_the_rest(self) -> bool:
        """Sample the steps since the last sample and run the detectors on them; False if they take too long."""
        with default_torch_modes(self._attached.state.device):
            behind = self.current_step > self._sampler.collector.since_step
            rest = self._sampler.collect(self._switchboard.host, sample=behind, wait=True)
        self._settle(rest)
        self._guards["qk_clip"].run(self._clipping.emit_rest)
        for result in self._detector_thread.take(last=True):
            self._publish(result)
        return self._detector_thread.idle

    def _settle(self, counted: list[Counted]) -> None:
        """Publish finished detector results, pass arrived samples to the detectors, and execute commands."""
        for result in self._detector_thread.take():
            self._publish(result)
        for sample in counted:
            self._guards["qk_clip"].run(self._clipping.arrived, sample)
            self._detector_thread.put(self._guards["detectors"], self.detectors, self._attached, sample)
        self._guards["switch"].run(lambda: self._switchboard.obey_some(self._outbox.commands(), self.current_step))

    def _publish(self, result: DetectorResult) -> None:
        counted, verdicts, risk, self._active, self.readings, undecided = result
        if counted.broken_step is not None:
            self._crisis.begin(self.current_step)
        self._guards["sample"].run(self._record_coverage, counted)
        self._guards["sample"].run(lambda: self._outbox.emit_sample(SampleDraft(counted, risk)))
        for verdict in verdicts:
            self._outbox.emit(verdict)
            if verdict.state == "raised" and verdict.signal in (LEVEL, KERNEL):
                self._crisis.begin(self.current_step)
        if undecided or any(v.state == "raised" and v.severity != "info" for v in verdicts):
            self._schedule.watch_closely(self.current_step)
        if verdicts:
            console, modes = self._console, self._switchboard.named
            self._guards["console"].run(
                lambda: console.log_lines(console.lines_for(verdicts, modes, self._clipping.state, self._outbox.page))
            )
        if self.config.policy != "observe":
            self._guards["policy"].run(self._switchboard.act, verdicts, self.config, self.current_step)
        self._guards["qk_clip"].run(self._clipping.follow, verdicts, step=self.current_step)
        self._saves.follow(verdicts, self._active)
        if self.config.save_on_warning and self.config.rank == 0:
            protected = self._guards["checkpoints"].run(self._checkpoints.follow, verdicts, self._active)
            if protected is not None:
                self._outbox.emit(protected)

    def _record_coverage(self, counted: Counted) -> None:
        """Record which layers a sample covers; if backends or QK-Clip's state changed, announce the layers again."""
        if self._undo is not None and self._coverage.record(counted.words, counted.since_step, counted.step):
            self._coverage.show(counted.step)
        clip = self._guards["qk_clip"].run(lambda: self._clipping.state)
        started = self._outbox.started
        if started is not None and not (started.qk_clip == clip and self._attached.is_served_as(started.layers)):
            self._outbox.correct(started.model_copy(update={"layers": self._attached.announced(), "qk_clip": clip}))

    # ---- people ---------------------------------------------------------------------------------------------------

    def subscribe(self, sink: Sink) -> None:
        """Call `sink` with every later event, in this thread, before the event is sent."""
        self._outbox.subscribe(sink)

    @property
    def should_save(self) -> bool:
        """True once after a warning opened an incident: write a checkpoint at this step boundary, then call
        `checkpoint_saved`. Always False with `save_on_warning=False`. In a run of several processes, it is true in all
        of them after the same step, if each process reads it at every step."""
        wanted = self._saves.take(self.current_step)
        if wanted:
            self._requested_step = self.current_step
        return wanted

    def checkpoint_saved(self, path: str | os.PathLike[str], *, step: int | None = None, trainer: str = "own") -> None:
        """Report a checkpoint at `path` of the run after `step`, by default the last completed step.

        `foreshock resume-plan` names it. Only rank 0 reports it. Does not raise.
        """
        if self.config.rank == 0 and not self._inert() and self._started:
            at = self.current_step if step is None else step
            requested = at == self._requested_step
            fields = {"step": at, "path": os.fspath(path)[-1024:], "trainer": trainer, "requested": requested}

            def report() -> None:
                self._checkpoints.add(checkpoint := wire.Checkpoint.model_validate(fields))
                self._outbox.emit(checkpoint)

            self._guards["checkpoints"].run(report)

    def modes(self) -> dict[tuple[int, int], str]:
        """Return the present mode name of every (layer, head), in global numbers (docs/reference/modes.md)."""
        return dict.fromkeys(self._heads, "plain") | self._switchboard.named()

    def set_mode(self, heads: Iterable[tuple[int, int]], mode: str, reason: str) -> wire.Switched | None:
        """Switch `heads` ((layer, head), global numbers) to `mode` before the next step, and return the event.

        mode: a name of docs/reference/modes.md, several joined by +, or plain. reason: recorded in the event.
        Returns None for heads with native attention: foreshock's kernels compute them from the next step on, and after
        that step an event follows, "applied" or "refused". Call it between steps; before the first step, it takes
        precedence over a loaded state. Raises ValueError for a mode or head that does not exist, after `detach`, and
        for heads whose attention cannot move to the kernels; a switch of all heads skips these instead.
        """
        switched = self._switchboard.switch(heads, mode, step=self.current_step, reason=reason)
        if switched is not None:
            self._outbox.emit(switched)
            self._guards["console"].run(self._console.report_switched, [switched])
        return switched

    def set_qk_clip(self, on: bool, reason: str) -> wire.Clipped:
        """Switch QK-Clip on or off from the next step on, and return the event. reason: recorded in the event.

        QK-Clip scales weights; switching it off does not undo that. Call it between steps, in every process at the
        same step. Raises ValueError if QK-Clip ended because of an error.
        """
        return self._clipping.set(on, step=self.current_step, reason=reason)

    def qk_clip_with(
        self,
        *,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
        group: "torch.distributed.ProcessGroup | None" = None,
    ) -> None:
        """Set the optimizer of the weights, and the processes that have the same heads, before training.

        optimizer: one or several; needed for 16-bit weights, which may be copies of master weights. foreshock's
        callbacks for trainers pass it. group: needed with tensor or pipeline parallelism; by default all processes.
        Raises ValueError for an object that is not an optimizer, and for a group after the first step.
        """
        self._clipping.given(optimizer, group)

    def report(self) -> str:
        """Return the table of attention modules: heads, dims, layout of W_Q and W_K, and the backend of each.

        For native attention, it includes the sampling error of the last sample with measured rows.
        """
        parts = (self._attached.report(), self._coverage.table(), self._clipping.report())
        return "\n".join(filter(None, parts))

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def begin_at(self, step: int) -> None:
        """Continue step numbers from `step`, if training resumes without this agent's state. Only before step 1."""
        with self._guards["agent"]:
            if not self._started:
                done = self._sampler.collector.since_step = steps_done(step)
                self._schedule.begin_at(done)

    def state_dict(self) -> dict[str, Any]:
        """Return step, modes and detector state as JSON types. Call it at the step boundary of the checkpoint.

        Steps that were not sampled yet are sampled first, so that no step before the checkpoint is lost.
        """
        detectors = None
        with self._guards["detectors"]:
            if self._inert() or not self._started or self._collect_the_rest():
                detectors = self.detectors.state_dict()
        return {
            "version": 1,
            "run": self.run,
            "step": self.current_step,
            "switch": self._switchboard.state_dict(),
            "qk_clip": self._clipping.state_dict(),
            "detectors": detectors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` in a new process instance of the same run. Call it before the first step.

        The policy acts on active warnings if their heads do not have the requested mode. If the state cannot be used,
        training continues: a line in the log gives the reason, and the detectors start from zero. With `strict`,
        ValueError is raised instead.
        """
        self._saved = None
        try:
            if self._started:
                raise ValueError(f"it came after step {self.current_step}; call it before the first step")
            self._take_up(read_saved(state, self._heads))
        except UNREADABLE as error:
            step = state.get("step") if isinstance(state, dict) else None  # usable even if the rest is not
            self.begin_at(step if isinstance(step, int) and step > 0 else self.current_step)
            if isinstance(error, OtherHeadsError) and not self._known:
                self._saved = state  # try again when the first step has shown the heads
                return
            if self.config.strict:
                raise ValueError(f"the saved state cannot be restored: {error}") from error
            logger.warning("foreshock: the saved state could not be restored; training continues: %s", error)

    def _take_up(self, saved: SavedState) -> None:
        self._switchboard.load_state_dict(saved.switch)
        if saved.qk_clip is not None:
            self._clipping.load_state_dict(saved.qk_clip)
        self.begin_at(saved.step)
        self.run = self.config.run or saved.run
        try:
            if saved.detectors is not None:
                self.detectors.load_state_dict(saved.detectors)
        except Exception as error:  # a damaged state may raise anything
            raise ValueError(f"{error} (the detectors start from zero; the modes of the heads are as saved)") from error
        self._active = self.detectors.active  # safe here: the detectors' thread has no work yet
        self._guards["qk_clip"].run(self._clipping.follow, self._active, step=self.current_step)
        if self.config.policy != "observe":  # may differ from the policy of the process that warned
            # "updated", because a raised warning would end a person's hold on a head
            active = [verdict.model_copy(update={"state": "updated"}) for verdict in self._active]
            self._guards["policy"].run(self._switchboard.act, active, self.config, self.current_step)

    # ---- the end --------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove everything from the model, which is then exactly as before `attach`."""
        if self._undo is not None and os.getpid() == self._pid:
            undo, self._undo = self._undo, None
            self._switchboard.why_refused = lambda row, mode: "the agent was detached from its model; attach another"
            undo()

    def close(self, status: Status = "completed") -> None:
        """Sample the remaining steps, send them (for at most `close_seconds`), and detach. Later calls do nothing."""
        if self._inert():
            return
        self._busy = True
        # The exit stack detaches from the model even if another step fails, also with `strict`.
        with ExitStack() as last:
            last.callback(self._guards["agent"].finish, self.detach)
            last.callback(self._guards["sender"].finish, self._outbox.close, self.config.close_seconds)
            last.callback(atexit.unregister, self._at_exit)
            last.callback(self._detector_thread.close)
            last.callback(setattr, self, "_closed", True)
            with self._guards["agent"]:
                if self._started:
                    self._collect_the_rest()
                    if self._coverage.table_is_stale:
                        self._coverage.show(self.current_step)
                    self._outbox.emit(wire.Finished(step=self.current_step, unix_seconds=time.time(), status=status))
                elif status != "failed" and not self.config.quiet:
                    self._coverage.warn_if_unstepped(self._attached.state.cpu().numpy())

    def __repr__(self) -> str:
        """Return run, state, number of heads, warnings and page, for interactive use."""
        counts = f"{len(self._attached.layers)} layers, {len(self._heads)} heads"
        state = "closed" if self._closed else f"at step {self.current_step:,}"
        warned = "; ".join(verdict.sentence for verdict in self._active[:3]) or "none"
        more = f" and {len(self._active) - 3} more" if len(self._active) > 3 else ""
        page = "" if self.config.url is None else f", page {page_of(self.config.url, self.run)}"
        return f"<foreshock agent: run {self.run}, state {state}, watches {counts}, warnings {warned}{more}{page}>"

    def _inert(self) -> bool:
        return self._closed or os.getpid() != self._pid

    def __del__(self) -> None:
        # The remaining data is sent in a thread, because garbage collection can interrupt any code.
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            if not self._started and not self.config.quiet:
                logger.warning(
                    "foreshock: the agent was garbage-collected before its first step; keep a reference to the object "
                    "that attach() returns, and call its step()"
                )
            try:
                self.detach()  # in this thread, because settings of torch.compile are per thread
            finally:
                threading.Thread(target=self.close, args=("stopped",), name="foreshock-close").start()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a callback, hook or trainer with a reference to the agent may be copied with a model

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # or pickled with it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        self.close("completed" if error is None else "stopped" if stopped else "failed")


def _close(dropped: "weakref.ref[Agent]") -> None:
    """Close an agent when the process ends; the weak reference does not keep it or its model alive until then."""
    if (agent := dropped()) is not None:
        agent.close("stopped")


def _detect(guard: Guard, detectors: Detectors, attached: AttachedModel, counted: Counted) -> DetectorResult:
    """Update the detectors with a sample. Runs in their thread, which never has a reference to the agent."""

    def detect() -> DetectorResult:
        readings = attached.readings(counted)
        verdicts = [attached.with_library(verdict) for verdict in detectors.update(readings)]
        active = tuple(detectors.active)
        return DetectorResult(counted, verdicts, detectors.risk, active, readings, detectors.undecided)

    return guard.run(detect) or DetectorResult(counted, [], None, tuple(detectors.active))
