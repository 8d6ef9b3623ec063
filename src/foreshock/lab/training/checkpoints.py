"""The checkpoints of one run in a folder: the newest few, and the one before its first warning."""

import os
from pathlib import Path
from typing import Any, Final

import torch

from foreshock.lab.recording.whole_file import whole_file

EVERY_STEPS: Final = 500
KEPT: Final = 3
"""So many of the newest."""


class Checkpoints:
    """Written beside and renamed, so that what a name ends with .pt is whole."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder

    def all(self) -> list[Path]:
        """Those that are there, the oldest first."""
        return sorted(self._folder.glob("step-*.pt"), key=_step)

    def newest(self) -> Path | None:
        """The last one; None where there is none."""
        there = self.all()
        return there[-1] if there else None

    def write(self, checkpoint: dict[str, Any], *, warned_at: int | None) -> Path:
        """Keep one, named by its step; older ones go, but for the last before the step of the first warning."""
        path = self._folder / f"step-{checkpoint['step']:07d}.pt"
        with whole_file(path) as part, part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        there = self.all()
        before = [each for each in there if warned_at is not None and _step(each) < warned_at][-1:]
        for each in there[:-KEPT]:
            if each not in before:
                each.unlink()
        return path


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
