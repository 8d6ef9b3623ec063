"""Several ranks share the batches of one run."""

import pytest
import torch
from tests.lab.multi_rank_training import train_on_rank
from tests.monitor.torchrun import run_on_ranks

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.training.ranks import Ranks


@pytest.mark.parametrize(("world", "batch", "most"), [(1, 8, None), (2, 8, 4), (4, 8, 1), (8, 8, 32), (3, 12, 3)])
def test_ranks_take_every_row_of_a_batch_once_in_parts_of_limited_size(
    world: int, batch: int, most: int | None
) -> None:
    shares = [Ranks(rank, world).rows(batch, most) for rank in range(world)]
    assert [row for rows, _ in shares for row in range(batch)[rows]] == list(range(batch))
    [at_once] = {at_once for _, at_once in shares}
    assert (batch // world) % at_once == 0
    assert at_once <= (most or batch)


def test_batch_that_does_not_divide_by_the_ranks_is_rejected() -> None:
    with pytest.raises(ValueError, match="512 sequences cannot be shared by 3 processes; start a number of processes"):
        Ranks(0, 3).rows(512)


@pytest.mark.full
def test_two_ranks_train_record_and_stop_bit_for_bit_as_one_process(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A sum of two numbers does not depend on their order, and halving is exact."""
    folders = {world: tmp_path_factory.mktemp(f"ranks{world}") for world in (1, 2)}
    [single], several = (run_on_ranks(train_on_rank, world, folder, str(folder)) for world, folder in folders.items())
    for result in several:
        assert result["whole"]["losses"] == single["whole"]["losses"]
        assert all(
            torch.equal(one, single["whole"]["weights"][name]) for name, one in result["whole"]["weights"].items()
        )
    assert single["whole"]["rows"] == sum(result["whole"]["rows"] for result in several) > 0
    name = "key-bias-small-flash-untreated-seed1"
    assert [result["whole"]["place"] for result in several] == [(0, 2, name), (1, 2, name)]
    assert [result["gathered"] for result in several] == [["from rank 0", "from rank 1"], []]
    trace = read_trace(folders[2] / "trace.jsonl.gz")
    assert trace.steps.loss.tolist() == pytest.approx(single["whole"]["losses"], rel=1e-2)  # recorded to three digits
    assert trace.samples[-1].step == len(trace.steps.loss)
    assert [len(result["ended"]["losses"]) for result in several] == [12, 12], "one rank asked to stop at step 10"
    assert several[0]["ended"]["losses"] == single["ended"]["losses"][:12]
