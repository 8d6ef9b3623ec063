"""`assess` reads what a model is open to, and names what fails most trainings first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.lab.diagnosed_models import adapted, attention_with_weights, eager, left_padded, qwen
from tests.monitor import tiny_models
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, batch, tiny_gpt
from tests.monitor.transformers_models import DECODER, LATENT, TRANSFORMERS, tiny
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
BUILDS: dict[str, tuple[Callable[[], nn.Module], tuple[str, bool, bool]]] = {
    "nanoGPT with biases": (tiny_gpt, ("trained", False, False)),
    "frozen bias": (with_frozen_bias, ("frozen", False, False)),
    "grouped heads without biases": (lambda: tiny_gpt(GroupedQueryAttention(16, 2, 1)), ("none", False, False)),
    "GPT-2": (TRANSFORMERS["GPT-2"], ("trained", False, False)),
    "Pythia": (lambda: tiny("GPTNeoX", "Model", **PYTHIA), ("trained", True, False)),
    "Qwen2": (lambda: tiny("Qwen2", **GROUPED), ("trained", True, False)),
    "Llama": (TRANSFORMERS["Llama"], ("none", True, False)),
    "Qwen3": (lambda: tiny("Qwen3", **GROUPED), ("none", True, True)),
    "Whisper, whose keys have no bias": (lambda: tiny("Whisper", "Model", **WHISPER), ("none", False, False)),
    "PyTorch's own": (lambda: nn.MultiheadAttention(16, 2), ("trained", False, False)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_key_bias_rotary_positions_and_qk_norm_are_read_from_the_model(name: str) -> None:
    make, expected = BUILDS[name]
    seen = assess(make())
    assert (seen.key_bias, seen.rotary, seen.qk_norm) == expected


@pytest.mark.parametrize("attention_bias", [False, True])
def test_keys_that_are_made_of_a_latent_are_told_as_keys_without_a_bias_whatever_biases_the_latent(
    attention_bias: bool,
) -> None:
    sizes = DECODER | LATENT | {"head_dim": LATENT["qk_rope_head_dim"], "attention_bias": attention_bias}
    model: Any = tiny("DeepseekV3", **sizes)
    seen = assess(model)
    assert (seen.watched, seen.key_bias, seen.rotary) == (2, "none", True)
    assert "GPT-2 small without biases failed in this way" in str(seen)
    for block in model.model.layers:
        made = block.self_attn.kv_b_proj
        made.bias = nn.Parameter(torch.zeros(made.out_features))
    assert assess(model).key_bias == "trained"
    for block in model.model.layers:
        block.self_attn.keys_in_another_way = block.self_attn.kv_b_proj
        del block.self_attn.kv_b_proj
    assert "not known, because the projection of the keys was not found" in str(assess(model))


def sentences(seen: Assessment) -> list[str]:
    return [line.partition(":")[0] for line in seen.lines]


def test_the_report_answers_in_ten_lines_and_names_both_failures_with_a_remedy() -> None:
    seen = foreshock.assess(tiny_gpt(), torch.optim.AdamW(tiny_gpt().parameters(), lr=1e-3))
    assert seen.open_to_rounding
    assert len(seen.lines) <= 10
    drift, growth = (["Drift by rounding", "  First remedy"], ["Scores that grow", "  First remedy"])
    assert sentences(seen) == ["Watched", "Attention", "Checked", "Cost", "Types", *drift, *growth, "Optimizer"]
    assert "AdamW, learning rate 0.001, eps 1e-08" in str(seen)


def test_a_model_without_attention_is_told_as_unwatched_and_not_as_safe() -> None:
    seen = assess(nn.Linear(2, 2))
    assert sentences(seen) == ["Watched"]
    assert "0 layers" in str(seen)
    assert seen.key_bias == "unknown"
    assert not seen.open_to_rounding


def touched(model: nn.Module) -> Any:
    """What may be compared of all that assessing could change."""
    hooks = [(sorted(vars(module)), len(module._forward_pre_hooks)) for module in model.modules()]
    gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    return hooks, gradients, {name: value.tolist() for name, value in model.state_dict().items()}


def test_assessing_changes_nothing_also_with_a_sample_batch() -> None:
    model, loss = left_padded()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before, drawn = touched(model), torch.get_rng_state()
    assess(model)
    assert torch.equal(drawn, torch.get_rng_state())
    foreshock.assess(model, loss=loss)
    assert touched(model) == before


def test_what_is_no_module_and_no_optimizer_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"takes a torch\.nn\.Module, got str"):
        assess("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer is a torch\.optim\.Optimizer, got list"):
        assess(tiny_gpt(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_says_above_its_table_whether_this_run_is_open_to_rounding(
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
    assert expected not in agent.report()  # who asks for the table has read the sentence


def line(seen: Assessment, start: str) -> str:
    return next((line for line in seen.lines if line.startswith(f"{start}:")), "")


def nan_loss() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = tiny_gpt()
    return model, lambda: next(model.parameters()).sum() * float("nan")


def in_float32() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = tiny_gpt()
    return model, lambda: model(batch(1)).square().mean()


@pytest.mark.parametrize(
    ("make", "start", "said", "without"),
    [
        (left_padded, "Mask", "24 of 72 rows of the sample batch see no key", ""),
        (adapted, "Adapters", "3 of 3 layers have them on queries or keys.", "3 of 3 layers"),
        (nan_loss, "Batch", "Run foreshock diagnose", ""),
        (in_float32, "Drift by rounding", "not in this run", "open to it"),
        (attention_with_weights, "Batch", "native attention, not measured", ""),
    ],
)
def test_a_sample_batch_shows_what_the_model_alone_does_not(make: Any, start: str, said: str, without: str) -> None:
    model, loss = make()
    seen = foreshock.assess(model, loss=loss)
    assert said in line(seen, start)
    alone = line(foreshock.assess(model), start)
    assert without in alone if without else alone == ""
    remedies = {
        left_padded: "  Remedy: let every row see a key, at least its own, or pad on the right.",
        attention_with_weights: "give need_weights=False",
    }
    assert remedies.get(make, "") in str(seen)


def test_the_type_of_scores_is_that_of_the_batch_and_eager_float16_is_warned_of() -> None:
    model, loss = eager()
    seen = foreshock.assess(model, loss=loss)
    assert "overflow beyond 65,504" in line(seen, "Scores")
    assert "GradScaler" in line(seen, "Loss scale")
    assert "attention ran in float16" in line(seen, "Types")
    assert "(float16, causal" in line(seen, "Attention")
    assert line(foreshock.assess(model), "Scores") == ""  # its parameters are float32
    assert "rounds them to bfloat16" in line(foreshock.assess(qwen("eager").bfloat16()), "Scores")
    sound = foreshock.assess(qwen("sdpa").bfloat16())
    assert (line(sound, "Scores"), line(sound, "Loss scale")) == ("", "")
