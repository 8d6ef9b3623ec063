"""`attention="keep"` in a training: not a bit changes, each row counts once, and a switch moves one layer."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.test_executions import MODELS, MODES, Mode
from tests.monitor.test_foreign_models import DECODER, X, tiny
from tests.monitor.test_huggingface import MODELS as TRANSFORMERS
from tests.monitor.test_huggingface import gpt2, ids
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent, attach

EVERY_ROW: dict[str, Any] = {
    "attention": "keep",
    "probe_rows": 10**6,
    "sample_every_steps": 1,
    "sample_every_seconds": 0.0,
    "strict": True,
    "quiet": True,
}


pytestmark = [  # of torch.compile's own doing
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _compiled_code_is_forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def kept(model: nn.Module, **overrides: Any) -> tuple[Agent, Listener]:
    agent, listener = attach(model, **{**EVERY_ROW, **overrides}), Listener()
    agent.subscribe(listener)
    return agent, listener


def rows(listener: Listener) -> list[list[int]]:
    """Rows of each head in each sample."""
    return [slot_values(s.words(), Slot.ROWS).astype(int).tolist() for s in listener.of(wire.Sample)]


@pytest.mark.parametrize("numbers", [range(1, 41), range(3, 100, 4), range(1, 40, 2), range(1001, 1041)])
def test_a_sample_holds_rows_of_the_step_that_it_ends_with(numbers: range) -> None:
    """A batch of step n has n + 2 words."""
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    agent, listener = kept(model, sample_every_steps=10, run="r")
    with agent:
        for number in numbers:
            agent.step(train_step(model, optimizer, number, torch.randint(16, (2, number + 2))), step=number)
    whole = [s for s in listener.of(wire.Sample) if s.step < numbers[-1]]  # close takes the rest without a plan
    assert len(whole) >= 4
    for sample in whole:
        assert set(slot_values(sample.words(), Slot.ROWS)) == {2 * (sample.step + 2)}


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


QUICK_KERNELS: dict[str, Any] = {"attention": "kernels", "sample_every_seconds": 0.0, "strict": True, "quiet": True}


@contextmanager
def as_flash_attention(model: Any) -> Iterator[None]:
    """`model` says window and softcap to an attention without a mask, which our kernels then serve."""

    def never_called(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("our kernels serve every call")

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS["flash_attention_of_this_test"] = never_called
    ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_of_this_test"] = lambda **arguments: None
    model.config._attn_implementation_internal = "flash_attention_of_this_test"
    try:
        yield
    finally:
        model.config._attn_implementation_internal = before
        del ALL_ATTENTION_FUNCTIONS["flash_attention_of_this_test"]
        del ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_of_this_test"]


WAYS = {name: kinds[0] for name, kinds in MODES.items() if name not in ("selective checkpointing", "inductor")}


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, marks=pytest.mark.execution(model, "keep"))
        for model in MODELS
        for way in WAYS
        if way != "torch.compile" or model == "nanoGPT"  # a compiler run for each takes long
    ],
)
def test_the_models_own_attention_stays_to_the_last_bit_and_each_row_counts_once(model: str, way: str) -> None:
    make, heads, count = MODELS[model]
    mode: Mode = WAYS[way]
    plain = make(mode)
    losses = mode.loop(plain, lambda loss: None)
    torch._dynamo.reset()
    watched = make(mode)
    agent, listener = kept(watched)
    with agent:
        got = mode.loop(watched, agent.step)
    assert same_bits(got, losses)
    assert same_bits(list(watched.parameters()), list(plain.parameters()))
    assert rows(listener) == [[count * mode.micro_batches] * heads] * len(losses)


@pytest.mark.full
@pytest.mark.execution("nanoGPT", "keep")
def test_inductor_compiles_the_probe_into_one_graph_and_block_by_block() -> None:
    for by_block in (False, True):
        torch._dynamo.reset()
        model = tiny_gpt()
        plain, watched = copy.deepcopy(model), model
        agent, listener = kept(watched, probe_rows=5)
        with agent:
            losses = []
            for each in (plain, watched):
                run: Any = each
                if by_block:
                    for block in each.blocks:
                        block.compile(fullgraph=True, backend="aot_eager")
                else:
                    run = torch.compile(each, fullgraph=True)
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                losses.append([train_step(run, optimizer, step) for step in range(3)])
                if each is watched:
                    agent.step()
        assert same_bits(*losses)
        assert rows(listener) == [[5 * 3] * 4]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.execution("GPT-2", "keep")),
        pytest.param("llama", marks=pytest.mark.execution("Llama", "keep")),
        pytest.param("qwen2", marks=pytest.mark.execution("Qwen2", "keep")),
        pytest.param("mistral, sliding window", marks=pytest.mark.execution("Mistral", "keep")),
        pytest.param("gemma2, softcap", marks=pytest.mark.execution("Gemma2", "keep")),
    ],
)
def test_transformers_keeps_its_attention_and_what_is_measured_is_what_our_kernels_count(
    name: str, implementation: str
) -> None:
    if implementation == "sdpa" and "softcap" in name:
        implementation = "eager"  # what transformers itself chooses for it
    torch.manual_seed(0)
    model = TRANSFORMERS[name]().eval()
    model.set_attn_implementation(implementation)
    expected = model(ids()).logits
    expected.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    agent, listener = kept(model)
    got = model(ids()).logits
    got.square().mean().backward()
    agent.step()
    agent.close()
    assert torch.equal(got, expected)
    assert same_bits([p.grad for p in model.parameters()], grads)
    words = listener.of(wire.Sample)[0].words()
    assert slot_values(words, Slot.ROWS).tolist() == [3 * 12] * len(words)
    assert AttentionInterface.get_interface.__module__ == "transformers.modeling_utils"
    model.zero_grad()
    ours = Listener()
    with as_flash_attention(model), attach(model, **QUICK_KERNELS) as served:
        served.subscribe(ours)
        model(ids()).logits.square().mean().backward()
        served.step()
    truth = ours.of(wire.Sample)[0].words()
    for slot in (Slot.TIED_ROWS_BF16, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ, Slot.SCORE_MAX, Slot.ROW_MAX_ABS):
        measured, counted = slot_values(words, slot), slot_values(truth, slot)
        np.testing.assert_allclose(measured, counted, rtol=1e-4, atol=2e-4, err_msg=slot.name)


def test_of_two_kept_models_each_row_counts_once_and_the_one_that_stays_is_measured_on() -> None:
    models = [gpt2().eval() for _ in range(2)]
    agents, listeners = zip(*(kept(model) for model in models), strict=True)

    def step(*numbers: int) -> None:
        for number in numbers:
            models[number](ids()).logits.square().mean().backward()
            agents[number].step()

    step(0, 1)
    agents[1].close()
    step(0)
    agents[0].close()
    assert [rows(listener) for listener in listeners] == [[[3 * 12] * 4] * 2, [[3 * 12] * 4]]
    assert AttentionInterface.get_interface.__module__ == "transformers.modeling_utils"


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
        model = gpt2().eval()
        model.set_attn_implementation("somebodys")
        agent, listener = kept(model)
        with agent:
            model(ids()).logits.square().mean().backward()
            agent.step()
    finally:
        del ALL_ATTENTION_FUNCTIONS["somebodys"]
    assert calls == [type(None)] * 2
    assert rows(listener) == [[3 * 12] * 4]
    assert "outside" not in caplog.text


def test_padding_of_transformers_is_read_from_its_mask() -> None:
    model = gpt2().eval()
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 8:] = 0
    agent, listener = kept(model)
    with agent:
        model(ids(), attention_mask=mask).logits.square().mean().backward()
        agent.step()
    words = listener.of(wire.Sample)[0].words()
    assert slot_values(words, Slot.ROWS).tolist() == [36] * 4
    assert np.isfinite(slot_values(words, Slot.SCORE_OFFSET_SUM)).all()


def test_a_switch_moves_only_the_layer_of_the_head_onto_our_kernels_and_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt(*(CausalSelfAttention(16, 2) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent, listener = kept(model, probe_rows=5)
    served: list[int] = []
    for index, block in enumerate(model.blocks):
        layer = vars(block)["_foreshock_layer"]
        attend: Callable[..., Any] = layer.attend

        def counted(*arguments: Any, index: int = index, attend: Callable[..., Any] = attend, **options: Any) -> Any:
            served.append(index)
            return attend(*arguments, **options)

        layer.attend = counted
    with agent, caplog.at_level(logging.WARNING, "foreshock"):
        for step in range(4):
            if step == 1:
                agent.set_mode([(1, 0)], "exact_delta", "a test")
            if step == 3:
                agent.set_mode([(1, 0)], "plain", "a test")
            agent.step(train_step(model, optimizer, step))
    assert served == [1, 1]
    assert rows(listener) == [[5] * 6, [5, 5, 24, 24, 5, 5], [5, 5, 24, 24, 5, 5], [5] * 6]
    modes = [s.modes.numpy().tolist() for s in listener.of(wire.Sample)]
    assert modes[1] == [0, 0, 1, 0, 0, 0]
    assert [record.message.partition(": step ")[2] for record in caplog.records] == [
        "1: 1 head switched to exact_delta: a test",
        "3: 1 head switched to plain: a test",
    ]


def test_a_resumed_run_moves_its_switched_layers_before_its_first_step() -> None:
    model = tiny_gpt()
    agent, _ = kept(model)
    agent.set_mode([(1, 1)], "paper_softmax", "a test")
    state = agent.state_dict()
    agent.close()
    agent, listener = kept(model, probe_rows=5)
    agent.load_state_dict(state)
    with agent:
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    assert rows(listener) == [[5, 5, 24, 24]]


def test_a_fault_of_the_probe_is_told_once_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("a test")

    plain, watched = tiny_gpt(), tiny_gpt()
    monkeypatch.setattr("foreshock.monitor.attention.probe.measure", broken)
    losses = []
    agent, listener = kept(watched, strict=False)
    with agent, caplog.at_level(logging.WARNING, "foreshock"):
        for each in (plain, watched):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            losses.append([train_step(each, optimizer, step) for step in range(3)])
        agent.step()
    assert agent.faults == {"probe": 1}
    assert same_bits(*losses)
    assert sum("the probe is off from now on" in record.message for record in caplog.records) == 1
    assert rows(listener) == [[0] * 4]


def test_the_doctor_says_what_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from foreshock.cli.doctor import report_model

    monkeypatch.setenv("FORESHOCK_ATTENTION", "keep")
    console = Console(record=True, width=200)
    report_model("tests.monitor.tiny_models:tiny_gpt", console)
    told = console.export_text()
    assert "2 x blocks.0, blocks.1" in told
    assert told.count("native attention, sampled") == 1


def test_padding_inside_a_sequence_stays_with_its_own_attention_under_kernels_and_is_measured() -> None:
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 4:8] = 0
    model: Any = tiny("Mistral", **DECODER, sliding_window=4)
    expected = model(X, attention_mask=mask).logits
    agent, listener = kept(model, attention="kernels")
    with agent:
        got = model(X, attention_mask=mask).logits
        torch.autograd.backward(got.square().mean())
        agent.step(1.0)
    assert "2 x kernels, but native and sampled in calls where it passes a mask" in agent.report()
    assert torch.equal(got, expected)
    counted = [slot_values(listener.of(wire.Sample)[0].words(), slot) for slot in (Slot.ROWS, Slot.EMPTY_ROWS)]
    assert (counted[0] + counted[1]).tolist() == [12] * 8
    assert counted[0].min() >= 8
