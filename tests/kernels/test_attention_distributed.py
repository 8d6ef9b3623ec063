"""Two processes, each with half of the rows, compute and count what one process does: under DDP and FSDP2.

By NCCL where there are two GPUs, else by gloo on the CPU.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.kernels import two_ranks
from torch import Tensor

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SUM_SLOTS, merge_words, slot_values

Found = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("two_ranks")
    processes = [
        subprocess.Popen([sys.executable, "-P", two_ranks.__file__, str(rank), str(folder)], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    device = torch.device("cuda" if torch.cuda.device_count() >= 2 else "cpu")
    layer = two_ranks.Attention(device)
    return two_ranks.step(layer, layer, two_ranks.rows(device))


@pytest.mark.promise("K10")
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_loss_and_gradients_of_two_ranks_are_those_of_one_process(
    ranks: list[Found], alone: dict[str, Tensor], way: str
) -> None:
    losses = torch.stack([found[way]["loss"] for found in ranks])
    torch.testing.assert_close(losses.mean(), alone["loss"], rtol=1e-5, atol=0)
    for name in ("into.weight", "into.bias", "out.weight", "out.bias"):
        assert torch.equal(ranks[0][way][name], ranks[1][way][name]), name
        scale = float(alone[name].abs().max())
        torch.testing.assert_close(ranks[0][way][name], alone[name], rtol=0, atol=1e-2 * scale, msg=name)


@pytest.mark.promise("K10")
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_statistics_of_two_ranks_merge_to_those_of_one_process(
    ranks: list[Found], alone: dict[str, Tensor], way: str
) -> None:
    merged = merge_words([found[way]["state"].numpy() for found in ranks])
    expected = alone["state"].numpy()
    for slot in COUNT_SLOTS:
        np.testing.assert_array_equal(slot_values(merged, slot), slot_values(expected, slot), slot.name)
    for slot in MAX_SLOTS:
        np.testing.assert_allclose(slot_values(merged, slot), slot_values(expected, slot), rtol=1e-3)
    assert all(np.isfinite(slot_values(merged, slot)).all() for slot in SUM_SLOTS)
