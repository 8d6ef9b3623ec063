"""flash_attention_2 of transformers over a stand-in for flash_attn: measured is what it hands to the library."""

from typing import Any

import pytest
import torch
from tests.monitor.executions import Trained, watched
from tests.monitor.library_calls import KEPT, assert_alike
from tests.monitor.stand_ins import flash_attn_2
from tests.monitor.test_foreign_models import DECODER, tiny
from tests.monitor.test_huggingface import MODELS
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils as flash

ROWS, LENGTH, STEPS = 2, 12, 2
BOTH_WAYS: Any = {**DECODER, "sliding_window": 6, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
ENCODER: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MAKERS: Any = MODELS | {
    "gemma3, window to both sides": lambda: tiny("Gemma3Text", "Model", **BOTH_WAYS),
    "modernbert, window to both sides": lambda: tiny(
        "ModernBert", "ForMaskedLM", **ENCODER, local_attention=6, cls_token_id=1, sep_token_id=2
    ),
}


@pytest.fixture(autouse=True)
def _flash_attn_is_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    process = flash._lazy_define_process_function(flash_attn_2.flash_attn_varlen_func)
    for name, value in {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": flash_attn_2.flash_attn_func,
        "_flash_varlen_fn": flash_attn_2.flash_attn_varlen_func,
        "_pad_fn": flash._pad_input,
        "_unpad_fn": flash._unpad_input,
        "_process_flash_kwargs_fn": process,
    }.items():
        monkeypatch.setattr(flash, name, value)


def inputs(kind: str, step: int) -> dict[str, Tensor]:
    """Whole rows, rows padded at the right, or one row of two sequences told by their positions."""
    ids = torch.randint(48, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    if kind == "packed":
        return {"input_ids": ids.view(1, -1), "position_ids": torch.arange(LENGTH).repeat(1, ROWS)}
    if kind == "padded":
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[1, 7:] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids}


def model_of(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model = MAKERS[name]()
    model.config.use_cache = False
    model.config._attn_implementation_internal = implementation
    return model


def trained(name: str, kind: str, implementation: str = "flash_attention_2", **settings: Any) -> Trained:
    def loop(model: Any, stepped: Any) -> list[Tensor]:
        losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            given = inputs(kind, step)
            logits = model(**given)[0]
            real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
            losses.append(logits[real].logsumexp(-1).square().mean())
            torch.autograd.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
            stepped(losses[-1].detach())
        return losses

    model: nn.Module = model_of(name, implementation)
    if settings:
        return watched(model, loop, **settings)
    return Trained(loop(model, lambda loss: None), [p.detach().clone() for p in model.parameters()])


CASES = [
    ("llama", "whole"),
    ("llama", "padded"),
    ("llama", "packed"),
    ("mistral, sliding window", "packed"),
    ("gemma3, window to both sides", "whole"),
    ("modernbert, window to both sides", "whole"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_transformers_hands_to_flash_attn_is_kept_and_measured_row_by_row(name: str, kind: str) -> None:
    got = trained(name, kind, **KEPT)
    got.assert_same_bits(trained(name, kind))
    real = ROWS * LENGTH - 5 * (kind == "padded")
    assert got.rows == [real * STEPS] * 8
    if kind != "padded":  # padded rows are no rows to flash_attn, and some to PyTorch's
        assert_alike(got, trained(name, kind, "sdpa", **KEPT))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_our_kernels_take_the_place_of_flash_attn_for_whole_padded_and_packed_rows(name: str, kind: str) -> None:
    got, expected = trained(name, kind, attention="kernels"), trained(name, kind)
    for mine, own in zip(got.losses + got.weights, expected.losses + expected.weights, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    assert "2 x kernels (" in got.report
    assert_alike(got, trained(name, kind, **KEPT))


def test_an_argument_that_is_for_flash_attn_alone_leaves_eager_attention_measured() -> None:
    name = "modernbert, window to both sides"  # it passes `deterministic` whatever computes its attention
    got = trained(name, "whole", "eager", **KEPT)
    assert got.rows == [ROWS * LENGTH * STEPS] * 8
    assert_alike(got, trained(name, "whole", **KEPT))
