"""The agent: at each optimizer-step boundary it samples, detects, decides and switches; it never raises."""

import atexit
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Literal, Self

from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.labels import GUARDED
from foreshock.contract.modes import mode_name
from foreshock.contract.slots import Floats
from foreshock.monitor.acting import act
from foreshock.monitor.attention.standing import Standing, pause_steps
from foreshock.monitor.cadence import Cadence
from foreshock.monitor.config import AgentConfig, new_run_name, versions
from foreshock.monitor.detect.detectors import Detecting, Detectors
from foreshock.monitor.guard import Guard
from foreshock.monitor.instruments import Instruments, near_a_warning
from foreshock.monitor.outbox import Outbox, Sink
from foreshock.monitor.sampling.collector import Collector, Counted
from foreshock.monitor.sampling.judging import Judge, Judged
from foreshock.monitor.sampling.norms import Measured, ModelNorms
from foreshock.monitor.sampling.sample import GramsDraft, SampleDraft
from foreshock.monitor.switch import Switchboard
from foreshock.monitor.voice import Voice

Status = Literal["completed", "failed", "stopped"]


class Agent:
    """Watches one model in one process; made by `foreshock.monitor.attach`.

    Every public method but `load_state_dict` and `set_mode` is safe to call at any time: its faults are contained and
    counted (`faults`), unless the configuration says strict. In a forked child every method does nothing.
    """

    def __init__(self, config: AgentConfig, instruments: Instruments, undo: Callable[[], None]) -> None:
        self.config: Final = config
        """The settings, complete."""
        self.run = config.run or new_run_name(config.world_size)
        """The name that the service knows the run by."""
        self.boot: Final = f"{time.time_ns() // 1_000_000:013d}-{config.rank}-{secrets.token_hex(4)}"
        """This process start. A later one of the same rank sorts after it."""
        self.faults: Counter[str] = Counter()
        """Contained faults by component, since this agent's start."""
        self.current_step = 0
        """The last optimizer step that is done."""
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
            self._switchboard.refuses = instruments.keeper.refusal
            self._switchboard.idle = instruments.keeper.idle
            instruments.keeper.faults = self.faults
        self.detectors: Detecting = Detectors(self._heads, config.detectors)
        self._standing = Standing(instruments.layers, instruments.keeper, instruments.unwatched, pause_steps(config))
        self._judging = Judge(self._judge)
        self._guards = {name: Guard(name, self.faults, strict=config.strict) for name in GUARDED}
        self._outbox = Outbox(self._guards)
        self._voice = Voice(config)
        self._cadence = Cadence(config)
        self._started = self._closed = self._busy = False
        self._began_at = 0
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

        loss: the step's raw loss in nats, a number or a tensor of one (read later, without waiting for the device).
        grad_norm: the gradient's norm before clipping, likewise. learning_rate: that of this step.
        step: the run's own step number, one more than the last by default; it never goes back.

        What was not given is recorded as unknown. Raises nothing, unless the configuration says strict.
        """
        if self._inert() or self._busy:
            return
        began = time.perf_counter()
        self._busy = True
        try:
            self._guards["agent"].run(self._boundary, loss, grad_norm, learning_rate, step)
        finally:
            self._busy = False
            self._cadence.agent_took(time.perf_counter() - began)

    def _boundary(self, loss: object, grad_norm: object, learning_rate: float | None, step: int | None) -> None:
        self._begin()
        self._cadence.step_done()
        self.current_step = self.current_step + 1 if step is None else max(int(step), self.current_step)
        self._guards["loss"].run(self._collector.note, loss, grad_norm, learning_rate)
        due = self._cadence.due(self.current_step, self._collector.since_step, crowded=self._collector.crowded)
        self._settle(self._collect(sample=due))
        if self._instruments.keeper is not None:
            self._instruments.keeper.plan(self.current_step, self._cadence.watch_until)

    def _snapshot(self) -> None:
        step_seconds, agent_seconds = self._cadence.seconds_per_step()
        taken = self._collector.snapshot(
            self.current_step,
            self._switchboard.host,
            norms=self._measure_norms if self._cadence.norms_due(self.current_step) else None,
            step_seconds=step_seconds,
            agent_seconds=agent_seconds,
        )
        if taken:
            self._cadence.sampled()

    def _measure_norms(self) -> Measured:
        measured = self._guards["norms"].run(self._norms.measure)
        if measured is None:
            return Measured({})
        self._cadence.norms_measured(self.current_step, parts=bool(measured.parts))
        return measured

    def _collect(self, *, sample: bool, wait: bool = False) -> list[Counted]:
        """The samples that have arrived, after starting another one if it is due."""
        counted: list[Counted] = []

        def collect() -> None:
            if wait:  # makes room for one more
                counted.extend(self._collector.landed(wait=True))
            if sample:
                self._snapshot()
            counted.extend(self._collector.landed(wait=wait))

        self._guards["collector"].run(collect)
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
        self._guards["sample"].run(self._outbox.send_parts)
        self._guards["switch"].run(self._obey)

    def _obey(self) -> None:
        for command in self._outbox.commands():
            done = self._switchboard.obey(command, step=self.current_step, unix_seconds=time.time())
            if done is not None:
                self._outbox.tell(done)

    def _judge(self, counted: Counted) -> Judged:
        """What the detectors say; in the judge's thread, but for the last sample."""

        def judge() -> Judged:
            verdicts = self.detectors.update(self._instruments.readings(counted))
            risk = self.detectors.risk
            return Judged(counted, verdicts, risk, near_a_warning(risk, self.detectors.pressure))

        return self._guards["detectors"].run(judge) or Judged(counted, [], None)

    def _tell(self, judged: Judged) -> None:
        counted, verdicts, risk, near = judged
        self._guards["sample"].run(self._look, counted)
        if verdicts and (keeper := self._instruments.keeper) is not None:
            told = self._guards["detectors"].run(keeper.with_errors, verdicts, counted.words, self._heads)
            verdicts = verdicts if told is None else told
        self._guards["sample"].run(self._tell_sample, counted, risk)
        for verdict in verdicts:
            self._outbox.tell(verdict)
        if any(v.state == "raised" and v.severity != "info" for v in verdicts):
            self._cadence.watch_closely(self.current_step)
        if verdicts:
            self._guards["voice"].run(self._hear, verdicts)
        if self.config.policy != "observe":
            self._guards["policy"].run(self._act, verdicts)
        if (thinning := self._instruments.thinning) is not None:
            step, until = self.current_step, self._cadence.watch_until
            self._guards["thinning"].run(thinning.follow, counted.words, near, self._switchboard.host, step, until)

    def _hear(self, verdicts: list[wire.Verdict]) -> None:
        self._voice.say(self._voice.hear(verdicts, self._switched_modes))

    def _look(self, counted: Counted) -> None:
        """Who serves and measures each layer, told again when it changed."""
        if self._standing.look(counted.words, counted.since_step, counted.step):
            table = self._standing.table()
            if table and self.config.rank == 0 and not self.config.quiet:
                print(f"foreshock, from step {counted.step} on:\n{table}", file=sys.stderr)

    def _tell_sample(self, counted: Counted, risk: Floats | None) -> None:
        self._outbox.tell_draft(SampleDraft(counted, risk))
        if counted.parts:
            self._outbox.tell_parts(GramsDraft(part, counted.step, self._began_at) for part in counted.parts)

    def _act(self, verdicts: list[wire.Verdict]) -> None:
        done = act(self._switchboard, verdicts, self.config, step=self.current_step)
        for switched in done:
            self._outbox.tell_after_start(switched, started=self._started)
        self._voice.say(self._voice.switched([each for each in done if each.outcome != "refused"]))

    def _act_on_what_stands(self) -> None:
        # "updated", since a new warning would end the hold that a person has put on a head
        self._act([verdict.model_copy(update={"state": "updated"}) for verdict in self.detectors.active])

    def _switched_modes(self) -> dict[tuple[int, int], str]:
        return {head: mode_name(mode) for head, mode in self._switchboard.modes().items() if mode}

    # ---- events ---------------------------------------------------------------------------------------------------

    def subscribe(self, sink: Sink) -> None:
        """Hand every event from now on to `sink`, in this thread, before it is sent."""
        self._outbox.subscribe(sink)

    def _begin(self) -> None:
        if self._started:
            return
        self._started = True
        self._began_at = self.current_step
        self._guards["sender"].run(self._outbox.start, self.config, self.run, self.boot, self._health)
        self._outbox.tell(
            wire.Started(
                step=self.current_step,
                unix_seconds=time.time(),
                world_size=self.config.world_size,
                layers=self._instruments.layers,
                policy=self.config.policy,
                numerics=self.config.numerics,
                mitigation=self.config.mitigation,
                switch_scope=self.config.switch_scope,
                labels=self.config.labels,
                versions=versions(),
            )
        )
        self._outbox.tell_early(self.current_step)

    def _health(self) -> tuple[int, dict[str, int]]:
        return self.current_step, dict(self.faults)

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.boot}-{self._ids}"

    # ---- people ---------------------------------------------------------------------------------------------------

    def modes(self) -> dict[tuple[int, int], str]:
        """The present mode of every (layer, head), global numbers, by name (docs/reference/modes.md)."""
        return {head: mode_name(mode) for head, mode in self._switchboard.modes().items()}

    def set_mode(self, heads: Iterable[tuple[int, int]], mode: str, reason: str) -> wire.Switched:
        """Switch `heads` ((layer, head), global numbers) to `mode` before the next step, and return the event.

        mode: a name of docs/reference/modes.md, several joined by +, or plain. reason: kept with the event.
        Call it between steps; before the first, it outlives a saved state. Raises ValueError for what does not exist,
        and for heads whose own attention stays whatever their mode; of every head that is watched those are left out.
        """
        switched = self._switchboard.switch(heads, mode, step=self.current_step, reason=reason)
        self._outbox.tell_after_start(switched, started=self._started)
        return switched

    def report(self) -> str:
        """The table of attention modules: heads, dims, layout of W_Q and W_K, and what serves each.

        Where attention is kept, with the sampling error of the last sample that measured some.
        """
        keeper = self._instruments.keeper
        standing = self._standing.table()
        return self._instruments.report + (f"\n{standing}" if standing else "") + (keeper.errors if keeper else "")

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
        """Go on where `state_dict` was taken, as a new process start of the same run. Call it before the first step.
        The policy acts on warnings that stand, where heads do not have what they call for.

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
        if self.config.policy != "observe":  # it may be another than that of the process that warned
            self._guards["policy"].run(self._act_on_what_stands)

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
        # Whatever fails on the way, under strict as well: the model is let go of.
        with ExitStack() as last:
            last.callback(self.detach)
            last.callback(self._close_sender)
            last.callback(atexit.unregister, self.close)
            last.callback(self._judging.close)
            last.callback(setattr, self, "_closed", True)
            with self._guards["agent"]:
                if self._started:
                    self._collect_the_rest()
                    self._outbox.send_parts(every=True)
                    self._outbox.tell(wire.Finished(step=self.current_step, unix_seconds=time.time(), status=status))
                elif status != "failed" and not self.config.quiet:
                    self._standing.look_unstepped(self._instruments.state.cpu().numpy())

    def _close_sender(self) -> None:
        with self._guards["sender"]:
            self._outbox.close(self.config.close_seconds)

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
