"""A training that answers orders."""

import threading
from typing import Self

import numpy as np

from foreshock.contract.modes import parse_mode
from foreshock.contract.wire import Array, Command, HeadRef, Outcome, Switched, head_refs
from foreshock.server.testing import FakeRank, LiveService


class AnsweringAgent:
    """A training in a thread: while its `with` lasts, a rank takes steps and answers every order that comes back.

    The modes that it tells are those that the orders before left. With outcome None it takes orders and says nothing.
    """

    def __init__(self, live: LiveService, rank: FakeRank, outcome: Outcome | None = "applied") -> None:
        self._live, self._rank, self._outcome = live, rank, outcome
        self._modes: dict[HeadRef, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self._live.post(self._rank.batch(self._rank.started(), self._rank.sample(1)))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _train(self) -> None:
        step = 1
        try:
            while not self._over.wait(0.1):
                step += 1
                modes = [parse_mode(self._modes.get(head, "plain")) for head in head_refs(self._rank.layers)]
                changed = {"modes": Array.of(np.array(modes, dtype=np.int32))}
                sample = self._rank.sample(step).model_copy(update=changed)
                for command in self._live.post(self._rank.batch(sample)).commands:
                    if self._outcome is not None:
                        self._live.post(self._rank.batch(self._answer(command, step, self._outcome)))
        except Exception as error:  # raised where the thread is waited for
            self._failure = error

    def _answer(self, command: Command, step: int, outcome: Outcome) -> Switched:
        answer = self._rank.answer(command, step, outcome)
        before = tuple(self._modes.get(head, "plain") for head in answer.heads)
        after = answer.after if outcome == "applied" else before
        self._modes.update(zip(answer.heads, after, strict=True))
        return answer.model_copy(update={"before": before, "after": after})
