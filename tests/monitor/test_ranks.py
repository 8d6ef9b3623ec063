"""Distributed trainings (gloo, on the CPU) against a single process and against trainings without an agent."""

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.monitor import ranks, trainer_ranks
from tests.monitor.execution_modes import TrainingResult, train_watched
from tests.monitor.resumed_training import assert_bit_identical
from tests.monitor.torchrun import run_on_ranks

from foreshock.contract.slots import COUNT_SLOTS, Slot, Words, merge_words
from foreshock.server.testing import LiveService

WORLD = 2
PARALLELISMS = ("DDP", "FSDP2", "FSDP2, separate", "FSDP2, Conv1D", "tensor parallel", "pipeline")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank, and last the service's data of the runs."""
    folder = tmp_path_factory.mktemp("ranks")
    with LiveService(folder) as service:
        rank_values = run_on_ranks(ranks.training, WORLD, folder, service.url)
        service_data = {}
        for run in (rank_values[0]["DDP"]["run"], "parts"):
            service_data[run] = httpx.get(f"{service.url}/v1/runs/{run}", timeout=10).json()
            query = {"metric": "head.tied_rows_bf16"}
            service_data[f"{run} ties"] = httpx.get(
                f"{service.url}/v1/runs/{run}/matrix", params=query, timeout=10
            ).json()
    return [*rank_values, service_data]


