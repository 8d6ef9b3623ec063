"""The agent on a GPU: steps without host synchronisation, CUDA graphs, and the same counters as in eager mode."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.execution_modes import Loop, train_unwatched, train_watched, train_with_operator
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, batch, next_token_loss, tiny_gpt
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import COUNT_SLOTS, SUM_SLOTS, Slot, merge_words, slot_values
from foreshock.monitor import Agent, attach

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run it on one with tests/monitor"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

STEPS, ROWS, LENGTH = 10, 2, 64
SUMS = list(SUM_SLOTS)


def model() -> TinyGPT:
    torch.manual_seed(0)
    return tiny_gpt(*(CausalSelfAttention(64, 2) for _ in range(2)), width=64).cuda().bfloat16()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)


def loss_of(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(run(tokens).flatten(0, 1).float(), tokens.flatten())


def tokens() -> list[Tensor]:
    return [batch(step, rows=ROWS, length=LENGTH).cuda() for step in range(STEPS)]


def eager(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
    optimizer, losses = adamw(model), []
    for token_batch in tokens():
        loss = loss_of(model, token_batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stepped(loss)
        losses.append(loss.detach())
    return losses


def captured(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
    """Forward, backward and update in one CUDA graph, after three warm-up steps on a side stream."""
    optimizer, losses = adamw(model), []
    token_batch = tokens()
    static_input = token_batch[0].clone()

    def train_once() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, static_input)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            static_input.copy_(token_batch[step])
            losses.append(train_once().detach().clone())
            stepped(losses[-1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_once()
    for step in range(3, STEPS):
        static_input.copy_(token_batch[step])
        graph.replay()
        stepped(loss)
        losses.append(loss.detach().clone())
    return losses


def reduce_overhead(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
    """torch.compile's CUDA graphs, one each for forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    optimizer, losses = adamw(model), []
    for token_batch in tokens():
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = loss_of(compiled, token_batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stepped(loss)
        losses.append(loss.detach().clone())
    torch._dynamo.reset()
    return losses


def switch_after_step_6(agent: Agent) -> None:
    if agent.current_step == 6:
        agent.set_mode([(0, 1), (1, 0)], "exact_delta", "a test")


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(eager, marks=pytest.mark.execution("nanoGPT", "eager")),
        pytest.param(captured, marks=pytest.mark.execution("nanoGPT", "CUDA graphs")),
        pytest.param(reduce_overhead, marks=pytest.mark.execution("nanoGPT", "CUDA graphs")),
    ],
)
def test_gpu_step_is_bit_identical_and_counts_like_eager(loop: Loop) -> None:
    expected = train_with_operator(model(), loop)
    result = train_watched(model(), loop)
    result.assert_same_bits(expected)
    eager_run = train_watched(model(), eager)
    assert result.rows == [STEPS * ROWS * LENGTH] * 4
    # if the GPU lags, a sample may cover several steps, so compare the merged samples
    words, eager_words = merge_words(result.words), merge_words(eager_run.words)
    counts, maxima = list(COUNT_SLOTS), [Slot.SCORE_MAX, Slot.ROW_MAX_ABS]
    if loop is captured:  # inductor rounds the products around the operator differently from eager mode
        np.testing.assert_array_equal(words[:, counts + maxima], eager_words[:, counts + maxima])
        np.testing.assert_allclose(words.view(np.float64)[:, SUMS], eager_words.view(np.float64)[:, SUMS], rtol=1e-12)


@pytest.mark.execution("nanoGPT", "CUDA graphs")
@pytest.mark.parametrize("loop", [captured, reduce_overhead])
def test_switch_takes_effect_in_a_captured_step_without_recapture(loop: Loop) -> None:
    result = train_watched(model(), loop, during=switch_after_step_6, mitigation="exact_delta")
    unswitched = train_watched(model(), loop)
    assert [torch.equal(a, b) for a, b in zip(result.losses, unswitched.losses, strict=True)][:7] == [True] * 7
    assert not all(torch.equal(a, b) for a, b in zip(result.weights, unswitched.weights, strict=True))
    if loop is captured:
        result.assert_same_bits(train_watched(model(), eager, during=switch_after_step_6))
    modes = {s.step: s.modes.numpy().tolist() for s in result.listener.of(wire.Sample)}
    assert all(mode == ([0, 1, 1, 0] if step > 6 else [0, 0, 0, 0]) for step, mode in modes.items())
    assert max(modes) == STEPS


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_torch_compile_records_cuda_graphs_of_the_watched_step(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    recorded: list[Any] = []
    record = cudagraph_trees.CUDAGraphNode._record

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.append(self)
        return record(self, *args, **kwargs)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "_record", counting)
    counters.clear()
    train_watched(model(), reduce_overhead, attention=attention)
    assert len(recorded) == 2  # one forward and one backward, without re-recording
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.promise("A14")
@pytest.mark.parametrize("loop", [eager, captured, reduce_overhead])
def test_step_with_all_features_never_synchronises_with_the_host(loop: Loop) -> None:
    strict: list[int] = []

    def forbid_synchronisation(agent: Agent) -> None:
        # the first steps load kernels and modules and capture graphs
        if agent.current_step == 5:
            torch.cuda.set_sync_debug_mode("error")
            strict.append(agent.current_step)
        if agent.current_step == 6:
            agent.set_mode([(0, 1)], "exact_delta", "a test")

    try:
        result = train_watched(model(), loop, during=forbid_synchronisation, norms_every_steps=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strict == [5]
    samples = result.listener.of(wire.Sample)
    assert samples[-1].step == STEPS
    assert sum(slot_values(words, Slot.ROWS)[0] for words in result.words) == STEPS * ROWS * LENGTH
    assert all(s.loss is not None for s in samples)
    assert samples[-1].modes.numpy().tolist() == [0, 1, 0, 0]
    assert (samples[-1].query_norm.numpy() > 0).all()
    assert result.listener.of(wire.Started)[0].layers[0].served_by == "kernel"


@pytest.mark.execution("Llama", "eager")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_padded_transformers_batch_is_bit_identical_and_measured() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 48}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
    mask = torch.ones(2, LENGTH, dtype=torch.long, device="cuda")
    mask[0, 40:] = 0

    def llama() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = LlamaForCausalLM(config).cuda().bfloat16()
        return made

    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        losses = []
        for token_batch in tokens():
            loss = model(input_ids=token_batch, attention_mask=mask).logits[mask.bool()].float().square().mean()
            torch.autograd.backward(loss)
            stepped(loss)
            losses.append(loss.detach())
        return losses

    result = train_watched(llama(), loop, probe_rows=9)
    assert result.rows == [STEPS * 9] * 8
    assert all(torch.equal(a, b) for a, b in zip(result.losses, loop(llama(), lambda loss: None), strict=True))


