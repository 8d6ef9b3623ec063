"""Properties of the Triton kernels that need a GPU: large offsets, graphs, compilation, no host synchronisation."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.kernels.triton_calls import CUDA, Inputs, attend, random_inputs, scaled, truth
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, launch, new_state
from foreshock.kernels.flash_attention.op import attention_backward, attention_forward

pytestmark = [
    pytest.mark.skipif(not CUDA, reason="needs a GPU; benchmarks/results/ has the results of the last run"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # inductor imports TorchScript
]


def leaves(length: int = 256, dim: int = 64, heads: int = 4, batch: int = 2) -> tuple[Tensor, ...]:
    inputs = random_inputs(length, length, dim, heads, heads, batch)
    return tuple(x.requires_grad_() for x in inputs[:3])


def attention_with_state(state: Tensor, modes: Tensor | None = None) -> Callable[..., Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attention(query, key, value, causal=True, state=state, modes=modes)
        assert isinstance(out, Tensor)
        return out

    return call


def counts_of(state: Tensor, slot: Slot = Slot.ROWS) -> list[float]:
    return slot_values(state.cpu().numpy(), slot).tolist()  # type: ignore[no-any-return]


@pytest.mark.promise("K5")
def test_last_rows_of_131072_keys_are_correct() -> None:
    length = 131_072
    inputs = random_inputs(length, length, 64, heads=1, kv_heads=1)
    given = attend(inputs, scaled(64, causal="top_left"))
    last = Inputs(inputs.query[:, :, -64:], inputs.key, inputs.value, inputs.grad[:, :, -64:])
    exact = truth(last, scaled(64, causal="bottom_right"))
    torch.testing.assert_close(given.out[:, :, -64:].double(), exact.out, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(given.grad_query[:, :, -64:].double(), exact.grad_query, rtol=2e-2, atol=1e-3)
    assert given.counts(Slot.ROWS) == [length]


@pytest.mark.promise("K7")
@pytest.mark.parametrize("layout", ["many rows", "large stride"])
def test_tensors_with_offsets_beyond_2_to_the_31_elements_are_correct(layout: str) -> None:
    shape = (1, 9, 2**21, 128) if layout == "many rows" else (1, 2, 4096, 128)
    if layout == "many rows":
        query = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        key, value = (torch.randn(1, 9, 128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        grad = query
    else:
        wide = torch.empty(1, 4096, 2**20, dtype=torch.bfloat16, device="cuda")
        query = torch.as_strided(wide, shape, (1, 128, 2**20, 1))
        query.normal_()
        key, value, grad = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    spec = scaled(128)
    given = attend(Inputs(query, key, value, grad), spec)
    rows = slice(-32, None)
    sample = Inputs(query[:, -1:, rows], key[:, -1:], value[:, -1:], grad[:, -1:, rows])
    exact = truth(sample, spec)
    torch.testing.assert_close(given.out[:, -1:, rows].double(), exact.out, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(given.grad_query[:, -1:, rows].double(), exact.grad_query, rtol=3e-2, atol=3e-2)
    assert given.counts(Slot.ROWS) == [query.shape[2]] * query.shape[1]


@pytest.mark.promise("K10")
def test_training_step_does_not_synchronise_with_the_host() -> None:
    tensors, state = leaves(), new_state(4, "cuda")
    modes = torch.zeros(4, dtype=torch.int32, device="cuda")
    attention_with_state(state, modes)(*tensors).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_with_state(state, modes)(*tensors).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts_of(state) == [1024.0] * 4


@pytest.mark.promise("K10")
def test_cuda_graph_counts_every_replay_and_applies_changed_modes() -> None:
    tensors, state = leaves(), new_state(4, "cuda")
    modes = torch.zeros(4, dtype=torch.int32, device="cuda")
    grad = torch.randn_like(tensors[0])

    def step() -> tuple[Tensor, ...]:
        out = attention_with_state(state, modes)(*tensors)
        return (out, *torch.autograd.grad(out, tensors, grad))

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = [x.clone() for x in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    state.copy_(new_state(4, "cuda"))
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    assert counts_of(state) == [3 * 512.0] * 4
    modes.fill_(int(Mode.EXACT_DELTA | Mode.PAPER_SOFTMAX))
    state.copy_(new_state(4, "cuda"))
    graph.replay()
    counts = state.clone()
    state.copy_(new_state(4, "cuda"))
    step()
    assert not torch.equal(eager[0], captured[0])
    assert not torch.equal(eager[1], captured[1])
    assert counts_of(counts, Slot.SHIFTED_ROWS) == counts_of(state, Slot.SHIFTED_ROWS)
    assert sum(counts_of(counts, Slot.SHIFTED_ROWS)) > 0


@pytest.mark.promise("K10")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_attention_computes_and_counts_the_same(checkpointed: bool) -> None:
    tensors, states = leaves(), [new_state(4, "cuda"), new_state(4, "cuda")]

    def model(state: Tensor) -> Callable[..., Tensor]:
        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_with_state(state)(q * 1.0, k, v) * 2.0

        if not checkpointed:
            return block
        return lambda q, k, v: checkpoint(block, q, k, v, use_reentrant=False)

    results = []
    for state, compiled in zip(states, (False, True), strict=True):
        call = torch.compile(model(state), fullgraph=True) if compiled else model(state)
        out = call(*tensors)
        results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert counts_of(states[0]) == counts_of(states[1]) == [512.0] * 4


@pytest.mark.promise("K10")
@pytest.mark.parametrize("layout", ["rows of heads", "heads of rows"])
def test_operators_pass_opcheck_and_keep_the_layout_of_the_query(layout: str) -> None:
    shape = (2, 64, 4, 64)
    query, key, value, grad = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(4)
    )
    if layout == "heads of rows":
        query, key, value, grad = (x.contiguous() for x in (query, key, value, grad))
    state, modes = new_state(4, "cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    options = (None, None, 64, 64, None, AttentionSpec(0.125, "top_left").text)
    inputs = tuple(x.requires_grad_() for x in (query, key, value))
    torch.library.opcheck(attention_forward, (*inputs, state, modes, *options))
    saved = attention_forward(*(x.detach() for x in inputs), state, modes, *options)
    torch.library.opcheck(attention_backward, (grad, *(x.detach() for x in inputs), *saved, state, modes, *options))
    assert saved[0].stride() == query.stride()


@pytest.mark.promise("K10")
def test_side_stream_and_autocast_do_not_change_the_output() -> None:
    tensors = leaves()
    plain = attention_with_state(new_state(4, "cuda"))(*tensors)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_side_stream = attention_with_state(new_state(4, "cuda"))(*tensors)
    stream.synchronize()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast = attention_with_state(new_state(4, "cuda"))(*(x.detach().float() for x in tensors))
    assert torch.equal(plain, on_side_stream)
    assert torch.equal(plain, cast)


@pytest.mark.promise("K6")
def test_transposed_inputs_are_not_copied() -> None:
    tensors = [torch.randn(1, 8192, 16, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3)]
    flash_attention(*tensors, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attention(*tensors, causal=True)
    assert isinstance(out, Tensor)
    extra_bytes = torch.cuda.max_memory_allocated() - before
    # O and its residual with 2 bytes per element each, and two fp32 numbers per row.
    assert extra_bytes <= 2 * out.numel() * 2 + 8 * out.numel() // 64 + 4096


@pytest.mark.promise("K9")
def test_memory_around_the_inputs_is_not_written() -> None:
    length, dim = 333, 40
    inputs = random_inputs(length, length, dim, heads=2, kv_heads=2)
    padded = [torch.full((1, 2, length + 64, dim + 24), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    views = [x[:, :, 32 : 32 + length, 8 : 8 + dim] for x in padded]
    for view, given in zip(views, inputs[:3], strict=True):
        view.copy_(given)
    before = [x.clone() for x in padded]
    result = attend(Inputs(views[0], views[1], views[2], inputs.grad), scaled(dim))
    assert all(torch.equal(a, b) for a, b in zip(before, padded, strict=True))
    assert all(x.isfinite().all() for x in result[:-1])


def test_switching_one_head_leaves_the_other_heads_bitwise_unchanged() -> None:
    tensors = leaves(heads=4)
    results = []
    for mode in (Mode.PLAIN, Mode.EXACT_DELTA):
        modes = torch.tensor([0, 0, int(mode), 0], dtype=torch.int32, device="cuda")
        out = attention_with_state(new_state(4, "cuda"), modes)(*tensors)
        results.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    for plain, exact in zip(*results, strict=True):
        assert torch.equal(plain[:, [0, 1, 3]], exact[:, [0, 1, 3]])
    assert not math.isclose(results[0][1][:, 2].double().sum().item(), results[1][1][:, 2].double().sum().item())


def test_backward_needs_30_bytes_per_row_in_addition_to_its_gradients() -> None:
    inputs = random_inputs(4096, 4096, 64, 16, 16)
    attend(inputs, scaled(64, causal="top_left"))
    query, key, value, grad = inputs
    rest = (None, None, 4096, 4096, None, scaled(64, causal="top_left").text)
    state = new_state(16, "cuda")
    saved = attention_forward(query, key, value, state, None, *rest)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = attention_backward(grad, query, key, value, *saved, state, None, *rest)
    extra_bytes = torch.cuda.max_memory_allocated() - before
    assert extra_bytes <= sum(2 * x.numel() for x in grads) + 30 * 16 * 4096 + 2**16


def test_concurrent_backwards_on_two_streams_count_every_row_in_one_state() -> None:
    state, rows, rounds = new_state(4, "cuda"), 65, 50
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    graphs, graph_inputs = [], []
    for stream in streams:
        tensors = leaves(rows, batch=1)
        graph_inputs.append(tensors)  # the graph reads them at these addresses
        torch.autograd.grad(attention_with_state(state)(*tensors).sum(), tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(20):
                torch.autograd.grad(attention_with_state(state)(*tensors).sum(), tensors)
        graphs.append(graph)
    state.copy_(new_state(4, "cuda"))
    torch.cuda.synchronize()
    for _ in range(rounds):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert counts_of(state) == [rounds * 2 * 20 * rows * 1.0] * 4


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_cached_launch_computes_the_same_as_a_new_one(causal: str) -> None:
    """Calls of different sizes, strides, alignment, groups and windows alternate, each twice, then without a cache."""
    turns = []
    for length, heads, options in (
        (48, 2, {}), (64, 4, {}), (49, 2, {}), (1, 2, {}), (48, 2, {"scale": 0.5}), (48, 2, {"window_left": 16}),
        (48, 2, {"window_left": 1}), (48, 2, {"softcap": 9.0}),
    ):  # fmt: skip
        inputs = random_inputs(length, length, 32, heads, 2, batch=2, seed=length + heads)
        flat = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:] for x in inputs]
        shifted = Inputs(*(memory.view_as(x).copy_(x) for memory, x in zip(flat, inputs, strict=True)))
        strided = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
        turns += [(given, scaled(32, **({"causal": causal} | options))) for given in (inputs, shifted, strided)]
    first = [attend(*turn) for turn in turns]
    again = [attend(*turn) for turn in reversed(turns)][::-1]
    for turn, one, other in zip(turns, first, again, strict=True):
        launch._CALLS.clear()
        for name, a, b, c in zip(one._fields, one, other, attend(*turn), strict=True):
            assert torch.equal(a, c), name
            assert torch.equal(b, c), name
