"""The checkpoints of a run: whole ones, the newest few, and the one before the first warning."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.lab.training.long_run import KEPT, Checkpoints


def steps(folder: Path) -> list[int]:
    return [int(torch.load(path, weights_only=True)["step"]) for path in Checkpoints(folder).all()]


def test_the_newest_few_stay(tmp_path: Path) -> None:
    for step in range(500, 4001, 500):
        Checkpoints(tmp_path).write({"step": step}, warned_at=None)
    assert steps(tmp_path) == [2500 + 500 * number for number in range(1, KEPT + 1)]
    assert Checkpoints(tmp_path).newest() == tmp_path / "step-0004000.pt"


@pytest.mark.parametrize("warned_at", [1200, 1500])
def test_the_last_one_before_the_first_warning_stays_however_long_the_run_goes_on(
    tmp_path: Path, warned_at: int
) -> None:
    for step in range(500, 4001, 500):
        Checkpoints(tmp_path).write({"step": step}, warned_at=warned_at if step >= warned_at else None)
    assert steps(tmp_path) == [1000, 3000, 3500, 4000]


class Torn:
    """What a process dies of while it writes it."""

    def __reduce__(self) -> Any:
        raise MemoryError


def test_one_that_is_torn_takes_no_whole_ones_place(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    whole = checkpoints.write({"step": 500, "weights": torch.ones(1000)}, warned_at=None)
    for step in (500, 1000):
        with pytest.raises(MemoryError):
            checkpoints.write({"step": step, "weights": torch.zeros(1000), "torn": Torn()}, warned_at=None)
    assert checkpoints.newest() == whole
    assert torch.load(whole, weights_only=True)["weights"].sum() == 1000
    assert len(list(tmp_path.iterdir())) > 1, "nothing was torn"
    checkpoints.write({"step": 1000}, warned_at=None)
    assert steps(tmp_path) == [500, 1000]


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").newest() is None
