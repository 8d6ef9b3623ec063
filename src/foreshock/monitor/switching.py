"""Switches of modes: who asks for them, and the one writer of the mode flags in device memory.

Verdicts ask under the user's policy, people by `Agent.set_mode`, and the service by orders, of which each step boundary
carries out a few. A switch of heads whose attention the model keeps waits until a step has run in which our kernels
computed it: what ran shows, not what was asked. Then it has been applied from that step on; where they differ or
cannot, it is refused.

A command from the service is delivered at least once and answered exactly once. Its values are checked again here,
against this process's own heads, modes, clock and step.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.decision import ACTS, because_of, calls_for_switch
from foreshock.contract.modes import Mode, mode_name, parse_mode
from foreshock.contract.orders import switches
from foreshock.monitor.config import AgentConfig

MAX_ANSWERED: Final = 4096
"""Command ids remembered, so that a repeated delivery changes nothing."""


AT_ONCE: Final = 4
"""Orders carried out at one boundary: a switch of many heads takes milliseconds, and a step may take as many."""
MAX_WAITING: Final = 1024
"""Those beyond are left out: the service sends an order again until it is answered."""


class _Order(NamedTuple):
    """A switch that somebody asks for. `mode` None: nothing that can be carried out."""

    heads: tuple[wire.HeadRef, ...]
    mode: Mode | None
    reason: str
    command: wire.Command | None = None
    verdict: str | None = None


class Switchboard:
    """The modes of this process's heads: `modes` is int32 [N] in device memory, `heads` names its rows."""

    def __init__(self, heads: Sequence[wire.HeadRef], modes: Tensor, new_id: Callable[[], str]) -> None:
        self._rows: Final = {head: row for row, head in enumerate(heads)}
        self._device_modes = modes
        self._new_id = new_id
        self.host: npt.NDArray[np.int32] = np.zeros(len(heads), dtype=np.int32)
        """The modes that have been applied, on the host, whose only writer is this class."""
        self.on_change: Callable[[npt.NDArray[np.int32]], None] = lambda modes: None
        """Is called with the modes that are wanted [N], whenever they may have changed."""
        self.why_refused: Callable[[int, int], str | None] = lambda row, mode: None
        """Why the head in a row cannot be given a mode; None where it can."""
        self.runs_on_kernels: Callable[[int], bool] = lambda row: True
        """Whether our kernels compute the head in a row, and read its mode."""
        self.actions: dict[str, Callable[[wire.Command, int], None]] = {}
        """What carries out orders of another kind than a switch, by their action (contract.orders.KINDS), after a step.
        It raises ValueError where it cannot."""
        self.tell: Callable[[Sequence[wire.Switched]], None] = lambda done: None
        """Is called with what became of switches and orders."""
        self._orders: list[_Order] = []
        self._late: list[wire.Switched] = []
        """Answers to orders that others replaced while they waited."""
        self._given: set[int] = set()
        """Rows that were switched since this process's start."""
        self._arrived: dict[str, wire.Command] = {}
        """Orders that no boundary has begun with, by their ids."""
        self._answered: OrderedDict[str, None] = OrderedDict()
        self.held: set[wire.HeadRef] = set()
        """Heads that a command took a mitigation from: until a new warning is raised, no policy gives it back."""

    def modes(self) -> dict[wire.HeadRef, int]:
        """The present mode flags of every (layer, head)."""
        return {head: int(self.host[row]) for head, row in self._rows.items()}

    def named(self) -> dict[wire.HeadRef, str]:
        """The names of those that are not plain."""
        return {head: mode_name(mode) for head, mode in self.modes().items() if mode}

    def wanted(self) -> dict[wire.HeadRef, int]:
        """The same with the orders that wait."""
        return self.modes() | {head: int(order.mode or 0) for order in self._orders for head in order.heads}

    def switch(self, heads: Iterable[wire.HeadRef], mode: str, *, step: int, reason: str) -> wire.Switched | None:
        """Give `heads` this mode, as a person asked; None while that waits for the kernels to compute them.

        Raises ValueError for no heads, for a mode or head that does not exist here, and for a mode that a head cannot
        have as its attention is called. Of every head those are left out that no mode would change.
        """
        if not (wanted := list(heads)):
            raise ValueError("no heads were given; give (layer, head) pairs, such as the keys of modes()")
        flags = parse_mode(mode)
        unknown = [head for head in wanted if head not in self._rows]
        if unknown:
            raise ValueError(f"(layer, head) {unknown[:5]} is not monitored here; report() lists the monitored heads")
        takers, left_out = self._takers(wanted, flags)
        return self._carry_out(_Order(tuple(takers), flags, reason + left_out), step)

    def act(self, verdicts: Sequence[wire.Verdict], config: AgentConfig, step: int) -> None:
        """Make or propose the switches that verdicts call for, or say which heads refuse them. A new warning ends every
        hold that a person has put on its head.

        Only what contract.decision says calls for one (a mitigation changes rounding alone), and what moves a layer
        with wrong attention to our kernels; only on heads that do not have it yet: the one that was warned about, those
        of its layer, or all.
        """
        self.held -= {(v.layer, v.head) for v in verdicts if v.state == "raised"}
        modes = {head: mode for head, mode in self.wanted().items() if head not in self.held}
        moves = config.policy == "auto" and config.replace_wrong_attention
        done: list[wire.Switched] = []
        for verdict in verdicts:
            wrong = moves and verdict.cause == "attention kernel" and verdict.state == "raised"
            if verdict.layer is None or verdict.head is None or not (wrong or calls_for_switch(verdict)):
                continue
            scope = "layer" if wrong else config.switch_scope
            for mode, heads in switches([(verdict.layer, verdict.head)], modes, config.mitigation, scope).items():
                modes.update(dict.fromkeys(heads, int(mode)))
                done += self._follow(heads, mode, verdict, step=step, policy=config.policy)
        self.tell(done)

    def _follow(
        self, heads: Sequence[wire.HeadRef], mode: Mode, verdict: wire.Verdict, *, step: int, policy: wire.Policy
    ) -> list[wire.Switched]:
        """Give `heads` this mode for a verdict, or only propose it, as the policy says; what cannot have it refuses,
        with the reason of the first."""
        refused = self._refused(heads, mode)
        takers = tuple(head for head in heads if head not in refused)
        words = f"policy {policy}"
        order = _Order(takers, mode, because_of(verdict, words), verdict=verdict.id)
        done = []
        if takers and ACTS[policy] == "propose":
            done.append(self._answer(order, "proposed", step))
        elif takers and (now := self._carry_out(order, step)) is not None:
            done.append(now)
        if refused:
            why = f"{words}: {next(iter(refused.values()))}"
            done.append(self._answer(order._replace(heads=tuple(refused), reason=why), "refused", step))
        return done

    def _carry_out(self, order: _Order, step: int) -> wire.Switched | None:
        """Apply `order`, or let it wait, in the place of what its heads waited for before."""
        for other in [other for other in self._orders if not set(other.heads).isdisjoint(order.heads)]:
            left = tuple(head for head in other.heads if head not in order.heads)
            self._orders.remove(other)
            if left:
                self._orders.append(other._replace(heads=left))
            elif other.command is not None:
                replaced = other._replace(reason="another order took its place")
                self._late.append(self._answer(replaced, "refused", step))
        self._given.update(self._rows[head] for head in order.heads)
        if order.mode and not all(self.runs_on_kernels(self._rows[head]) for head in order.heads):
            self._orders.append(order)
            self._write()
            return None
        return self._answer(order, "applied", step)

    def settle(self, since_step: int, step: int, unix_seconds: float) -> list[wire.Switched]:
        """What the training from `since_step` to `step` shows of the orders that waited: applied at `since_step` where
        our kernels computed their heads, refused where they could not, expired. What it shows nothing of waits on."""
        answers, self._late = self._late, []
        for order in list(self._orders):
            refused = self._refused(order.heads, order.mode or 0)
            able = [head for head in order.heads if head not in refused]
            takers = tuple(head for head in able if self.runs_on_kernels(self._rows[head]))
            waiting = tuple(head for head in able if head not in takers)
            expired = None if order.command is None else _expired(order.command, step, unix_seconds)
            if takers:
                taken = order._replace(heads=takers, reason=order.reason + _left_out(refused))
                answers.append(self._answer(taken, "applied", since_step))
            elif not waiting:
                answers.append(self._answer(order._replace(reason=next(iter(refused.values()))), "refused", step))
            elif expired is not None:
                answers.append(self._answer(order._replace(reason=expired), "expired", step))
            else:
                continue
            self._orders.remove(order)
            if takers and waiting:
                self._orders.append(order._replace(heads=waiting, command=None))
        if answers:
            self._write()
        self.tell(answers)
        return answers

    def _answer(self, order: _Order, outcome: wire.Outcome, step: int) -> wire.Switched:
        """What became of an order. Only "applied" changes anything; what is refused or expired keeps what it has."""
        rows = [self._rows[head] for head in order.heads]
        before = tuple(mode_name(int(self.host[row])) for row in rows)
        mode = None if outcome in ("refused", "expired") else order.mode
        if outcome == "applied" and mode is not None:
            if order.command is not None:
                for head, row in zip(order.heads, rows, strict=True):
                    (self.held.add if self.host[row] & ~int(mode) else self.held.discard)(head)
            self.host[rows] = int(mode)
            self._write()
        return wire.Switched(
            id=self._new_id(),
            step=step,
            command=None if order.command is None else order.command.id,
            verdict=order.verdict,
            outcome=outcome,
            heads=order.heads,
            before=before,
            after=before if mode is None else (mode_name(mode),) * len(rows),
            reason=order.reason[:500],
        )

    def _refused(self, heads: Iterable[wire.HeadRef], mode: int) -> dict[wire.HeadRef, str]:
        """The heads that cannot be given `mode`, each with a sentence."""
        whys = ((head, self.why_refused(self._rows[head], mode)) for head in heads)
        return {head: f"layer {head[0]} head {head[1]}: {why}" for head, why in whys if why is not None}

    def _takers(self, heads: Sequence[wire.HeadRef], mode: int) -> tuple[list[wire.HeadRef], str]:
        """The heads that an order switches, and the answer's words about others. An order for every head leaves those
        out that cannot have the mode; else, and where none is left, they refuse it. Raises ValueError."""
        refused = self._refused(heads, mode)
        if refused and (set(heads) != self._rows.keys() or len(refused) == len(self._rows)):
            raise ValueError(next(iter(refused.values())))
        return [head for head in heads if head not in refused], _left_out(refused)

    def obey_some(self, arrived: Iterable[wire.Command], step: int) -> None:
        """Carry out the oldest orders; the rest waits for the boundaries that follow."""
        for command in self.due(arrived):
            done = self.obey(command, step=step, unix_seconds=time.time())
            self.tell([] if done is None else [done])

    def due(self, arrived: Iterable[wire.Command]) -> list[wire.Command]:
        """What to carry out now, in the order of arrival, each once."""
        for command in arrived:
            if len(self._arrived) < MAX_WAITING and command.id not in self._answered:
                self._arrived.setdefault(command.id, command)
        return [self._arrived.pop(name) for name in list(islice(self._arrived, AT_ONCE))]

    def obey(self, command: wire.Command, *, step: int, unix_seconds: float) -> wire.Switched | None:
        """Carry out a command at the step boundary after `step`. None when this id came before, and while it waits."""
        if command.id in self._answered:
            return None
        self._answered[command.id] = None
        while len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)
        # ranks hold different heads; a command for a layer is for those who have it
        heads = self._rows if command.heads is None else [head for head in command.heads if head in self._rows]
        asked = f"{'dry run' if command.dry_run else command.issued_by}: {command.reason}"
        order = _Order(tuple(heads) if command.action == "switch" else (), None, asked, command)
        outcome: wire.Outcome = "refused"
        try:
            if command.action not in {"switch", *self.actions}:
                raise ValueError(f"this agent does not carry out {command.action!r} orders")
            if (why := _expired(command, step, unix_seconds)) is not None:
                outcome = "expired"
                raise ValueError(why)
            if not heads:
                raise ValueError("none of the named heads is watched by this process")
            if command.action == "switch":
                order = self._switch_of(order, command)
            elif not command.dry_run:
                self.actions[command.action](command, step)
        except ValueError as error:
            return self._answer(order._replace(reason=str(error)), outcome, step)
        return self._answer(order, "dry_run", step) if command.dry_run else self._carry_out(order, step)

    def _switch_of(self, order: _Order, command: wire.Command) -> _Order:
        """The switch that a command orders. Raises ValueError if its heads cannot have it or are not as expected."""
        wanted = parse_mode(command.mode)
        expected = None if command.expect is None else parse_mode(command.expect)
        takers, left_out = self._takers(order.heads, wanted)
        for layer, head in order.heads:
            has = Mode(self.host[self._rows[layer, head]])
            if expected not in (None, has):
                raise ValueError(f"expected {command.expect}, but layer {layer} head {head} has {mode_name(has)}")
        return order._replace(heads=tuple(takers), mode=wanted, reason=order.reason + left_out)

    def _write(self) -> None:
        wanted = np.fromiter(self.wanted().values(), dtype=np.int32, count=len(self.host))
        source = torch.from_numpy(wanted)
        if self._device_modes.is_cuda:
            source = source.pin_memory()
        self._device_modes.copy_(source, non_blocking=True)
        self.on_change(wanted)

    def state_dict(self) -> dict[str, Any]:
        """Modes by head, with those that are waited for, and the ids of the commands that were answered, JSON-able."""
        modes = [[layer, head, mode_name(mode)] for (layer, head), mode in self.wanted().items() if mode]
        waiting = {order.command.id for order in self._orders if order.command is not None}
        answered = [command for command in self._answered if command not in waiting]
        return {"modes": modes, "answered": answered, "held": [list(head) for head in sorted(self.held)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put modes and answered ids back; heads that are not here, or were switched since, are left out.

        Raises ValueError for a saved mode that does not exist; then nothing is put back.
        """
        modes = {(int(layer), int(head)): parse_mode(name) for layer, head, name in state["modes"]}
        answered = {str(command): None for command in state["answered"]}
        held = {(int(layer), int(head)) for layer, head in state.get("held", ())}
        saved: dict[Mode, list[wire.HeadRef]] = {}
        for head, mode in modes.items():
            row = self._rows.get(head)
            if row is not None and row not in self._given:
                saved.setdefault(mode, []).append(head)
        given = set(self._given)
        for mode, heads in saved.items():
            self._carry_out(_Order(tuple(heads), mode, "resumed from a checkpoint"), 0)
        self._given = given
        self._answered.update(answered)
        self.held |= held & self._rows.keys()


def _expired(command: wire.Command, step: int, unix_seconds: float) -> str | None:
    if command.expires_step is not None and step >= command.expires_step:
        return f"expired at step {command.expires_step}; this run is at step {step}"
    if command.expires_unix_seconds is not None and unix_seconds >= command.expires_unix_seconds:
        return "expired by the clock before it was carried out"
    return None


def _left_out(refused: Mapping[wire.HeadRef, str]) -> str:
    return f" ({len(refused)} heads are left out: {next(iter(refused.values()))})" if refused else ""
