"""Several processes share out the batches of one run."""

import pytest
import torch
from tests.lab.ranks_of_a_run import of_a_rank
from tests.monitor.torchrun import trained

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.training.ranks import Ranks


@pytest.mark.parametrize(("world", "batch", "most"), [(1, 8, None), (2, 8, 4), (4, 8, 1), (8, 8, 32), (3, 12, 3)])
def test_every_row_of_a_batch_is_taken_once_in_parts_that_are_small_enough(
    world: int, batch: int, most: int | None
) -> None:
    shares = [Ranks(rank, world).rows(batch, most) for rank in range(world)]
    assert [row for rows, _ in shares for row in range(batch)[rows]] == list(range(batch))
    [at_once] = {at_once for _, at_once in shares}
    assert (batch // world) % at_once == 0
    assert at_once <= (most or batch)


def test_a_batch_that_cannot_be_shared_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="512 sequences cannot be shared by 3 processes; start a number of processes"):
        Ranks(0, 3).rows(512)


@pytest.mark.full
def test_two_processes_train_record_and_end_as_one_with_two_parts_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A sum of two has one order, and halves are exact."""
    folders = {world: tmp_path_factory.mktemp(f"ranks{world}") for world in (1, 2)}
    [alone], several = (trained(of_a_rank, world, folder, str(folder)) for world, folder in folders.items())
    for seen in several:
        assert seen["whole"]["losses"] == alone["whole"]["losses"]
        assert all(torch.equal(one, alone["whole"]["weights"][name]) for name, one in seen["whole"]["weights"].items())
    assert alone["whole"]["rows"] == sum(seen["whole"]["rows"] for seen in several) > 0
    name = "key-bias-small-flash-untreated-seed1"
    assert [seen["whole"]["place"] for seen in several] == [(0, 2, name), (1, 2, name)]
    assert [seen["told"] for seen in several] == [["told by 0", "told by 1"], []]
    trace = read_trace(folders[2] / "trace.jsonl.gz")
    assert trace.steps.loss.tolist() == pytest.approx(alone["whole"]["losses"], rel=1e-2)  # kept to three digits
    assert trace.samples[-1].step == len(trace.steps.loss)
    assert [len(seen["ended"]["losses"]) for seen in several] == [12, 12], "one of them wanted to end at 10"
    assert several[0]["ended"]["losses"] == alone["ended"]["losses"][:12]
