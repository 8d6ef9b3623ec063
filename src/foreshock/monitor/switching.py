"""Switches of modes: collects requests, and is the only writer of the mode flags in device memory.

Requests come from verdicts under the user's policy, from people by `Agent.set_mode`, and from the service as commands,
of which a few are carried out at each step boundary. A switch of heads with native attention waits until foreshock's
kernels have computed them in a step; it then counts as applied from that step on. If the kernels' results differ or the
kernels do not support the calls, the switch is refused.

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
"""Number of answered command ids that are stored, so that repeated deliveries have no effect."""


AT_ONCE: Final = 4
"""Commands per step boundary: a switch of many heads takes milliseconds, which may be as long as a step."""
MAX_WAITING: Final = 1024
"""Limit of waiting commands. More are ignored, because the service repeats a command until it is answered."""


class _Order(NamedTuple):
    """A requested switch. `mode` is None if it cannot be carried out."""

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
        """Applied modes on the host; only this class writes them."""
        self.on_change: Callable[[npt.NDArray[np.int32]], None] = lambda modes: None
        """Called with the requested modes [N] whenever they may have changed."""
        self.why_refused: Callable[[int, int], str | None] = lambda row, mode: None
        """Returns why the head of a row cannot have a mode, or None."""
        self.runs_on_kernels: Callable[[int], bool] = lambda row: True
        """Whether foreshock's kernels compute the head of a row, and read its mode."""
        self.actions: dict[str, Callable[[wire.Command, int], None]] = {}
        """Functions that carry out other commands than switches after a step, by action (contract.orders.KINDS). They
        raise ValueError if they cannot."""
        self.tell: Callable[[Sequence[wire.Switched]], None] = lambda done: None
        """Called with the outcomes of switches and commands."""
        self._orders: list[_Order] = []
        self._late: list[wire.Switched] = []
        """Answers to orders that another order replaced while they waited."""
        self._given: set[int] = set()
        """Rows that were switched since this process's start."""
        self._arrived: dict[str, wire.Command] = {}
        """Commands that wait for a step boundary, by id."""
        self._answered: OrderedDict[str, None] = OrderedDict()
        self.held: set[wire.HeadRef] = set()
        """Heads from which a command removed a mitigation: no policy switches them again before a new warning."""

    def modes(self) -> dict[wire.HeadRef, int]:
        """Return the applied mode flags of every (layer, head)."""
        return {head: int(self.host[row]) for head, row in self._rows.items()}

    def named(self) -> dict[wire.HeadRef, str]:
        """Return the mode names of all heads that are not plain."""
        return {head: mode_name(mode) for head, mode in self.modes().items() if mode}

    def wanted(self) -> dict[wire.HeadRef, int]:
        """Return `modes` as they will be after all waiting orders."""
        return self.modes() | {head: int(order.mode or 0) for order in self._orders for head in order.heads}

    def switch(self, heads: Iterable[wire.HeadRef], mode: str, *, step: int, reason: str) -> wire.Switched | None:
        """Switch `heads` at a person's request; None if the switch waits for the kernels to compute them.

        Raises ValueError for an empty `heads`, for a mode or head that does not exist here, and for a mode that a
        head's attention calls do not allow; a switch of all heads skips such heads instead.
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
        """Make or propose the switches that verdicts call for, or report which heads refuse them.

        A verdict calls for a switch according to contract.decision (a mitigation only changes rounding), or if a layer
        with wrong attention is to move to foreshock's kernels. The switch applies to the head of the warning, to its
        layer, or to all heads, but not to heads that already have the mode. A new warning ends a person's hold on its
        head.
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
        """Switch `heads` for a verdict, or only propose it, as the policy says. Heads that cannot have the mode are
        reported as refused, with the reason of the first."""
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
        """Apply `order`, or let it wait; it replaces waiting orders of the same heads."""
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
        """Answer waiting orders after the training from `since_step` to `step`.

        An order is applied at `since_step` if foreshock's kernels computed its heads, refused if they cannot, or
        expired. Other orders continue to wait.
        """
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
        """Return the event with an order's outcome. Only "applied" changes modes."""
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
        """Return the heads that cannot have `mode`, each with a sentence."""
        whys = ((head, self.why_refused(self._rows[head], mode)) for head in heads)
        return {head: f"layer {head[0]} head {head[1]}: {why}" for head, why in whys if why is not None}

    def _takers(self, heads: Sequence[wire.HeadRef], mode: int) -> tuple[list[wire.HeadRef], str]:
        """Return the heads that an order switches, and a note about skipped heads.

        An order for all heads skips those that cannot have the mode. Raises ValueError if an order for some heads
        contains such a head, or if none of all heads can have the mode.
        """
        refused = self._refused(heads, mode)
        if refused and (set(heads) != self._rows.keys() or len(refused) == len(self._rows)):
            raise ValueError(next(iter(refused.values())))
        return [head for head in heads if head not in refused], _left_out(refused)

    def obey_some(self, arrived: Iterable[wire.Command], step: int) -> None:
        """Carry out the oldest commands; the others wait for the next step boundaries."""
        for command in self.due(arrived):
            done = self.obey(command, step=step, unix_seconds=time.time())
            self.tell([] if done is None else [done])

    def due(self, arrived: Iterable[wire.Command]) -> list[wire.Command]:
        """Return the commands to carry out now, in order of arrival, each once."""
        for command in arrived:
            if len(self._arrived) < MAX_WAITING and command.id not in self._answered:
                self._arrived.setdefault(command.id, command)
        return [self._arrived.pop(name) for name in list(islice(self._arrived, AT_ONCE))]

    def obey(self, command: wire.Command, *, step: int, unix_seconds: float) -> wire.Switched | None:
        """Carry out a command at the step boundary after `step`. None if its id is known already, or if it waits."""
        if command.id in self._answered:
            return None
        self._answered[command.id] = None
        while len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)
        # ranks have different heads; a command for a layer concerns the ranks with that layer
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
        """Return a command's switch. Raises ValueError if heads cannot have it or do not have the expected mode."""
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
        """Return the requested modes by head, answered command ids and held heads, as JSON types."""
        modes = [[layer, head, mode_name(mode)] for (layer, head), mode in self.wanted().items() if mode]
        waiting = {order.command.id for order in self._orders if order.command is not None}
        answered = [command for command in self._answered if command not in waiting]
        return {"modes": modes, "answered": answered, "held": [list(head) for head in sorted(self.held)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore modes, answered ids and holds; heads that do not exist here, or were switched since, are skipped.

        Raises ValueError for a saved mode that does not exist; then nothing is restored.
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
