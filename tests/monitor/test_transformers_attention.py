"""Models of transformers in modes of execution: bits of the operator alone, and the counts of eager mode."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.executions import EVERY_STEP, Trained, watched
from tests.monitor.test_executions import MODES, STEPS, Mode
from tests.monitor.test_huggingface import MODELS as MAKERS
from tests.monitor.tiny_models import batch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from foreshock.contract.slots import COUNT_SLOTS, Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import attach
from foreshock.monitor.attention.watched_layer import numerics_for

pytestmark = [  # of torch.compile's own doing
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

NAMES = {
    "GPT-2": "gpt2",
    "Llama": "llama",
    "Qwen2": "qwen2",
    "Mistral": "mistral, sliding window",
    "Gemma2": "gemma2, softcap",
}
KEPT = ("Mistral", "Gemma2")
"""Their windows are a mask to PyTorch's attention, and Gemma's softcap is computed by its own eager attention."""
QUICK = ("GPT-2", "Llama")
"""In every mode in the quick tier: fused and separate projections. The others, but for eager mode, in the full one."""
EVERY_ROW: dict[str, Any] = {"probe_rows": 10**6}
CASES = [
    pytest.param(
        model,
        name,
        MODES[name][0],
        id=f"{model}, {name}",
        marks=[pytest.mark.execution(model, name), *[pytest.mark.full] * (model not in QUICK and name != "eager")],
    )
    for model in NAMES
    for name in MODES
    if name not in ("inductor", "selective checkpointing")
]


class Logits(nn.Module):
    """A model whose output is its logits; its dropout is off, so that two runs are the same."""

    def __init__(self, name: str, mode: Mode, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MAKERS[NAMES[name]]().to(mode.dtype)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attn_dropout", None), float):
                module.attn_dropout = 0.0
        if kind.startswith("checkpointing"):
            reentrant = kind == "checkpointing (reentrant)"
            old, new = "gradient_checkpointing_enable", "activation_checkpointing_enable"  # before transformers 5.20
            getattr(self.model, new, getattr(self.model, old))({"use_reentrant": reentrant})
            self.model.enable_input_require_grads()
        self.model.config.use_cache = False

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


def operator_alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Our operator as transformers would call it, with no agent, no state and no modes."""
    numerics: Any = numerics_for(query, "auto")
    out = flash_attention(
        query,
        key,
        value,
        causal="top_left",
        scale=scaling,
        softcap=softcap or 0.0,
        window=(sliding_window - 1, -1) if sliding_window else (-1, -1),
        numerics=numerics,
    )
    return out.transpose(1, 2).contiguous(), None


def alone(model: Logits, loop: Callable[[nn.Module, Callable[[Tensor], None]], list[Tensor]]) -> Trained:
    AttentionInterface.register("operator_alone", operator_alone)
    model.model.set_attn_implementation("operator_alone")
    return Trained(loop(model, lambda loss: None), [p.detach().clone() for p in model.parameters()])


@pytest.fixture(autouse=True)
def _compiled_code_is_forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind", "mode"), CASES)
def test_a_transformers_model_in_a_mode_of_execution_changes_no_bit_and_no_count(
    name: str, kind: str, mode: Mode
) -> None:
    # these compile to the bits of eager mode, which spares the other half of the compiler's time
    loop = replace(mode, compile=None).loop
    if name in KEPT:
        model = Logits(name, mode, kind)
        expected = Trained(loop(model, lambda loss: None), [p.detach().clone() for p in model.parameters()])
    else:
        expected = alone(Logits(name, mode, kind), loop)
    got = watched(Logits(name, mode, kind), mode.loop, **EVERY_ROW)
    got.assert_same_bits(expected)
    heads = 2 * (2 if name == "GPT-2" else 4)
    assert got.rows == [2 * 12 * mode.micro_batches * STEPS] * heads
    if kind.startswith("checkpointing"):
        plain = watched(Logits(name, Mode(), "eager"), Mode().loop, **EVERY_ROW)
        forward = [*COUNT_SLOTS, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ]
        np.testing.assert_array_equal(got.words[0][:, forward], plain.words[0][:, forward])


@pytest.mark.full
@pytest.mark.parametrize(("name", "side"), [("GPT-2", "right"), ("Mistral", "left")])
def test_a_compiled_model_measures_a_padded_batch_as_an_eager_one_does(name: str, side: str) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    mask = mask.flip(1) if side == "left" else mask

    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        inner: Any = model
        run: Any = torch.compile(inner.model, backend="aot_eager", fullgraph=True) if compiled else inner.model
        loss = run(input_ids=batch(0), attention_mask=mask).logits[mask.bool()].square().mean()
        torch.autograd.backward(loss)
        stepped(loss)
        return [loss.detach()]

    compiled = False
    plain = watched(Logits(name, Mode(), "eager"), loop, **EVERY_ROW)
    compiled = True
    got = watched(Logits(name, Mode(), "eager"), loop, **EVERY_ROW)
    assert {int(words[0, [Slot.ROWS, Slot.EMPTY_ROWS]].sum()) for words in got.words} == {2 * 12}
    np.testing.assert_array_equal(counts(got), counts(plain))
    torch.testing.assert_close(got.losses, plain.losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sequences_packed_by_position_numbers_are_never_taken_for_one(compiled: bool) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    expected = Logits("Llama", Mode(), "eager").model(input_ids=batch(0), position_ids=positions).logits
    model: Any = Logits("Llama", Mode(), "eager")
    agent = attach(model, **EVERY_STEP)
    run: Any = torch.compile(model.model, backend="aot_eager") if compiled else model.model
    run(input_ids=batch(0))  # one that is not packed comes before
    got = [run(input_ids=batch(0), position_ids=positions).logits]
    if not compiled:
        got.append(run(batch(0), None, positions).logits)
    agent.close()
    for logits in got:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def counts(trained: Trained) -> Any:
    return np.stack(trained.words)[..., list(COUNT_SLOTS)]


@pytest.mark.parametrize(("name", "advised"), [("llama", True), ("gemma2, softcap", False)])
def test_an_implementation_is_advised_only_where_it_computes_the_same_attention(name: str, advised: bool) -> None:
    torch.manual_seed(0)
    model: Any = MAKERS[name]()
    model.set_attn_implementation("eager")
    with attach(model, **EVERY_STEP) as agent:
        model(batch(0), labels=batch(0)).loss.backward()
        agent.step()
        agent.step()
        report = agent.report()
    assert "its attention is eager, which stays" in report
    assert ("set_attn_implementation('sdpa') lets kernels serve" in report) == advised
