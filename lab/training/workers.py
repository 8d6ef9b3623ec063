"""Arms of one recipe in worker processes, one thread each; what they report comes back over a queue."""

import logging
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Any, SupportsFloat

from pydantic import TypeAdapter

from foreshock.contract import wire
from foreshock.lab.training.arm import Arm, variant
from foreshock.lab.training.recipes import Recipe

_EVENT: TypeAdapter[wire.Event] = TypeAdapter(wire.Event)
_STEPS_OF_A_MESSAGE = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOrder:
    """What one worker trains. `url` None: nothing is sent."""

    recipe: Recipe
    arm: Arm
    seed: int
    run: str
    steps: int
    url: str | None
    branch_from: Path | None = None
    """a checkpoint to go on from"""
    leave_branch: Path | None = None
    """where the checkpoint before the first warning goes"""
    deadline: float
    """on the monotonic clock; the worker stops there, wherever it is"""
    agent_settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progressed:
    """An arm reached a step."""

    arm: str
    step: int


@dataclass(frozen=True, slots=True)
class Told:
    """An arm's agent emitted an event."""

    arm: str
    event: wire.Event


@dataclass(frozen=True, slots=True)
class Branched:
    """An arm was warned about and left its checkpoint of `step`, before the warning."""

    arm: str
    step: int


Message = Progressed | Told | Branched


class Workers:
    """Runs orders side by side and yields what they say until all are done."""

    def __init__(self) -> None:
        self._context = get_context("spawn")  # a forked torch may hang on its thread pool
        self._queue: Any = self._context.Queue()
        self._running: dict[str, BaseProcess] = {}

    def start(self, order: ArmOrder) -> None:
        """Start one order. Its messages come out of `messages`."""
        process = self._context.Process(target=_work, args=(order, self._queue), daemon=True)
        process.start()
        self._running[order.arm.name] = process

    def messages(self) -> Iterator[Message]:
        """Until every started order is done. Raises RuntimeError when a worker fails."""
        while self._running:
            try:
                kind, arm, body = self._queue.get(timeout=1.0)
            except Empty:
                for arm, process in self._running.items():
                    if process.exitcode is not None:
                        raise RuntimeError(
                            f"the worker of the variant {variant(arm)} died with exit status {process.exitcode}"
                        ) from None
                continue
            if kind == "step":
                yield Progressed(arm, body)
            elif kind == "event":
                yield Told(arm, _EVENT.validate_json(body))
            elif kind == "branch":
                yield Branched(arm, body)
            elif kind == "failed":
                raise RuntimeError(f"the variant {variant(arm)} failed:\n{body}")
            else:
                self._running.pop(arm).join()

    def stop(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            process.terminate()
            process.join()
        self._running.clear()
        self._queue.close()


def _work(order: ArmOrder, queue: Any) -> None:
    name = order.arm.name
    # Who started this worker tells of every warning; the agent's own log would say it a second time.
    logging.getLogger("foreshock").addHandler(logging.NullHandler())
    try:
        _train(order, queue)
    except KeyboardInterrupt:
        pass
    except Exception:
        queue.put(("failed", name, traceback.format_exc()))
    else:
        queue.put(("done", name, None))


def _train(order: ArmOrder, queue: Any) -> None:
    import torch

    from foreshock.lab.training.run import Training, train

    torch.set_num_threads(1)
    name = order.arm.name
    training = Training(order.recipe, order.arm, order.seed, run=order.run, url=order.url, **order.agent_settings)
    if order.branch_from is not None:
        training.restore(torch.load(order.branch_from, weights_only=True))

    def stepped(step: int, loss: SupportsFloat) -> None:
        if step % _STEPS_OF_A_MESSAGE == 0 or step == order.steps:
            queue.put(("step", name, step))

    def warned(verdict: wire.Verdict, before: dict[str, Any]) -> None:
        assert order.leave_branch is not None
        torch.save(before, order.leave_branch)
        queue.put(("branch", name, before["step"]))

    train(
        training,
        order.steps,
        sinks=(lambda event: queue.put(("event", name, event.model_dump_json())),),
        on_step=stepped,
        on_warning=warned if order.leave_branch is not None else None,
        deadline=order.deadline,
    )


def in_seconds(seconds: float) -> float:
    """A deadline for `ArmOrder`, so many seconds from now."""
    return time.monotonic() + seconds
