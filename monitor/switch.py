"""Changes the mode of heads: the one writer of the mode flags in device memory.

A command from the service is delivered at least once and answered exactly once. Its values are checked again here,
against this process's own heads, modes, clock and step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.modes import Mode, check_served, mode_name, parse_mode

MAX_ANSWERED: Final = 4096
"""Command ids remembered, so that a repeated delivery changes nothing."""


class _Judged(NamedTuple):
    """What becomes of a command."""

    outcome: wire.Outcome
    heads: list[tuple[int, int]]
    mode: Mode | None
    """What they are given; None: they keep what they have."""
    reason: str


class Switchboard:
    """The modes of this process's heads: `modes` is int32 [N] in device memory, `heads` names its rows."""

    def __init__(self, heads: Sequence[tuple[int, int]], modes: Tensor, new_id: Callable[[], str]) -> None:
        self._rows: Final = {head: row for row, head in enumerate(heads)}
        self._device_modes = modes
        self._new_id = new_id
        self.host: npt.NDArray[np.int32] = np.zeros(len(heads), dtype=np.int32)
        """The same modes on the host, whose only writer is this class."""
        self.on_change: Callable[[npt.NDArray[np.int32]], None] | None = None
        """Is told `host` whenever it may have changed."""
        self.refuses: Callable[[int, int], str | None] | None = None
        """Why the head in a row cannot be given a mode; None where it can."""
        self.idle: Callable[[int], str | None] | None = None
        """Why no mode would change what the head in a row computes; None where one would."""
        self._given: set[int] = set()
        """Rows that were switched since this process's start."""
        self._answered: OrderedDict[str, None] = OrderedDict()
        self.held: set[tuple[int, int]] = set()
        """Heads that a command took a mitigation from: until a new warning is raised, no policy gives it back."""

    def modes(self) -> dict[tuple[int, int], int]:
        """The present mode flags of every (layer, head)."""
        return {head: int(self.host[row]) for head, row in self._rows.items()}

    def switch(self, heads: Iterable[tuple[int, int]], mode: str, *, step: int, reason: str) -> wire.Switched:
        """Give `heads` this mode, as a person says.

        Raises ValueError for a mode or head that does not exist here, and for a mode that no kernel serves, or not for
        that head as its attention is called. Of every head those are left out that no mode would change.
        """
        wanted = list(heads)
        check_served(flags := parse_mode(mode))
        unknown = [head for head in wanted if head not in self._rows]
        if unknown:
            raise ValueError(f"(layer, head) {unknown[:5]} is not watched here; report() lists what is")
        takers, left_out = self._takers(wanted, flags)
        return self._done("applied", takers, flags, step=step, reason=reason + left_out)

    def follow(
        self,
        heads: Iterable[tuple[int, int]],
        mode: Mode,
        verdict: wire.Verdict,
        *,
        step: int,
        outcome: wire.Outcome,
        policy: str,
    ) -> list[wire.Switched]:
        """Give `heads` this mode for a verdict, or only say so where `outcome` is "proposed"; what cannot have it
        refuses, with the reason of the first. `policy` stands before the reasons."""
        wanted = list(heads)
        refused = self._idle(wanted, mode) | self._refused(wanted, mode)
        takers = [head for head in wanted if head not in refused]
        told: dict[str, Any] = {"step": step, "verdict": verdict.id}
        done = []
        if takers:
            done.append(self._done(outcome, takers, mode, reason=f"{policy}: {verdict.sentence}", **told))
        if refused:
            why = next(iter(refused.values()))
            done.append(self._done("refused", list(refused), None, reason=f"{policy}: {why}", **told))
        return done

    def _done(
        self,
        outcome: wire.Outcome,
        heads: list[tuple[int, int]],
        mode: Mode | None,
        *,
        step: int,
        reason: str,
        command: str | None = None,
        verdict: str | None = None,
    ) -> wire.Switched:
        """Only "applied" changes anything; mode None: the heads keep what they have."""
        rows = [self._rows[head] for head in heads]
        before = tuple(mode_name(int(self.host[row])) for row in rows)
        if outcome == "applied" and mode is not None:
            self.host[rows] = int(mode)
            self._given.update(rows)
            self._write()
        return wire.Switched(
            id=self._new_id(),
            step=step,
            command=command,
            verdict=verdict,
            outcome=outcome,
            heads=tuple(heads),
            before=before,
            after=before if mode is None else (mode_name(mode),) * len(rows),
            reason=reason[:500],
        )

    def _refused(self, heads: Iterable[tuple[int, int]], mode: int) -> dict[tuple[int, int], str]:
        """The heads that cannot be given `mode`, each with a sentence."""
        refuses = self.refuses
        return {} if refuses is None else _sentences({head: refuses(self._rows[head], mode) for head in heads})

    def _idle(self, heads: Iterable[tuple[int, int]], mode: int) -> dict[tuple[int, int], str]:
        """The heads that no mode would change, each with a sentence."""
        idle = self.idle
        return {} if idle is None or not mode else _sentences({head: idle(self._rows[head]) for head in heads})

    def _takers(self, heads: list[tuple[int, int]], mode: int) -> tuple[list[tuple[int, int]], str]:
        """The heads that an order switches, and what is said of others. An order for every head leaves those out that
        no mode would change; else, and where none is left, they refuse it. Raises ValueError."""
        idle = self._idle(heads, mode)
        left_out = ""
        if set(heads) == self._rows.keys() and 0 < len(idle) < len(self._rows):
            heads = [head for head in heads if head not in idle]
            left_out = f" ({len(idle)} heads are left out: {next(iter(idle.values()))})"
            idle = {}
        if refused := idle | self._refused(heads, mode):
            raise ValueError(next(iter(refused.values())))
        return heads, left_out

    def obey(self, command: wire.Command, *, step: int, unix_seconds: float) -> wire.Switched | None:
        """Carry out a command at the step boundary after `step`. None when this id was answered before."""
        if command.id in self._answered:
            return None
        self._answered[command.id] = None
        while len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)
        heads = list(self._rows) if command.heads is None else list(command.heads)
        # ranks hold different heads; a command for a layer speaks to those who have it
        mine = [head for head in heads if head in self._rows]
        judged = self._judge(command, mine, step, unix_seconds)
        switched = self._done(
            judged.outcome, judged.heads, judged.mode, step=step, reason=judged.reason, command=command.id
        )
        if switched.outcome == "applied":
            for head, before in zip(switched.heads, switched.before, strict=True):
                taken = parse_mode(before) & ~parse_mode(command.mode)
                (self.held.add if taken else self.held.discard)(head)
        return switched

    def _judge(self, command: wire.Command, mine: list[tuple[int, int]], step: int, unix_seconds: float) -> _Judged:
        def no(outcome: wire.Outcome, why: str) -> _Judged:
            return _Judged(outcome, mine, None, why)

        if command.action != "switch":
            return no("refused", f"this agent does not know the order {command.action!r}; it is older than the service")
        if command.expires_step is not None and step >= command.expires_step:
            return no("expired", f"expired at step {command.expires_step}; this run is at step {step}")
        if command.expires_unix_seconds is not None and unix_seconds >= command.expires_unix_seconds:
            return no("expired", "expired by the clock before it arrived")
        if not mine:
            return no("refused", "none of the named heads is watched by this process")
        try:
            check_served(wanted := parse_mode(command.mode))
            expected = None if command.expect is None else int(parse_mode(command.expect))
            takers, left_out = self._takers(mine, wanted)
        except ValueError as error:
            return no("refused", str(error))
        if expected is not None:
            other = [head for head in mine if self.host[self._rows[head]] != expected]
            if other:
                now = mode_name(int(self.host[self._rows[other[0]]]))
                return no("refused", f"expected {command.expect}, but layer {other[0][0]} head {other[0][1]} has {now}")
        if command.dry_run:
            return _Judged("dry_run", takers, wanted, f"dry run: {command.reason}{left_out}")
        return _Judged("applied", takers, wanted, f"{command.issued_by}: {command.reason}{left_out}")

    def _write(self) -> None:
        source = torch.from_numpy(self.host.copy())
        if self._device_modes.is_cuda:
            source = source.pin_memory()
        self._device_modes.copy_(source, non_blocking=True)
        if self.on_change is not None:
            self.on_change(self.host)

    def state_dict(self) -> dict[str, Any]:
        """Modes by head and the answered command ids, JSON-able."""
        modes = [[layer, head, mode_name(mode)] for (layer, head), mode in self.modes().items() if mode]
        return {"modes": modes, "answered": list(self._answered), "held": [list(head) for head in sorted(self.held)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put modes and answered ids back; heads that are not here, or were switched since, are left out.

        Raises ValueError for a saved mode that does not exist or that no kernel serves.
        """
        for layer, head, name in state["modes"]:
            check_served(mode := parse_mode(name))
            row = self._rows.get((layer, head))
            if row is not None and row not in self._given:
                self.host[row] = int(mode)
        self._answered.update((str(command), None) for command in state["answered"])
        self.held |= {(layer, head) for layer, head in state.get("held", ())} & self._rows.keys()
        self._write()


def _sentences(told: Mapping[tuple[int, int], str | None]) -> dict[tuple[int, int], str]:
    return {
        (layer, head): f"layer {layer} head {head}: {why}" for (layer, head), why in told.items() if why is not None
    }
