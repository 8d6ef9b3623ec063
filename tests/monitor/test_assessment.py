"""`assess` reports which failures a model is open to, and the commonest mistakes of a sample batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.lab.diagnosed_models import adapted, attention_with_weights, eager, left_padded, qwen
from tests.monitor import tiny_models
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, batch, tiny_gpt
from tests.monitor.transformers_models import DECODER, LATENT, TRANSFORMERS, tiny
from tests.monitor.unusual_attention import ManualAttentionWithHeads
from torch import nn

import foreshock
from foreshock.monitor.assessment import Assessment, assess


def with_frozen_bias() -> nn.Module:
    model = tiny_gpt()
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            module.c_attn.bias.requires_grad_(False)
    return model


GROUPED = DECODER | {"num_key_value_heads": 1}
PYTHIA = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WHISPER: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, bool, bool]]] = {
    "nanoGPT with biases": (tiny_gpt, ("trained", False, False)),
    "frozen bias": (with_frozen_bias, ("frozen", False, False)),
    "grouped heads without biases": (lambda: tiny_gpt(GroupedQueryAttention(16, 2, 1)), ("none", False, False)),
    "GPT-2": (TRANSFORMERS["GPT-2"], ("trained", False, False)),
    "Pythia": (lambda: tiny("GPTNeoX", "Model", **PYTHIA), ("trained", True, False)),
    "Qwen2": (lambda: tiny("Qwen2", **GROUPED), ("trained", True, False)),
    "Llama": (TRANSFORMERS["Llama"], ("none", True, False)),
    "Qwen3": (lambda: tiny("Qwen3", **GROUPED), ("none", True, True)),
    "Whisper, keys without a bias": (lambda: tiny("Whisper", "Model", **WHISPER), ("none", False, False)),
    "PyTorch": (lambda: nn.MultiheadAttention(16, 2), ("trained", False, False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_key_bias_rotary_positions_and_qk_norm_are_detected(name: str) -> None:
    make, expected = MODELS[name]
    assessment = assess(make())
    assert (assessment.key_bias, assessment.rotary, assessment.qk_norm) == expected


@pytest.mark.parametrize("attention_bias", [False, True])
def test_latent_keys_have_a_bias_only_if_their_up_projection_has_one(
    attention_bias: bool,
) -> None:
    sizes = DECODER | LATENT | {"head_dim": LATENT["qk_rope_head_dim"], "attention_bias": attention_bias}
    model: Any = tiny("DeepseekV3", **sizes)
    assessment = assess(model)
    assert (assessment.watched, assessment.key_bias, assessment.rotary) == (2, "none", True)
    assert "GPT-2 small without biases failed in this way" in str(assessment)
    for block in model.model.layers:
        made = block.self_attn.kv_b_proj
        made.bias = nn.Parameter(torch.zeros(made.out_features))
    assert assess(model).key_bias == "trained"
    for block in model.model.layers:
        block.self_attn.keys_in_another_way = block.self_attn.kv_b_proj
        del block.self_attn.kv_b_proj
    assert "not known, because the projection of the keys was not found" in str(assess(model))


def sentences(assessment: Assessment) -> list[str]:
    return [line.partition(":")[0] for line in assessment.lines]


def test_report_has_at_most_ten_lines_and_a_remedy_for_each_failure() -> None:
    assessment = foreshock.assess(tiny_gpt(), torch.optim.AdamW(tiny_gpt().parameters(), lr=1e-3))
    assert assessment.open_to_rounding
    assert len(assessment.lines) <= 10
    drift, growth = (["Drift by rounding", "  First remedy"], ["Scores that grow", "  First remedy"])
    assert sentences(assessment) == ["Watched", "Attention", "Checked", "Cost", "Types", *drift, *growth, "Optimizer"]
    assert "AdamW, learning rate 0.001, eps 1e-08" in str(assessment)


def test_model_without_attention_is_reported_as_unwatched() -> None:
    assessment = assess(nn.Linear(2, 2))
    assert sentences(assessment) == ["Watched"]
    assert "0 layers" in str(assessment)
    assert assessment.key_bias == "unknown"
    assert not assessment.open_to_rounding


def state_of(model: nn.Module) -> Any:
    """Hooks, attributes, gradients and weights of a model, in comparable form."""
    hooks = [(sorted(vars(module)), len(module._forward_pre_hooks)) for module in model.modules()]
    gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    return hooks, gradients, {name: value.tolist() for name, value in model.state_dict().items()}


def test_assess_leaves_model_and_random_state_unchanged() -> None:
    model, loss = left_padded()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before, random_state = state_of(model), torch.get_rng_state()
    assess(model)
    assert torch.equal(random_state, torch.get_rng_state())
    foreshock.assess(model, loss=loss)
    assert state_of(model) == before


def test_assess_rejects_wrong_model_and_optimizer_types() -> None:
    with pytest.raises(ValueError, match=r"takes a torch\.nn\.Module, got str"):
        assess("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer is a torch\.optim\.Optimizer, got list"):
        assess(tiny_gpt(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_step_prints_the_rounding_risk_above_the_table(
    dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_gpt()
    expected = next(line for line in assess(model).lines if line.startswith("Drift by rounding"))
    if dtype == torch.float32:
        expected = "Drift by rounding: not in this run. Its attention is computed in float32; the drift needs 16 bits."
    with foreshock.attach(model, url=None, spool_directory=None) as agent:
        assert not capsys.readouterr().err
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(tiny_models.batch(0)).square().mean()
        torch.autograd.backward(loss)
        agent.step(loss)
        printed = capsys.readouterr().err
    assert printed.startswith(f"{expected}\nforeshock watches:")
    assert expected not in agent.report()  # the report leaves the sentence out


def line(assessment: Assessment, start: str) -> str:
    return next((line for line in assessment.lines if line.startswith(f"{start}:")), "")


def nan_loss() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = tiny_gpt()
    return model, lambda: next(model.parameters()).sum() * float("nan")


def in_float32() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = tiny_gpt()
    return model, lambda: model(batch(1)).square().mean()


def by_hand() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = tiny_gpt(ManualAttentionWithHeads(), ManualAttentionWithHeads())
    return model, lambda: model(batch(1)).square().mean()


@pytest.mark.parametrize(
    ("make", "start", "message", "message_without_batch"),
    [
        (left_padded, "Mask", "24 of 72 rows of the sample batch see no key", ""),
        (adapted, "Adapters", "3 of 3 layers have them on queries or keys.", "3 of 3 layers"),
        (nan_loss, "Batch", "Run foreshock diagnose", ""),
        (in_float32, "Drift by rounding", "not in this run", "open to it"),
        (attention_with_weights, "Batch", "native attention, not measured", ""),
        (by_hand, "Watched", "0 of 2 attention layers", "2 of 2 attention layers"),
    ],
)
def test_sample_batch_adds_findings_to_the_assessment(
    make: Any, start: str, message: str, message_without_batch: str
) -> None:
    model, loss = make()
    assessment = foreshock.assess(model, loss=loss)
    assert message in line(assessment, start)
    without_batch = line(foreshock.assess(model), start)
    assert message_without_batch in without_batch if message_without_batch else without_batch == ""
    remedies = {
        left_padded: "  Remedy: let every row see a key, at least its own, or pad on the right.",
        attention_with_weights: "give need_weights=False",
        by_hand: "Not watched: 2 layers, because it computes its attention by hand",
    }
    assert remedies.get(make, "") in str(assessment)


def test_score_type_is_that_of_the_batch_and_eager_float16_is_reported() -> None:
    model, loss = eager()
    assessment = foreshock.assess(model, loss=loss)
    assert "overflow beyond 65,504" in line(assessment, "Scores")
    assert "GradScaler" in line(assessment, "Loss scale")
    assert "attention ran in float16" in line(assessment, "Types")
    assert "(float16, causal" in line(assessment, "Attention")
    assert line(foreshock.assess(model), "Scores") == ""  # its parameters are float32
    assert "rounds them to bfloat16" in line(foreshock.assess(qwen("eager").bfloat16()), "Scores")
    sdpa = foreshock.assess(qwen("sdpa").bfloat16())
    assert (line(sdpa, "Scores"), line(sdpa, "Loss scale")) == ("", "")
