"""What holds with three appended slots; test_appended_slots.py runs these cases, and older tests, under the plugin."""

import gzip
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server import golden_store as old
from tests.server.test_golden_batches import lines

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, SLOTS, Slot, Words, fitted, identity_row, merge_words, slot_values
from foreshock.kernels.flash_attention import flash_attention, new_state
from foreshock.kernels.flash_attention.triton_kernels.counting import merge
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.server.testing import FakeRank

NEW = list(Slot)[-3:]
pytest_plugins = ["tests.server.conftest"]
# The interpreter computes masked lanes too, and warns of what they overflow to.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


@triton.jit
def merge_head(state, partial, heads, blocks, entries, strides):  # type: ignore[no-untyped-def]
    merge(state, partial, None, tl.program_id(0), heads, 0, blocks, entries, strides, False, 4)


def words_of(heads: int, seed: int) -> Words:
    """Random states; every float is a multiple of 1/8, so that sums are exact in any order."""
    random = np.random.default_rng(seed)
    words = random.integers(0, 1000, (heads, SLOT_COUNT))
    for slot, info in SLOTS.items():
        if info.dtype == "float64":
            words.view(np.float64)[:, slot] = random.integers(-(2**20), 2**20, heads) / 8
    return words


def brute(parts: list[Words], head: int, slot: Slot) -> float:
    """One slot merged by what the contract says of it, in plain Python."""
    values = [slot_values(part, slot)[head].item() for part in parts]
    return max(values) if SLOTS[slot].merge == "max" else math.fsum(values)


def test_the_contract_ends_with_the_three_slots() -> None:
    assert [slot.name for slot in NEW] == ["MASS_SUM", "LOOKED_AT_ROWS", "DEPTH_MAX"]
    assert slot_values(identity_row(), NEW[2]) == -np.inf


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=5))
def test_every_slot_is_merged_by_its_own_kind(seeds: list[int]) -> None:
    parts = [words_of(2, seed) for seed in seeds]
    merged = merge_words(parts)
    for slot, head in itertools.product(Slot, range(2)):
        assert slot_values(merged, slot)[head] == brute(parts, head, slot)


def test_rows_of_an_older_version_count_nothing_in_the_new_slots_and_change_nothing_when_merged() -> None:
    mine, theirs = words_of(3, 1), words_of(3, 2)[:, :14]
    merged = merge_words([mine, fitted(theirs)])
    assert (merged[:, 14:] == mine[:, 14:]).all()
    assert (merged[:, :14] == merge_words([mine, fitted(theirs)])[:, :14]).all()
    for slot in list(Slot)[:14]:
        assert slot_values(merged, slot)[1] == brute([mine, fitted(theirs)], 1, slot)


def test_the_golden_batches_are_read_with_the_identity_in_the_new_slots() -> None:
    read = 0
    for line in lines(wire.WIRE_VERSION):
        for sample in (event for event in wire.read_batch(line.encode()).events if isinstance(event, wire.Sample)):
            words = sample.words()
            assert words is not None
            assert sample.states is not None
            assert (words[:, :14] == sample.states.numpy()).all()
            assert (words[:, 14:] == identity_row()[14:]).all()
            read += 1
    assert read > 3


def test_an_old_and_a_new_rank_of_one_run_are_merged_and_an_old_store_goes_on(play: Any, tmp_path: Path) -> None:
    old.store_at(tmp_path / "foreshock.db")
    first = FakeRank(run="golden/ranks", rank=0, boot="b0")
    second = FakeRank(run="golden/ranks", rank=1, boot="b1-again")
    first.sequence = second.sequence = 1000
    mine, theirs = words_of(6, 3), words_of(6, 4)[:, :14]

    async def story(service: Any) -> None:
        was = old.answers()["/v1/runs/golden/ranks/matrix?metric=head.score_offset"]
        offset = "/v1/runs/golden/ranks/matrix"
        assert (await service.get(offset, metric="head.score_offset"))["values"] == was["values"]
        for rank, words in ((first, mine), (second, theirs)):
            sample = rank.sample(1500, 1400).model_copy(update={"states": wire.Array.of(words)})
            await service.store(rank, sample)
        truth = merge_words([mine, fitted(theirs)])
        found = await service.get(offset, metric="head.score_offset")
        expected = slot_values(truth, Slot.SCORE_OFFSET_SUM) / slot_values(truth, Slot.ROWS)
        assert found["step"] == 1500
        assert np.array(found["values"]).reshape(-1).tolist() == expected.tolist()
        await service.get("/v1/runs/golden/ranks/curves", line="head.score_max")

    play(story, verify_steps=0)