NATIVE: dict[str, Any] = {"attention": "keep", "probe_rows": 8}
LOOPS = [
    pytest.param(eager, marks=pytest.mark.execution("nanoGPT", "keep")),
    pytest.param(captured, marks=pytest.mark.execution("nanoGPT", "keep")),
    pytest.param(reduce_overhead, marks=pytest.mark.execution("nanoGPT", "keep")),
]


@pytest.mark.parametrize("loop", LOOPS)
def test_native_attention_on_a_gpu_is_bit_identical(loop: Loop) -> None:
    result = train_watched(model(), loop, **NATIVE)
    result.assert_same_bits(train_unwatched(model(), loop))
    assert result.rows == [STEPS * 8] * 4


@pytest.mark.parametrize("loop", [eager, captured, reduce_overhead])
def test_step_with_native_attention_never_synchronises_with_the_host(loop: Loop) -> None:
    def forbid_synchronisation(agent: Agent) -> None:
        if agent.current_step == 5:  # the first steps load kernels and modules and capture graphs
            torch.cuda.set_sync_debug_mode("error")

    try:
        result = train_watched(model(), loop, during=forbid_synchronisation, norms_every_steps=1, **NATIVE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.rows == [STEPS * 8] * 4


def test_switch_recompiles_graphs_but_a_manual_capture_logs_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def switch(agent: Agent) -> None:
        if agent.current_step == 6:
            agent.set_mode([(1, 0)], "exact_delta", "a test")

    result = train_watched(model(), reduce_overhead, during=switch, **NATIVE)
    assert result.rows == [STEPS * 8] * 2 + [6 * 8 + 4 * ROWS * LENGTH] * 2
    caplog.clear()
    assert [each.outcome for each in result.listener.of(wire.Switched)] == ["applied"]
    result = train_watched(model(), captured, during=switch, **NATIVE)
    assert result.rows == [STEPS * 8] * 4
    assert "Capture it again" in caplog.text
    assert result.listener.of(wire.Switched) == []


def test_switch_hidden_by_a_captured_step_is_applied_after_recapture() -> None:
    def switch(agent: Agent) -> None:
        if agent.current_step == 6:
            agent.set_mode([(1, 0)], "exact_delta", "a test")

    def capture_twice(trained: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        return captured(trained, stepped) + captured(trained, stepped)

    result = train_watched(model(), capture_twice, during=switch, **NATIVE)
    [switched] = result.listener.of(wire.Switched)
    assert (switched.outcome, switched.step) == ("applied", STEPS)  # the first uncaptured step applies it
    assert result.rows == [2 * STEPS * 8] * 2 + [STEPS * (8 + ROWS * LENGTH)] * 2


def test_sampling_every_row_counts_like_the_kernels() -> None:
    native, kernels = train_watched(model(), eager, **{**NATIVE, "probe_rows": 10**6}), train_watched(model(), eager)
    assert native.rows == kernels.rows
    measured, counted = native.words[0][:2], kernels.words[0][:2]  # the first layer's input is bit-identical
    for slot in (Slot.TIED_ROWS_BF16, Slot.SCORE_MAX, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        near = slot_values(counted, slot)
        np.testing.assert_allclose(slot_values(measured, slot), near, rtol=1e-5, atol=2e-3, err_msg=slot.name)


class TwoDeviceGPT(nn.Module):
    """A tiny GPT whose second block and output projection are on another GPU."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.gpt = tiny_gpt().to(first)
        self.second = second
        self.gpt.blocks[1].to(second)
        self.gpt.head.to(second)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gpt.embedding(ids.to(self.gpt.embedding.weight.device))
        x = (x + self.gpt.blocks[0](x)).to(self.second)
        return self.gpt.head(x + self.gpt.blocks[1](x))  # type: ignore[no-any-return]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("first", "second"), [("cuda:1", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_losses_and_norms_of_every_gpu_are_reported_unchanged(first: str, second: str) -> None:
    model, listener, losses = TwoDeviceGPT(first, second), Listener(), []
    with attach(model, sample_every_steps=1, norms_every_steps=1, quiet=True) as agent:
        agent.subscribe(listener)
        for step in range(1, 30):
            ids = batch(step)
            loss = next_token_loss(model(ids), ids.to(second))
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            agent.step(loss)
        faults = dict(agent.faults)
    samples = listener.of(wire.Sample)
    assert faults == {}
    np.testing.assert_allclose([sample.loss for sample in samples], [float(loss) for loss in losses], rtol=1e-6)
    norms = samples[0].query_norm
    assert norms is not None
    assert np.isfinite(norms.numpy()).all()