@pytest.fixture(scope="module")
def one_process() -> dict[str, TrainingResult]:
    """The same models and rows in a single process."""
    every_row = ranks.plain(world=WORLD)
    return {
        "nano": train_watched(ranks.nano(), every_row, **ranks.SETTINGS),
        "grouped": train_watched(ranks.grouped(), every_row, **ranks.SETTINGS),
        "grouped, rows of one": train_watched(ranks.grouped(), ranks.plain(world=1), **ranks.SETTINGS),
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
@pytest.mark.parametrize(
    "parallelism",
    [pytest.param(parallelism, marks=pytest.mark.execution(*MODES[parallelism])) for parallelism in PARALLELISMS],
)
def test_losses_and_weights_are_bit_identical_to_the_operator_without_an_agent(parallelism: str, results: Any) -> None:
    assert [results[rank][parallelism]["same_bits"] for rank in range(WORLD)] == [True] * WORLD
    assert all(torch.isfinite(loss) for rank in range(WORLD) for loss in results[rank][parallelism]["losses"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallelism", "reference"), [("DDP", "nano"), ("FSDP2", "nano"), ("FSDP2, separate", "grouped")]
)
def test_merged_data_parallel_ranks_count_like_one_process(
    parallelism: str, reference: str, results: Any, one_process: dict[str, TrainingResult]
) -> None:
    expected = one_process[reference].words
    for step in range(ranks.STEPS):
        merged = merge_words([results[rank][parallelism]["words"][step] for rank in range(WORLD)])
        np.testing.assert_array_equal(merged[:, Slot.ROWS], expected[step][:, Slot.ROWS])
    # at step 1 weights are bit-identical, so all counters are equal, including ties
    first = merge_words([results[rank][parallelism]["words"][0] for rank in range(WORLD)])
    np.testing.assert_array_equal(counts(first), counts(expected[0]))
    assert first[:, Slot.TIED_ROWS_BF16].sum() > 0
    floats, expected_floats = first.view(np.float64), expected[0].view(np.float64)
    np.testing.assert_allclose(
        floats[:, Slot.SCORE_OFFSET_SUMSQ], expected_floats[:, Slot.SCORE_OFFSET_SUMSQ], rtol=1e-5
    )
    np.testing.assert_allclose(floats[:, Slot.ROW_MAX_ABS], expected_floats[:, Slot.ROW_MAX_ABS], rtol=1e-6)


@pytest.mark.full
def test_tensor_parallel_ranks_use_global_head_numbers(results: Any, one_process: dict[str, TrainingResult]) -> None:
    rank_results = [results[rank]["tensor parallel"] for rank in range(WORLD)]
    assert [rank_result["layers"] for rank_result in rank_results] == [
        [(0, [0, 1], 1), (1, [0, 1], 1)],
        [(0, [2, 3], 1), (1, [2, 3], 1)],
    ]
    expected = one_process["grouped, rows of one"].words
    for layer in range(2):
        joined = np.concatenate([rank_result["words"][0][2 * layer : 2 * layer + 2] for rank_result in rank_results])
        np.testing.assert_array_equal(counts(joined), counts(expected[0][4 * layer : 4 * layer + 4]))
    for step in range(ranks.STEPS):
        assert {int(rows) for rank_result in rank_results for rows in rank_result["words"][step][:, Slot.ROWS]} == {
            2 * 12
        }


@pytest.mark.full
def test_pipeline_stages_use_global_layer_numbers(results: Any) -> None:
    rank_results = [results[rank]["pipeline"] for rank in range(WORLD)]
    assert [rank_result["layers"] for rank_result in rank_results] == [[(0, [0, 1], 2)], [(1, [0, 1], 2)]]
    assert [words[:, Slot.ROWS].tolist() for rank_result in rank_results for words in rank_result["words"]] == [
        [48, 48]
    ] * 2 * ranks.STEPS


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallelism", "reference"),
    [("DDP", "nano"), ("FSDP2, separate", "grouped"), ("tensor parallel", "grouped, rows of one")],
)
def test_norms_of_each_head_come_from_a_rank_that_has_it_completely(
    parallelism: str, reference: str, results: Any, one_process: dict[str, TrainingResult]
) -> None:
    norms = [results[rank][parallelism]["query_norm"] for rank in range(WORLD)]
    if parallelism == "tensor parallel":  # each rank orders its heads by layer
        joined = np.stack(norms).reshape(WORLD, 2, 2).transpose(1, 0, 2).ravel()
    else:
        joined = np.fmax(*norms)
        assert np.isnan(norms[0]).any() == (parallelism != "DDP")
    expected = one_process[reference].norms
    np.testing.assert_allclose(joined, expected, rtol=0.03)


@pytest.mark.full
def test_service_merges_the_ranks_of_a_run(results: Any) -> None:
    service_data = results[WORLD]
    [run] = {results[rank]["DDP"]["run"] for rank in range(WORLD)}
    detail = service_data[run]
    assert detail["status"] == "completed"
    assert detail["last_step"] == ranks.STEPS
    assert detail["world_size"] == WORLD
    assert [layer["heads"] for layer in detail["layers"]] == [[0, 1]] * 2
    losses = [results[rank]["DDP"]["losses"][-1].item() for rank in range(WORLD)]
    assert detail["loss"] == pytest.approx(sum(losses) / WORLD, rel=1e-6)
    last = merge_words([results[rank]["DDP"]["words"][-1] for rank in range(WORLD)])
    share = last[:, Slot.TIED_ROWS_BF16] / last[:, Slot.ROWS]
    assert np.ravel(service_data[f"{run} ties"]["values"]).tolist() == share.tolist()


@pytest.mark.full
def test_service_joins_heads_of_different_ranks(results: Any) -> None:
    service_data = results[WORLD]
    assert [layer["heads"] for layer in service_data["parts"]["layers"]] == [[0, 1, 2, 3]] * 2
    words = [results[rank]["tensor parallel"]["words"][-1] for rank in range(WORLD)]
    shares = np.stack([w[:, Slot.TIED_ROWS_BF16] / w[:, Slot.ROWS] for w in words]).reshape(WORLD, 2, 2)
    assert np.ravel(service_data["parts ties"]["values"]).tolist() == shares.transpose(1, 0, 2).ravel().tolist()


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
def test_resumed_training_is_bit_identical_with_foreshock(
    trainer: str, device: str, world: int, tmp_path: Path
) -> None:
    results = run_on_ranks(trainer_ranks.all_trainings, world, tmp_path, str(tmp_path), device, trainer)
    assert all(training["sharded"] == ("DDP" not in trainer) for rank in results for training in rank.values())
    assert_bit_identical(results, device)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan 0.3: pip install '.[zoo]'")
@pytest.mark.parametrize(("device", "world"), [("cpu", 1), ("cpu", 2), *GPUS])
def test_resumed_torchtitan_training_is_bit_identical_with_foreshock(device: str, world: int, tmp_path: Path) -> None:
    results = run_on_ranks(Path(__file__).with_name("titan_ranks.py"), world, tmp_path, device)
    assert all(training["sharded"] for rank in results for training in rank.values())
    assert_bit_identical(results, device)
