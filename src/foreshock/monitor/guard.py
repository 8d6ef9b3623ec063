"""Contain the agent's own errors, so that its bugs do not reach the training loop (promise A15), and disable the loop's
torch modes, such as autocast, while the agent computes."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

import torch

logger: Final = logging.getLogger("foreshock")

FAULTS_IN_A_ROW: Final = 3
LOG_EVERY_SECONDS: Final = 20.0


def say(text: str) -> None:
    """Print to standard error, on separate lines even while tqdm draws a bar there."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        print(text, file=sys.stderr)
    else:
        bars.write(text, file=sys.stderr)


P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Contains the errors of one component: `guard.run(work, ...)`, or `with guard: ...`. They are counted and logged.

    KeyboardInterrupt and SystemExit always propagate. After three errors in a row the component is off (`guard.on`).
    With `strict`, all errors propagate.
    """

    def __init__(
        self, site: str, counts: Counter[str], *, strict: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.site: Final = site
        self.on = True
        self._counts = counts
        self._strict = strict
        self._clock = clock
        self._in_a_row = 0
        self._last_log = -LOG_EVERY_SECONDS

    def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return the result of `work`; None if its error was contained or the component is off."""
        if self.on:
            with self:
                return work(*args, **kwargs)
        return None

    def finish(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `work` even if the component is off, for example to detach from the model."""
        with self:
            work(*args, **kwargs)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._in_a_row = 0
            return False
        if not isinstance(error, Exception):
            return False
        self._counts[self.site] += 1
        self._in_a_row += 1
        if self._in_a_row >= FAULTS_IN_A_ROW:
            self.on = False
        if self._strict:
            return False
        now = self._clock()
        if now - self._last_log >= LOG_EVERY_SECONDS or not self.on:
            self._last_log = now
            after = "" if self.on else f"; {self.site} is off from now on"
            logger.warning(
                "foreshock: an error in %s was contained; training continues: %s: %s%s",
                self.site,
                type(error).__name__,
                str(error)[:300],
                after,
            )
        return True


@contextmanager
def default_torch_modes(device: torch.device) -> Iterator[None]:
    """Disable gradients, inference mode and autocast, on the CPU and on `device`, for the code inside.

    A whole training loop may run under autocast, which would compute norms of weights in 16 bits. A tensor that is
    created in inference mode cannot be written to outside of it.
    """
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for kind in {"cpu", device.type}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield
