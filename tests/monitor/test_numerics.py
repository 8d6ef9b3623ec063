"""Precision is never lowered unasked: under numerics "auto" each call is rounded as the model itself asks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor import tiny_models
from tests.monitor.doubles import Listener
from tests.monitor.probing import EVERY_ROW, probed, tensors
from tests.monitor.tiny_models import CausalSelfAttention, batch, tiny_gpt
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot, slot_values
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import AgentConfig, attach
from foreshock.monitor.attention import watched_layer
from foreshock.monitor.attention.probe import Sampling
from foreshock.monitor.model.discovery import SDPA

QUICK: dict[str, Any] = {
    "attention": "kernels",
    "sample_every_steps": 1,
    "sample_every_seconds": 0.0,
    "strict": True,
    "quiet": True,
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numerics of every call that foreshock's operator serves."""
    names: list[str] = []

    def record(*tensors: Tensor, **options: Any) -> Any:
        names.append(options["numerics"])
        return flash_attention(*tensors, **options)

    monkeypatch.setattr(watched_layer, "flash_attention", record)
    return names


def attached(dtype: torch.dtype, *, autocast: bool = False, **settings: Any) -> list[Tensor]:
    """Loss and gradients of a model with an agent; its weights are always the same."""
    model = tiny_gpt().to(dtype)
    with attach(model, **QUICK, **settings):
        return loss_and_gradients(model, autocast=autocast)


def loss_and_gradients(model: nn.Module, *, autocast: bool = False) -> list[Tensor]:
    ids = tiny_models.batch(0, rows=4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.promise("A14")
@pytest.mark.parametrize(
    ("dtype", "numerics", "atol"), [(torch.float32, "float32", 1e-6), (torch.float64, "float64", 1e-14)]
)
def test_a_wide_model_trains_as_with_pytorchs_own_attention(
    dtype: torch.dtype, numerics: str, atol: float, served: list[str]
) -> None:
    expected = loss_and_gradients(tiny_gpt().to(dtype))
    got = attached(dtype)
    assert served == [numerics] * 2
    assert len(got) == len(expected) > 8
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, atol=atol, rtol=10 * atol)


def test_kernel_numerics_named_for_a_wide_model_do_round_and_so_are_no_default(served: list[str]) -> None:
    expected = loss_and_gradients(tiny_gpt())
    got = attached(torch.float32, numerics="kernel")
    assert served == ["kernel"] * 2
    assert max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)) > 1e-5


@pytest.mark.parametrize("autocast", [False, True])
def test_a_16_bit_model_is_served_by_kernel_numerics(autocast: bool, served: list[str]) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    got = attached(dtype, autocast=autocast)
    named = attached(dtype, autocast=autocast, numerics="kernel")
    assert served == ["kernel"] * 4
    assert all(torch.equal(a, b) for a, b in zip(got, named, strict=True))


def test_half_precision_and_autocast_in_a_wide_model_follow_the_operands() -> None:
    half, wide = torch.empty(0, dtype=torch.float16), torch.empty(0, dtype=torch.float64)
    assert watched_layer.numerics_for(half, "auto") == "kernel"
    assert watched_layer.numerics_for(half, "paper") == "paper"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert watched_layer.numerics_for(wide, "auto") == "float64"  # autocast leaves float64 alone
        assert watched_layer.numerics_for(torch.empty(0), "float32") == "float32"


def test_the_table_and_the_first_event_say_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert AgentConfig().numerics == "auto"
    agent = attach(tiny_gpt(), **{**QUICK, "quiet": False})
    listener = Listener()
    agent.subscribe(listener)
    agent.step(1.0)
    agent.close()
    assert listener.of(wire.Started)[0].numerics == "auto"
    assert "numerics: auto (kernel for 16-bit operands" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "served"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_an_accelerator_s_wide_operands_stay_with_pytorch_and_the_layer_says_why(
    dtype: torch.dtype, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "meta" stands in for the accelerator; it knows no autocast, so that is off."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    state = torch.empty(2, SLOT_COUNT, dtype=torch.int64, device="meta")
    layer = watched_layer.WatchedLayer("h.0", state, torch.empty(2, dtype=torch.int32, device="meta"), "auto")
    operand = torch.empty(1, 2, 4, 8, dtype=dtype, device="meta")
    problem = layer.problem(operand, operand, operand)
    assert (problem is None) == served
    assert served or "ask for numerics='float32'" in str(problem)


@pytest.mark.promise("A21")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_queries_under_autocast_are_measured_in_the_type_that_the_attention_rounded_them_to(
    dtype: torch.dtype,
) -> None:
    query, key, value, grad = tensors(torch.float32, offset=0.3)
    query, key, value = query * 1.37, key * 0.91, value * 1.13  # of more digits than either type has
    with torch.autocast("cpu", dtype):
        out = SDPA(query, key, value, is_causal=True, enable_gqa=True)
    assert out.dtype == dtype
    sampling = Sampling(EVERY_ROW)
    settings: dict[str, Any] = {"causal": "top_left", "numerics": "kernel"}
    wide = probed(query, key, value, grad.to(dtype), out, sampling, **settings)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    cast = probed(query, key, value, grad.to(dtype), out, sampling, **settings)
    for slot in Slot:
        np.testing.assert_array_equal(slot_values(wide, slot), slot_values(cast, slot), err_msg=slot.name)
    assert slot_values(cast, Slot.DELTA_BIAS_ABS).min() > 0


@pytest.mark.promise("A21")
def test_under_fp16_autocast_a_model_that_widens_its_queries_has_the_delta_bias_of_fp16() -> None:
    class Widening(CausalSelfAttention):
        """Norms of heads give fp32 under autocast."""

        widens = False

        def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            wide = (query.float(), key.float()) if self.widens else (query, key)
            return F.scaled_dot_product_attention(*wide, value, is_causal=True)

    def delta_bias() -> Any:
        torch.manual_seed(0)
        model, listener = tiny_gpt(Widening(16, 2)), Listener()
        agent = attach(model, run="widened", attention="keep", probe_rows=EVERY_ROW, quiet=True, strict=True)
        agent.subscribe(listener)
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(0)).float().square().mean()
        loss.backward()
        agent.step(loss)
        agent.close()
        return slot_values(listener.of(wire.Sample)[0].words(), Slot.DELTA_BIAS_ABS)

    narrow = delta_bias()
    Widening.widens = True
    np.testing.assert_allclose(delta_bias(), narrow, rtol=1e-6)
