"""A fake training that answers orders."""

import threading
from typing import Self

import numpy as np

from foreshock.contract.modes import parse_mode
from foreshock.contract.wire import Array, Command, Event, HeadRef, Outcome, Switched, head_refs
from foreshock.server.testing import FakeRank, LiveService


class AnsweringAgent:
    """A training in a thread: inside its `with` block, a rank takes steps and answers every order that it receives.

    Its samples report the modes of the applied orders. With outcome None, it receives orders without an answer.
    """

    def __init__(
        self, live: LiveService, rank: FakeRank, outcome: Outcome | None = "applied", token: str | None = None
    ) -> None:
        self._live, self._rank, self._outcome, self._token = live, rank, outcome, token
        self._modes: dict[HeadRef, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self._live.post(self._rank.batch(*self.first(), self._rank.sample(1)), self._token)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _train(self) -> None:
        step = 1
        try:
            while not self._stopped.wait(0.1):
                step += 1
                modes = [parse_mode(self._modes.get(head, "plain")) for head in head_refs(self._rank.layers)]
                events = self.events(step, Array.of(np.array(modes, dtype=np.int32)))
                for command in self._live.post(self._rank.batch(*events), self._token).commands:
                    if self._outcome is not None:
                        answer = self._answer(command, step, self._outcome)
                        self._live.post(self._rank.batch(answer), self._token)
        except Exception as error:  # raised again by __exit__
            self._failure = error

    def first(self) -> list[Event]:
        """The events before the first sample."""
        return [self._rank.started()]

    def events(self, step: int, modes: Array) -> list[Event]:
        """The events of a step."""
        return [self._rank.sample(step).model_copy(update={"modes": modes})]

    def _answer(self, command: Command, step: int, outcome: Outcome) -> Switched:
        answer = self._rank.answer(command, step, outcome)
        before = tuple(self._modes.get(head, "plain") for head in answer.heads)
        after = answer.after if outcome == "applied" else before
        self._modes.update(zip(answer.heads, after, strict=True))
        return answer.model_copy(update={"before": before, "after": after})
