"""The benchmark of a training step, at a size for CPUs."""

from typing import Any

import pytest
import torch

from foreshock.benchmarks import agent_step
from foreshock.benchmarks.agent_step import SHAPES, Bench, Shape, UnwatchedAttention, main, measure
from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.monitor import Agent, attach

_SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "context": 16, "vocabulary": 61}
TINY = Shape(
    "tiny", ModelConfig(**_SIZES, qkv_bias=False, rotary=True, norm="rms", gated=True), 2, whole=False, device="cpu"
)


@pytest.mark.parametrize(("shape", "parameters"), [(SHAPES[0], 124.5e6), (SHAPES[1], 1.236e9)])
def test_benchmark_model_has_the_parameter_count_of_its_namesake(shape: Shape, parameters: float) -> None:
    with torch.device("meta"):
        model = GPT(shape.model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_every_variant_is_measured_and_the_fastest_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_settings: list[str] = []

    def attach_and_record(model: torch.nn.Module, **settings: Any) -> Agent:
        agent = attach(model, **settings)
        attention_settings.append(agent.config.attention)
        return agent

    monkeypatch.setattr(agent_step, "attach", attach_and_record)
    figures = measure(TINY, 2, "eager")
    assert attention_settings == ["kernels", "keep"]
    torch._dynamo.reset()
    assert figures["best_backend"] in ("flash", "math")
    assert figures["none"] == figures["backends"][figures["best_backend"]]
    assert all(figures[variant] > 0 for variant in ("none", "kernels_agent", "keep_agent"))
    ratio_names = {f"{variant} / none" for variant in ("kernels_agent", "keep_agent")}
    assert set(figures["ratios"]) == ratio_names
    assert all(len(blocks) == 2 for blocks in figures["blocks"].values())


def test_unsupported_backend_is_excluded_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(TINY, "eager")
    bench.variant("none_cudnn", UnwatchedAttention, "cudnn")
    torch._dynamo.reset()
    assert not bench.variants
    assert "none_cudnn does not take tiny" in capsys.readouterr().err


def test_unknown_variant_or_shape_is_rejected_with_the_allowed_names() -> None:
    with pytest.raises(ValueError, match="variant 'none' does not exist; allowed are kernels_agent, keep_agent"):
        main(variants=["keep_agent", "none"])
    with pytest.raises(ValueError, match="shape 'gpt3' does not exist; allowed are gpt2-small, llama-1b, gpt2-mini"):
        main(only="gpt3")
