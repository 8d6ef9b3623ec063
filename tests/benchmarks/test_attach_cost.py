"""The benchmark of attaching, small: every way trains, and each is what it says."""

import json
import sys
from pathlib import Path

import pytest
import torch

from foreshock.benchmarks import attach_cost
from foreshock.monitor import attach


def test_attaching_is_timed_and_leaves_the_model_free_again() -> None:
    assert len(attach_cost.attach_seconds(2)) == 2
    assert all(seconds > 0 for seconds in attach_cost.attach_seconds(1))


def test_each_way_is_timed_in_every_block() -> None:
    seconds = attach_cost.step_seconds(blocks=2, steps=2, length=16)
    assert set(seconds) == {"none", "keep", "kernels"}
    assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())


def test_a_model_is_the_same_in_every_way_and_every_layer_of_it_is_watched() -> None:
    one, other = attach_cost.model(2, 32, 2), attach_cost.model(2, 32, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    agent = attach(one, **attach_cost.ALONE)
    agent.close()
    assert sorted(agent.modes()) == [(layer, head) for layer in range(2) for head in range(2)]


def test_a_comparison_of_the_kernels_is_timed() -> None:
    assert all(seconds > 0 for seconds in attach_cost.proof_seconds(2))


def test_the_figures_are_written_with_the_command_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attach_cost, "attach_seconds", lambda repeats: [0.3, 0.1, 0.2])
    monkeypatch.setattr(attach_cost, "proof_seconds", lambda repeats: [2.0, 9.0, 3.0])
    monkeypatch.setattr(attach_cost, "step_seconds", lambda *_: {"none": [2.0, 1.0, 3.0], "keep": [4.0, 3.0, 2.0]})
    file = tmp_path / "cost.json"
    monkeypatch.setattr(sys, "argv", ["attach_cost", "--json", str(file)])
    attach_cost.main()
    figures = json.loads(file.read_text())
    assert figures["command"] == f"python -P -m foreshock.benchmarks.attach_cost --json {file}"
    assert (figures["proof_seconds"], figures["ratio_to_none"]) == ([2.0, 9.0, 3.0], {"none": 1.0, "keep": 1.5})
    assert "first 0.300 s, median 0.200 s" in capsys.readouterr().out
