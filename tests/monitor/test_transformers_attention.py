"""Models of transformers compute what they compute without us: padded, packed, compiled, with any implementation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.executions import EVERY_STEP, Logits, Mode
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import batch
from tests.monitor.transformers_models import TRANSFORMERS, X
from tests.monitor.watching import listening
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreshock.monitor import attach

QUIET: dict[str, Any] = {"quiet": True, "url": None, "strict": True}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sequences_packed_by_position_numbers_are_never_taken_for_one(compiled: bool) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    expected = Logits("Llama", Mode()).model(input_ids=batch(0), position_ids=positions).logits
    model: Any = Logits("Llama", Mode())
    agent = attach(model, **EVERY_STEP)
    run: Any = torch.compile(model.model, backend="aot_eager") if compiled else model.model
    run(input_ids=batch(0))  # one that is not packed comes before
    got = [run(input_ids=batch(0), position_ids=positions).logits]
    if not compiled:
        got.append(run(batch(0), None, positions).logits)
    agent.close()
    for logits in got:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "advised"), [("Llama", True), ("Gemma2", False)])
def test_an_implementation_is_advised_only_where_it_computes_the_same_attention(name: str, advised: bool) -> None:
    model: Any = TRANSFORMERS[name]()
    model.set_attn_implementation("eager")
    with attach(model, **EVERY_STEP) as agent:
        model(batch(0), labels=batch(0)).loss.backward()
        agent.step()
        agent.step()
        report = agent.report()
    assert "its attention is eager, which stays" in report
    assert ("set_attn_implementation('sdpa') lets kernels compute it" in report) == advised


def test_any_kernel_that_transformers_knows_by_name_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def somebodys_kernel(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        calls.append(type(mask))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["somebodys"] = somebodys_kernel
    try:
        model: Any = TRANSFORMERS["GPT-2"]()
        model.set_attn_implementation("somebodys")
        with listening(model, attention="keep", probe_rows=10**6) as (agent, listener):
            model(X).logits.square().mean().backward()
            agent.step()
    finally:
        del ALL_ATTENTION_FUNCTIONS["somebodys"]
    assert calls == [type(None)] * 2
    assert counted_rows(listener) == [[12] * 8]
    assert "outside" not in caplog.text