def test_the_reference_counts_what_it_counted_and_leaves_the_new_slots_alone() -> None:
    """Against scores of the same rows in float64, formed without the statistics' code."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    state = new_state(3)
    state[:, NEW[1]] = 5
    out = flash_attention(query, key, value, causal=True, state=state, numerics="float64")
    out.sum().backward()  # type: ignore[no-untyped-call]
    words = state.numpy()
    scores = (query @ key.transpose(2, 3) / math.sqrt(8)).detach()
    seen = torch.ones(9, 9).tril().bool()
    lse = scores.masked_fill(~seen, -math.inf).logsumexp(3) - torch.arange(1, 10, dtype=torch.float64).log()
    assert slot_values(words, Slot.ROWS).tolist() == [18.0] * 3
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUM), lse.sum((0, 2)).numpy(), rtol=1e-9)
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUMSQ), lse.square().sum((0, 2)), rtol=1e-9)
    largest = scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_MAX), largest.numpy(), rtol=1e-9)
    assert words[:, NEW].tolist() == [[0, 5, identity_row()[NEW[2]]]] * 3


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_the_kernel_merges_every_slot_by_its_own_kind(sequences: int, heads: int, blocks: int, seed: int) -> None:
    parts = words_of(sequences * heads * blocks, seed).reshape(sequences * heads, blocks, SLOT_COUNT)
    partial = torch.from_numpy(np.ascontiguousarray(parts.transpose(0, 2, 1)))
    before = words_of(heads, seed + 1)
    state = torch.from_numpy(before.copy())
    merge_head[(heads,)](state, partial, heads, blocks, sequences * blocks, state.stride())
    for head, slot in itertools.product(range(heads), Slot):
        own = [parts[s * heads + head, b][None] for s in range(sequences) for b in range(blocks)]
        assert slot_values(state.numpy(), slot)[head] == brute([before[head : head + 1], *own], 0, slot)


def test_the_kernels_leave_the_new_slots_alone() -> None:
    torch.manual_seed(4)
    query, key, value = (torch.randn(1, 2, 40, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    from tests.kernels.triton_calls import Inputs, attend, scaled

    inputs = Inputs(query.detach(), key.detach(), value.detach(), torch.randn(1, 2, 40, 32).bfloat16())
    words = attend(inputs, scaled(32, causal="top_left")).state.numpy()
    assert slot_values(words, Slot.ROWS).tolist() == [40.0] * 2
    assert (words[:, 14:] == identity_row()[14:]).all()


def test_traces_of_either_version_are_read(tmp_path: Path) -> None:
    rank = FakeRank(layers=1)
    path = tmp_path / "new.jsonl.gz"
    words = words_of(3, 9)
    with TraceWriter(path, {"made": "now"}) as writer:
        writer(rank.started())
        writer(rank.sample(5, 0).model_copy(update={"states": wire.Array.of(words)}))
    found = read_trace(path).samples[0].words()
    assert found is not None
    assert (found[:, NEW[1]] == words[:, NEW[1]]).all()
    np.testing.assert_array_equal(slot_values(found, NEW[0]), slot_values(words, NEW[0]))
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    assert lines[2].pop("states")
    rows = words[:, Slot.ROWS].tolist()
    lines[2]["slots"] = {"rows": rows, "of_a_version_to_come": [1, 2, 3]}  # as recorders wrote a sample before
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    read = read_trace(path).samples[0].words()
    assert read is not None
    assert (read[:, NEW] == identity_row()[NEW]).all()
    assert (read[:, Slot.ROWS] == words[:, Slot.ROWS]).all()
