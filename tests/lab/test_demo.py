"""The trained demo, on a tiny model and with a real service."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from tests.lab.page_console import PageConsole
from torch import Tensor

from foreshock.lab import demo
from foreshock.lab.demo import SHOWN
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training

TINY = replace(
    find_recipe("key-bias-small"),
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    steps=60,
    warmup_steps=10,
)


@pytest.mark.full
def test_demo_trains_three_runs_and_shows_them_on_one_page(capfd: pytest.CaptureFixture[str]) -> None:
    console = PageConsole("All three have ended")
    demo.main(Console(file=console, width=200), seed=6, port=0, recipe=TINY)
    stamps = {run.split("-", 2)[1] for run in console.seen}
    assert [run.split("-", 2)[2] for run in console.seen] == ["baseline", "rescued", "no-key-bias"]
    assert len(stamps) == 1
    for seen in console.seen.values():
        assert (seen["last_step"], seen["status"]) == (TINY.steps, "completed")
    assert "from seed 6" in console.getvalue()
    assert "Traceback" not in capfd.readouterr().err


def test_training_stops_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    steps: list[int] = []

    def record_step(training: Training, advance: Callable[[Training], Tensor] = Training.advance) -> Tensor:
        steps.append(training.step)
        return advance(training)

    monkeypatch.setattr(Training, "advance", record_step)
    demo._train(replace(TINY, steps=10**9), SHOWN["baseline"], 6, "ends", "http://127.0.0.1:9", seconds=0.0)
    assert steps == [0, 1]


@pytest.mark.full
def test_demo_names_the_training_that_failed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SHOWN", {"rescued": SHOWN["rescued"]})  # each process imports PyTorch
    with pytest.raises(ChildProcessError, match=r"^demo-\d+-rescued failed"):
        demo.main(Console(file=io.StringIO()), port=0, recipe=replace(TINY, batch=0))
    assert "ValueError" in capfd.readouterr().err
