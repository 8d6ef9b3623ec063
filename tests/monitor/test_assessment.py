"""`assess`: what it reads from a model, against models whose build is known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.monitor import tiny_models
from tests.monitor.test_foreign_models import DECODER, LATENT, tiny
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, tiny_gpt
from torch import nn

import foreshock
from foreshock.cli.doctor import report_model
from foreshock.monitor.assessment import Assessment, assess


def transformers_model(family: str, **changes: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": 32, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, **changes}
    )
    model: nn.Module = getattr(transformers, f"{family}Model")(config)
    return model


def with_frozen_bias() -> nn.Module:
    model = tiny_gpt()
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            module.c_attn.bias.requires_grad_(False)
    return model


BUILDS: dict[str, tuple[Callable[[], nn.Module], tuple[str, bool, bool]]] = {
    "nanoGPT with biases": (tiny_gpt, ("trained", False, False)),
    "frozen bias": (with_frozen_bias, ("frozen", False, False)),
    "grouped heads without biases": (lambda: tiny_gpt(GroupedQueryAttention(16, 2, 1)), ("none", False, False)),
    "GPT-2": (lambda: transformers_model("GPT2"), ("trained", False, False)),
    "Pythia": (lambda: transformers_model("GPTNeoX", intermediate_size=64), ("trained", True, False)),
    "Qwen2": (
        lambda: transformers_model("Qwen2", intermediate_size=64, num_key_value_heads=1),
        ("trained", True, False),
    ),
    "Llama": (lambda: transformers_model("Llama", intermediate_size=64), ("none", True, False)),
    "Qwen3": (
        lambda: transformers_model("Qwen3", intermediate_size=64, num_key_value_heads=1, head_dim=16),
        ("none", True, True),
    ),
    "Whisper, whose keys have no bias": (
        lambda: transformers_model(
            "Whisper", d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        ("none", False, False),
    ),
    "PyTorch's own": (lambda: nn.MultiheadAttention(16, 2), ("trained", False, False)),
}  # fmt: skip


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
    assert "GPT-2 small without biases failed so" in str(seen)
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
    remedy = "  First remedy"
    expected = [
        "Watched",
        "Attention",
        "Checked",
        "Cost",
        "Types",
        "Drift by rounding",
        remedy,
        "Scores that grow",
        remedy,
    ]
    assert sentences(seen) == [*expected, "Optimizer"]
    assert "AdamW, learning rate 0.001, eps 1e-08" in str(seen)


def test_a_model_without_attention_is_told_as_unwatched_and_not_as_safe() -> None:
    seen = assess(nn.Linear(2, 2))
    assert sentences(seen) == ["Watched"]
    assert "no layer" in str(seen)
    assert seen.key_bias == "unknown"
    assert not seen.open_to_rounding


def test_assessing_runs_and_changes_nothing() -> None:
    model = tiny_gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    attributes = [sorted(vars(module)) for module in model.modules()]
    assess(model)
    assert torch.equal(drawn, torch.get_rng_state())
    assert attributes == [sorted(vars(module)) for module in model.modules()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


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


def test_the_doctor_assesses_the_model_before_it_lists_its_layers() -> None:
    console = Console(record=True, width=250)
    report_model("tests.monitor.tiny_models:tiny_gpt", console)
    text = console.export_text()
    assert text.index("Drift by rounding: open to it") < text.index("foreshock watches:")
    assert text.count("Drift by rounding: open to it") == 1
