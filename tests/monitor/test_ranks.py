"""Several processes for real (gloo, on the CPU): each way to spread a model, against one process and no agent."""

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.monitor import ranks, trainer_ranks
from tests.monitor.executions import Trained, watched
from tests.monitor.resumed_courses import assert_foreshock_changed_no_bit
from tests.monitor.torchrun import trained

from foreshock.contract.slots import COUNT_SLOTS, Slot, Words, merge_words
from foreshock.server.testing import LiveService

WORLD = 2
WAYS = ("DDP", "FSDP2", "FSDP2, separate", "FSDP2, Conv1D", "tensor parallel", "pipeline")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank tells of every way, and under "service" what the service made of the runs sent to it."""
    folder = tmp_path_factory.mktemp("ranks")
    with LiveService(folder) as service:
        results = trained(ranks.training, WORLD, folder, service.url)
        seen = {}
        for run in (results[0]["DDP"]["run"], "parts"):
            seen[run] = httpx.get(f"{service.url}/v1/runs/{run}", timeout=10).json()
            query = {"metric": "head.tied_rows_bf16"}
            seen[f"{run} ties"] = httpx.get(f"{service.url}/v1/runs/{run}/matrix", params=query, timeout=10).json()
    return [*results, seen]


@pytest.fixture(scope="module")
def one_process() -> dict[str, Trained]:
    """The same models and rows in a single process."""
    every_row = ranks.plain(world=WORLD)
    return {
        "nano": watched(ranks.nano(), every_row, **ranks.QUIET),
        "grouped": watched(ranks.grouped(), every_row, **ranks.QUIET),
        "grouped, rows of one": watched(ranks.grouped(), ranks.plain(world=1), **ranks.QUIET),
    }


def counts(words: Words) -> np.ndarray[Any, np.dtype[np.int64]]:
    return words[:, list(COUNT_SLOTS)]


MODES = {
    "DDP": ("nanoGPT", "DDP"),
    "FSDP2": ("nanoGPT", "FSDP2"),
    "FSDP2, separate": ("plain attention", "FSDP2"),
    "FSDP2, Conv1D": ("nanoGPT", "FSDP2"),
    "tensor parallel": ("plain attention", "tensor parallel"),
    "pipeline": ("nanoGPT", "pipeline"),
}


@pytest.mark.full
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.execution(*MODES[way])) for way in WAYS])
def test_loss_and_weights_are_those_of_the_operator_alone_to_the_last_bit(way: str, told: Any) -> None:
    assert [told[rank][way]["same_bits"] for rank in range(WORLD)] == [True] * WORLD
    assert all(torch.isfinite(loss) for rank in range(WORLD) for loss in told[rank][way]["losses"])


@pytest.mark.full
@pytest.mark.parametrize(("way", "single"), [("DDP", "nano"), ("FSDP2", "nano"), ("FSDP2, separate", "grouped")])
def test_ranks_that_share_the_rows_add_up_to_one_process(
    way: str, single: str, told: Any, one_process: dict[str, Trained]
) -> None:
    expected = one_process[single].words
    for step in range(ranks.STEPS):
        merged = merge_words([told[rank][way]["words"][step] for rank in range(WORLD)])
        np.testing.assert_array_equal(merged[:, Slot.ROWS], expected[step][:, Slot.ROWS])
    # at step 1 the weights are the same to the last bit, and so is every count, ties included
    first = merge_words([told[rank][way]["words"][0] for rank in range(WORLD)])
    np.testing.assert_array_equal(counts(first), counts(expected[0]))
    assert first[:, Slot.TIED_ROWS_BF16].sum() > 0
    floats, wanted = first.view(np.float64), expected[0].view(np.float64)
    np.testing.assert_allclose(floats[:, Slot.SCORE_OFFSET_SUMSQ], wanted[:, Slot.SCORE_OFFSET_SUMSQ], rtol=1e-5)
    np.testing.assert_allclose(floats[:, Slot.ROW_MAX_ABS], wanted[:, Slot.ROW_MAX_ABS], rtol=1e-6)


@pytest.mark.full
def test_ranks_that_share_the_heads_hold_them_under_their_global_numbers(
    told: Any, one_process: dict[str, Trained]
) -> None:
    parts = [told[rank]["tensor parallel"] for rank in range(WORLD)]
    assert [part["layers"] for part in parts] == [
        [(0, [0, 1], 1), (1, [0, 1], 1)],
        [(0, [2, 3], 1), (1, [2, 3], 1)],
    ]
    expected = one_process["grouped, rows of one"].words
    for layer in range(2):
        together = np.concatenate([part["words"][0][2 * layer : 2 * layer + 2] for part in parts])
        np.testing.assert_array_equal(counts(together), counts(expected[0][4 * layer : 4 * layer + 4]))
    for step in range(ranks.STEPS):
        assert {int(rows) for part in parts for rows in part["words"][step][:, Slot.ROWS]} == {2 * 12}


@pytest.mark.full
def test_stages_of_a_pipeline_hold_their_layers_under_their_global_numbers(told: Any) -> None:
    parts = [told[rank]["pipeline"] for rank in range(WORLD)]
    assert [part["layers"] for part in parts] == [[(0, [0, 1], 2)], [(1, [0, 1], 2)]]
    assert [words[:, Slot.ROWS].tolist() for part in parts for words in part["words"]] == [[48, 48]] * 2 * ranks.STEPS


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "single"), [("DDP", "nano"), ("FSDP2, separate", "grouped"), ("tensor parallel", "grouped, rows of one")]
)
def test_every_head_is_measured_by_a_rank_that_holds_it_whole(
    way: str, single: str, told: Any, one_process: dict[str, Trained]
) -> None:
    norms = [told[rank][way]["query_norm"] for rank in range(WORLD)]
    if way == "tensor parallel":  # each rank's heads stand by layer
        together = np.stack(norms).reshape(WORLD, 2, 2).transpose(1, 0, 2).ravel()
    else:
        together = np.fmax(*norms)
        assert np.isnan(norms[0]).any() == (way != "DDP")
    expected = one_process[single].norms
    np.testing.assert_allclose(together, expected, rtol=0.03)


@pytest.mark.full
def test_the_ranks_of_one_run_are_one_run_for_the_service(told: Any) -> None:
    seen = told[WORLD]
    [run] = {told[rank]["DDP"]["run"] for rank in range(WORLD)}
    detail = seen[run]
    assert detail["status"] == "completed"
    assert detail["last_step"] == ranks.STEPS
    assert detail["world_size"] == WORLD
    assert [layer["heads"] for layer in detail["layers"]] == [[0, 1]] * 2
    losses = [told[rank]["DDP"]["losses"][-1].item() for rank in range(WORLD)]
    assert detail["loss"] == pytest.approx(sum(losses) / WORLD, rel=1e-6)
    last = merge_words([told[rank]["DDP"]["words"][-1] for rank in range(WORLD)])
    share = last[:, Slot.TIED_ROWS_BF16] / last[:, Slot.ROWS]
    assert np.ravel(seen[f"{run} ties"]["values"]).tolist() == share.tolist()


@pytest.mark.full
def test_the_service_joins_heads_that_lie_in_different_ranks(told: Any) -> None:
    seen = told[WORLD]
    assert [layer["heads"] for layer in seen["parts"]["layers"]] == [[0, 1, 2, 3]] * 2
    words = [told[rank]["tensor parallel"]["words"][-1] for rank in range(WORLD)]
    shares = np.stack([w[:, Slot.TIED_ROWS_BF16] / w[:, Slot.ROWS] for w in words]).reshape(WORLD, 2, 2)
    assert np.ravel(seen["parts ties"]["values"]).tolist() == shares.transpose(1, 0, 2).ravel().tolist()


GPUS = [("cuda", world) for world in range(1, 1 + min(2, torch.cuda.device_count()))]


@pytest.mark.full
@pytest.mark.parametrize(
    ("trainer", "device", "world"),
    [
        ("Trainer", "cpu", 2),
        ("Accelerate", "cpu", 2),
        *((trainer, *gpus) for trainer in ("Trainer", "Accelerate", "Accelerate with DDP") for gpus in GPUS),
    ],
)
def test_a_training_that_stops_and_resumes_is_the_same_with_foreshock_to_the_last_bit(
    trainer: str, device: str, world: int, tmp_path: Path
) -> None:
    told = trained(trainer_ranks.courses, world, tmp_path, str(tmp_path), device, trainer)
    assert all(course["sharded"] == ("DDP" not in trainer) for rank in told for course in rank.values())
    assert_foreshock_changed_no_bit(told, device)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan 0.3: pip install '.[zoo]'")
@pytest.mark.parametrize(("device", "world"), [("cpu", 1), ("cpu", 2), *GPUS])
def test_a_training_by_torchtitan_that_stops_and_resumes_is_the_same_with_foreshock_to_the_last_bit(
    device: str, world: int, tmp_path: Path
) -> None:
    told = trained(Path(__file__).with_name("titan_ranks.py"), world, tmp_path, device)
    assert all(course["sharded"] for rank in told for course in rank.values())
    assert_foreshock_changed_no_bit(told, device)
