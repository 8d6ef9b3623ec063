"""The agent on a GPU: no host synchronisation in the step, CUDA graphs, and the same counts as in eager mode."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.executions import Loop, alone, unwatched, watched
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
    for given in tokens():
        loss = loss_of(model, given)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stepped(loss)
        losses.append(loss.detach())
    return losses


def captured(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
    """Forward, backward and update in one CUDA graph, after three steps on a side stream, as PyTorch's manual says."""
    optimizer, losses = adamw(model), []
    given = tokens()
    fed = given[0].clone()

    def one() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, fed)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            fed.copy_(given[step])
            losses.append(one().detach().clone())
            stepped(losses[-1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = one()
    for step in range(3, STEPS):
        fed.copy_(given[step])
        graph.replay()
        stepped(loss)
        losses.append(loss.detach().clone())
    return losses


def reduce_overhead(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
    """torch.compile's own CUDA graphs, for forward and backward each."""
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    optimizer, losses = adamw(model), []
    for given in tokens():
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = loss_of(compiled, given)
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
def test_a_gpu_step_changes_no_bit_and_counts_what_eager_counts(loop: Loop) -> None:
    expected = alone(model(), loop)
    got = watched(model(), loop)
    got.assert_same_bits(expected)
    plain = watched(model(), eager)
    assert got.rows == [STEPS * ROWS * LENGTH] * 4
    # the GPU may be so far behind that a sample carries several steps: what counts is all of them together
    mine, theirs = merge_words(got.words), merge_words(plain.words)
    counts, maxima = list(COUNT_SLOTS), [Slot.SCORE_MAX, Slot.ROW_MAX_ABS]
    if loop is captured:  # inductor rounds the products round the operator otherwise than eager
        np.testing.assert_array_equal(mine[:, counts + maxima], theirs[:, counts + maxima])
        np.testing.assert_allclose(mine.view(np.float64)[:, SUMS], theirs.view(np.float64)[:, SUMS], rtol=1e-12)


@pytest.mark.execution("nanoGPT", "CUDA graphs")
@pytest.mark.parametrize("loop", [captured, reduce_overhead])
def test_a_switch_reaches_a_captured_step_without_a_new_capture(loop: Loop) -> None:
    got = watched(model(), loop, during=switch_after_step_6, mitigation="exact_delta")
    unswitched = watched(model(), loop)
    assert [torch.equal(a, b) for a, b in zip(got.losses, unswitched.losses, strict=True)][:7] == [True] * 7
    assert not all(torch.equal(a, b) for a, b in zip(got.weights, unswitched.weights, strict=True))
    if loop is captured:
        got.assert_same_bits(watched(model(), eager, during=switch_after_step_6))
    modes = {s.step: s.modes.numpy().tolist() for s in got.listener.of(wire.Sample)}
    assert all(mode == ([0, 1, 1, 0] if step > 6 else [0, 0, 0, 0]) for step, mode in modes.items())
    assert max(modes) == STEPS


def test_torch_compile_really_made_cuda_graphs_of_the_watched_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    recorded: list[Any] = []
    record = cudagraph_trees.CUDAGraphNode._record

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.append(self)
        return record(self, *args, **kwargs)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "_record", counting)
    counters.clear()
    watched(model(), reduce_overhead)
    assert len(recorded) == 2  # one forward, one backward, and neither again
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.promise("A14")
@pytest.mark.parametrize("loop", [eager, captured, reduce_overhead])
def test_a_step_with_everything_on_never_waits_for_the_device(loop: Loop) -> None:
    strict: list[int] = []

    def no_more_waiting(agent: Agent) -> None:
        # kernels and modules load, and graphs are captured, in the first steps
        if agent.current_step == 5:
            torch.cuda.set_sync_debug_mode("error")
            strict.append(agent.current_step)
        if agent.current_step == 6:
            agent.set_mode([(0, 1)], "exact_delta", "a test")

    try:
        got = watched(model(), loop, during=no_more_waiting, norms_every_steps=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strict == [5]
    samples = got.listener.of(wire.Sample)
    assert samples[-1].step == STEPS
    assert sum(slot_values(words, Slot.ROWS)[0] for words in got.words) == STEPS * ROWS * LENGTH
    assert all(s.loss is not None for s in samples)
    assert samples[-1].modes.numpy().tolist() == [0, 1, 0, 0]
    assert (samples[-1].query_norm.numpy() > 0).all()
    assert got.listener.of(wire.Started)[0].layers[0].served_by == "kernel"


@pytest.mark.execution("Llama", "eager")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_padded_batch_of_a_transformers_model_keeps_its_bits_and_is_measured() -> None:
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
        for given in tokens():
            loss = model(input_ids=given, attention_mask=mask).logits[mask.bool()].float().square().mean()
            torch.autograd.backward(loss)
            stepped(loss)
            losses.append(loss.detach())
        return losses

    got = watched(llama(), loop, probe_rows=9)
    assert got.rows == [STEPS * 9] * 8
    assert all(torch.equal(a, b) for a, b in zip(got.losses, loop(llama(), lambda loss: None), strict=True))


KEEP: dict[str, Any] = {"attention": "keep", "probe_rows": 8}
LOOPS = [
    pytest.param(eager, marks=pytest.mark.execution("nanoGPT", "keep")),
    pytest.param(captured, marks=pytest.mark.execution("nanoGPT", "keep")),
    pytest.param(reduce_overhead, marks=pytest.mark.execution("nanoGPT", "keep")),
]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_gpu_step_keeps_its_attention_to_the_last_bit(loop: Loop) -> None:
    got = watched(model(), loop, **KEEP)
    got.assert_same_bits(unwatched(model(), loop))
    assert got.rows == [STEPS * 8] * 4


@pytest.mark.parametrize("loop", [eager, captured, reduce_overhead])
def test_a_measured_step_never_waits_for_the_device(loop: Loop) -> None:
    def no_more_waiting(agent: Agent) -> None:
        if agent.current_step == 5:  # kernels and modules load, and graphs are captured, in the first steps
            torch.cuda.set_sync_debug_mode("error")

    try:
        got = watched(model(), loop, during=no_more_waiting, norms_every_steps=1, **KEEP)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.rows == [STEPS * 8] * 4


def test_torch_compile_makes_its_graphs_anew_for_a_switch_and_a_capture_by_hand_says_that_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def switch(agent: Agent) -> None:
        if agent.current_step == 6:
            agent.set_mode([(1, 0)], "exact_delta", "a test")

    got = watched(model(), reduce_overhead, during=switch, **KEEP)
    assert got.rows == [STEPS * 8] * 2 + [6 * 8 + 4 * ROWS * LENGTH] * 2
    caplog.clear()
    assert [each.outcome for each in got.listener.of(wire.Switched)] == ["applied"]
    got = watched(model(), captured, during=switch, **KEEP)
    assert got.rows == [STEPS * 8] * 4
    assert "Capture it again" in caplog.text
    assert got.listener.of(wire.Switched) == []


def test_a_switch_that_a_captured_step_hid_is_applied_once_the_step_is_captured_again() -> None:
    def switch(agent: Agent) -> None:
        if agent.current_step == 6:
            agent.set_mode([(1, 0)], "exact_delta", "a test")

    def twice(trained: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        return captured(trained, stepped) + captured(trained, stepped)

    got = watched(model(), twice, during=switch, **KEEP)
    [switched] = got.listener.of(wire.Switched)
    assert (switched.outcome, switched.step) == ("applied", STEPS)  # the first step that ran uncaptured shows it
    assert got.rows == [2 * STEPS * 8] * 2 + [STEPS * (8 + ROWS * LENGTH)] * 2


def test_every_row_sampled_gives_what_our_kernels_count() -> None:
    kept, served = watched(model(), eager, **{**KEEP, "probe_rows": 10**6}), watched(model(), eager)
    assert kept.rows == served.rows
    measured, counted = kept.words[0][:2], served.words[0][:2]  # the first layer's input is the same to the last bit
    for slot in (Slot.TIED_ROWS_BF16, Slot.SCORE_MAX, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        near = slot_values(counted, slot)
        np.testing.assert_allclose(slot_values(measured, slot), near, rtol=1e-5, atol=2e-3, err_msg=slot.name)


class Spread(nn.Module):
    """A tiny GPT whose second block and head lie on another GPU."""

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
def test_losses_and_norms_of_every_gpu_arrive_as_they_were(first: str, second: str) -> None:
    model, heard, losses = Spread(first, second), Listener(), []
    with attach(model, sample_every_steps=1, norms_every_steps=1, quiet=True) as agent:
        agent.subscribe(heard)
        for step in range(1, 30):
            ids = batch(step)
            loss = next_token_loss(model(ids), ids.to(second))
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            agent.step(loss)
        faults = dict(agent.faults)
    samples = heard.of(wire.Sample)
    assert faults == {}
    np.testing.assert_allclose([sample.loss for sample in samples], [float(loss) for loss in losses], rtol=1e-6)
    norms = samples[0].query_norm
    assert norms is not None
    assert np.isfinite(norms.numpy()).all()
