"""The trained demo: what it trains, and all of it once on a tiny model, with its runs on a real service."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.lab.looking import Looking

from foreshock.lab import demo
from foreshock.lab.demo import ON_CPU, ON_GPU, Show
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.detectors import DetectorConfig

TINY = replace(
    find_recipe("key-bias-small"),
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    steps=200,
    warmup_steps=10,
)


@pytest.mark.full
@pytest.mark.parametrize("show", [ON_CPU, ON_GPU], ids=lambda show: show.recipe.name)
def test_every_training_of_the_demo_has_the_shipped_detectors_and_the_shipped_cure(show: Show) -> None:
    for variant in show.variants:
        with Training(TINY, variant, 5).agent as agent:
            assert agent.config.detectors == DetectorConfig()
    untreated, rescued, _ = show.variants
    assert (untreated.policy, rescued.policy) == ("observe", "auto")
    assert rescued.mitigation == AgentConfig.model_fields["mitigation"].default == "row_corrected"


def test_the_demo_of_a_cpu_says_which_numerics_are_not_those_of_a_gpu() -> None:
    assert {variant.numerics for variant in ON_CPU.variants} == {"paper"}
    assert "as on no GPU" in ON_CPU.says
    assert ON_CPU.variants[-1].model == {"key_bias": False}
    assert [variant.numerics for variant in ON_GPU.variants] == ["kernel", "kernel", "float32"]


@pytest.mark.full
def test_the_whole_demo_trains_all_three_on_one_page(capfd: pytest.CaptureFixture[str]) -> None:
    said = Looking("All three have ended")
    demo.main(Console(file=said, width=200), seed=6, port=0, show=replace(ON_CPU, recipe=TINY))
    stamps = {run.split("-", 2)[1] for run in said.seen}
    assert [run.split("-", 2)[2] for run in said.seen] == ["baseline", "rescued", "no-key-bias"]
    assert len(stamps) == 1
    for seen in said.seen.values():
        assert (seen["last_step"], seen["status"]) == (TINY.steps, "completed")
    assert "from seed 6" in said.getvalue()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.full
def test_a_demo_whose_time_runs_out_ends_and_one_whose_training_fails_says_which(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = Looking("All three have ended")
    demo.main(Console(file=said, width=200), port=0, show=replace(ON_CPU, recipe=TINY), seconds=0.0)
    assert {seen["last_step"] for seen in said.seen.values()} == {1}
    broken = replace(ON_CPU, recipe=replace(TINY, bias_rate=2.0, bias_decay=0.0))
    with pytest.raises(ChildProcessError, match=r"demo-\d+-baseline, demo-\d+-rescued, demo-\d+-no-key-bias failed"):
        demo.main(Console(file=io.StringIO()), port=0, show=broken)
    assert "give one of them" in capfd.readouterr().err
