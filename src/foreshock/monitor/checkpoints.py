"""At a warning, request a checkpoint from the trainer, once per incident, and protect the last clean checkpoint."""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

from foreshock.contract import wire
from foreshock.contract.causes import CAUSES, IncidentCause
from foreshock.contract.decision import cause_of, is_active
from foreshock.contract.resume import SECOND_NAME
from foreshock.monitor.guard import logger
from foreshock.monitor.sampling import passes

LOOK_EVERY: Final = 8
"""In a run of several processes, each looks for a proposal once in this many steps."""
AHEAD: Final = 3 * LOOK_EVERY
"""A save is proposed this many steps ahead, so that every process looks at least twice before it."""
ROUNDS: Final = 3
"""Limit of proposals for one incident, if some process does not read a proposal in time."""


class SaveRequests:
    """Requests a checkpoint once per cause, and again only after every warning of that cause was cleared.

    A nonfinite loss or gradient does not request one, because the checkpoint would contain the damage.
    """

    def __init__(self, asks: bool, rounds: "Rounds | None" = None) -> None:
        """rounds: needed if several processes have to save at the same step."""
        self._asks = asks
        self._rounds = rounds
        self._asked: set[IncidentCause] = set()
        self._saved_by_others: set[IncidentCause] = set()
        """Causes of another process's requests; this process does not know when their warnings are cleared."""
        self._wanted: IncidentCause | None = None

    def follow(self, raised: Sequence[wire.Verdict], active: Sequence[wire.Verdict]) -> None:
        """Process a sample's verdicts, `raised`, and the warnings that are active after it."""
        fresh = {cause_of(one) for one in raised if one.state == "raised" and one.severity != "info"} - {"not finite"}
        if self._asks and (new := fresh - self._asked - self._saved_by_others):
            self._wanted = next(cause for cause in CAUSES if cause in new)
        self._asked = (self._asked | fresh) & {cause_of(one) for one in (*active, *raised) if is_active(one)}

    def take(self, step: int) -> bool:
        """Whether to write a checkpoint after this step; True once per request."""
        if not self._asks:
            return False
        if self._rounds is None:
            wanted, self._wanted = self._wanted is not None, None
            return wanted
        agreed = self._rounds.agreed(step, self._wanted)
        if agreed is None:
            return False
        if agreed != self._wanted and agreed in CAUSES:
            self._saved_by_others.add(agreed)
        self._wanted = None
        return True


class Rounds:
    """Lets the processes of a run agree on a step after which all of them save, without waiting for each other.

    One process proposes a later step in the store through which torch.distributed connected the processes. Each process
    that reads the proposal before that step confirms it there. The first process that reaches the step decides for all
    in one atomic write: they save if every process has confirmed by then. So either all save or none, even if the
    processes are at different steps.
    """

    def __init__(self, name: str, store: Callable[[], tuple[Any, int] | None]) -> None:
        """name: the same in every process. store: returns the store and the number of processes, or None."""
        self._name = name
        self._find_store = store
        self._store: Any = None
        self._world = 0
        self._round = self._looked = self._failed = 0
        self._at: int | None = None
        self._cause: IncidentCause | None = None
        self._off = False

    def agreed(self, step: int, wanted: IncidentCause | None) -> IncidentCause | None:
        """Return the cause if all processes save after this step, else None. wanted: this process's request."""
        looked, self._looked = self._looked, step
        if self._off or (self._at is None and not passes(looked, step, LOOK_EVERY)):
            return None
        try:
            return self._agreed(step, wanted if self._failed < ROUNDS else None)
        except Exception as error:  # the host of the store is gone
            self._off = True
            logger.warning("foreshock: the processes cannot agree on a step to save at; no more checkpoints are "
                           "requested; training continues: %s", str(error)[:300])  # fmt: skip
            return None

    def _agreed(self, step: int, wanted: IncidentCause | None) -> IncidentCause | None:
        if self._store is None:
            found = self._find_store()
            if found is None:
                return None
            self._store, self._world = found
        while self._at is None:
            key = f"{self._name}/{self._round}"
            if wanted is None and not self._store.check([key]):
                return None
            proposal = self._store.compare_set(key, "", f"{step + AHEAD} {wanted}").decode()
            at, _, cause = proposal.partition(" ")
            if step >= int(at):  # read too late to take part
                self._round += 1
                continue
            self._store.add(f"{key}/seen", 1)
            self._at, self._cause = int(at), cause
        if step < self._at:
            return None
        key, self._at = f"{self._name}/{self._round}", None
        self._round += 1
        everybody = self._store.add(f"{key}/seen", 0) == self._world
        if self._store.compare_set(f"{key}/decided", "", "save" if everybody else "no") != b"save":
            self._failed += wanted is not None
            return None
        self._failed = 0
        return self._cause


def store_of_processes() -> tuple[Any, int] | None:
    """Return a new connection to the store of the default process group, and the number of its processes.

    A connection of its own does not have to wait while another thread waits on the store. None without a group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    store = getattr(store, "clone", lambda: store)()
    store.set_timeout(timedelta(seconds=2))
    return store, torch.distributed.get_world_size()


class KnownCheckpoints:
    """Checkpoints that were reported to this process.

    At a warning, the last checkpoint from before it gets a second name by hard links, without a copy, so that the
    trainer does not delete it.
    """

    def __init__(self) -> None:
        self._known: list[wire.Checkpoint] = []
        self._warned = False

    def add(self, checkpoint: wire.Checkpoint) -> None:
        """Record a written checkpoint."""
        self._known = [one for one in self._known if one.step < checkpoint.step] + [checkpoint]

    def follow(self, raised: Sequence[wire.Verdict], active: Sequence[wire.Verdict]) -> wire.Checkpoint | None:
        """Protect the last clean checkpoint if this sample opened a warning; return it with its second name."""
        warned, self._warned = self._warned, any(map(is_active, (*active, *raised)))
        if warned or not self._warned:
            return None
        steps = [one.evidence.get("suspect_step", one.step) for one in (*raised, *active) if is_active(one)]
        before = min(filter(math.isfinite, steps), default=0)
        last = next((one for one in reversed(self._known) if one.step < before), None)
        path = None if last is None else second_name(last)
        return None if last is None or path is None else last.model_copy(update={"path": str(path)})


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether this is the URL of a remote store, by the same test as in PyTorch's distributed checkpoints."""
    return "://" in str(path)


def second_name(checkpoint: wire.Checkpoint) -> Path | None:
    """Link a checkpoint under a name that its trainer does not treat as a checkpoint.

    None for a custom training loop, and if the disk does not support hard links, which is logged.
    """
    path = Path(checkpoint.path)
    if checkpoint.trainer == "own" or path.name.startswith(SECOND_NAME):
        return None
    # Accelerate counts every entry of this folder, and torchtitan every name with step-N
    folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    name = str(checkpoint.step) if checkpoint.trainer == "torchtitan" else path.name
    target = folder / f"{SECOND_NAME}{name}"
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        if is_remote(checkpoint.path):
            raise OSError("a remote store does not support links")
        if target.exists():
            return target
        if path.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(path, unfinished, copy_function=os.link)
            unfinished.rename(target)
        else:
            os.link(path, target)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        logger.warning(
            "foreshock: exclude %s from the rule that deletes old checkpoints: it is the last one from before the "
            "warning, and could not be linked: %s",
            *(checkpoint.path, error),
        )
        return None
    logger.warning(
        "foreshock: linked the last checkpoint from before the warning as %s, so that it is not deleted", target
    )
    return target
