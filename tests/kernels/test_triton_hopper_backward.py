"""The Hopper backward on a Hopper GPU: which calls use it, its accuracy compared with Triton's, and its side effects.
All tests but one use Triton's forward, so that their failures come from the backward."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from tests.kernels.triton_calls import ON_HOPPER, Inputs, flags, random_inputs, scaled, truth
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, launch, new_state
from foreshock.kernels.flash_attention.known_modes import note_modes
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.spec import Arguments, Saved
from foreshock.kernels.flash_attention.triton_kernels import backward, forward, hopper
from foreshock.kernels.flash_attention.triton_kernels.passes import Tensors
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

pytestmark = ON_HOPPER
MIXED = (
    Mode.PLAIN,
    Mode.ROW_CORRECTED,
    Mode.PAPER_SOFTMAX,
    Mode.EXACT_DELTA,
    Mode.EXACT_DELTA | Mode.ROW_CORRECTED,
    Mode.PAPER_SOFTMAX | Mode.ROW_CORRECTED,
    Mode.PAPER_SOFTMAX,
    Mode.PLAIN,
)
CORRECTED = [bool(mode & Mode.ROW_CORRECTED) for mode in MIXED]
HOPPER_PASSES = {"rows", "hopper backward", "hopper dQ", "count"}
SHARED_PASSES = {"hopper dK", "hopper dV"}
"""In addition to HOPPER_PASSES if query heads share a key head."""
CORRECTED_PASSES = HOPPER_PASSES | {"dQ of corrected heads"}
TRITON_PASSES = {"rows", "dQ", "dK dV", "count"}
ORIGINAL_LAUNCHED = hopper.launched


@pytest.fixture(autouse=True)
def defaults_and_empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empties the cache of calls, which record their kernel. By default, each program takes one query head, short calls
    whose heads share a key head use the Hopper backward too, and forwards are Triton's."""
    monkeypatch.delenv("FORESHOCK_KERNELS", raising=False)
    monkeypatch.setattr(hopper, "_SHORT", 0)
    set_heads_per_program(1, monkeypatch)
    monkeypatch.setattr(hopper, "launched", lambda *_: False)
    yield
    torch.use_deterministic_algorithms(False)
    launch._CALLS.clear()


def set_heads_per_program(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each program take `members` query heads, or all heads of a key head if those are fewer."""
    monkeypatch.setattr(hopper, "members_of", lambda call, _: min(members, call.heads // call.kv_heads))
    launch._CALLS.clear()


class Backward(NamedTuple):
    """The results of a backward and its state."""

    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    state: Tensor


class Problem:
    """Inputs, modes and log-sum-exp gradient of one call, and the tensors that its forward saves."""

    def __init__(
        self, inputs: Inputs, spec: AttentionSpec, modes: Tensor | None = None, grad_lse: Tensor | None = None
    ) -> None:
        self.inputs, self.spec, self.modes, self.grad_lse = inputs, spec, modes, grad_lse
        lengths = inputs.query.shape[2], inputs.key.shape[2]
        self.given = Arguments(modes, None, None, *lengths, None, spec)
        query, key, value, _ = inputs
        self.saved = Saved(query, key, value, *forward.attention_forward(query, key, value, self.given))

    def dispatched(self) -> Backward:
        state = new_state(self.inputs.query.shape[1], "cuda")
        grads = backward.attention_backward(self.inputs.grad, self.saved, state, self.given, self.grad_lse)
        return Backward(*grads, state)

    def by_triton(self) -> Backward:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper, "takes_backward", lambda *_: False)
            return self.dispatched()

    def passes(self) -> set[str]:
        """The passes that are launched."""
        launch._CALLS.clear()
        self.dispatched()
        (call,) = launch._CALLS.values()
        names = [known[0] for known in call.ready]
        return {name if isinstance(name, str) else name[0] for name in names}


def in_bshd_layout(inputs: Inputs) -> Inputs:
    """The same numbers with memory layout [B, S, H, D]."""
    return Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))


def with_row_gaps(inputs: Inputs) -> Inputs:
    """The same numbers with gaps between their rows in memory."""
    wide = [torch.full((*x.shape[:3], 144), 7.0, dtype=x.dtype, device="cuda")[..., :128] for x in inputs]
    return Inputs(*(to.copy_(x) for to, x in zip(wide, inputs, strict=True)))


def with_modes(length: int, causal: str, kv_heads: int = 8, *modes: Mode) -> Problem:
    """Eight heads whose rows have several largest scores."""
    inputs = random_inputs(length, length, 128, 8, kv_heads, 2)
    inputs.key[:, :, length // 2 : length // 2 * 2] = inputs.key[:, :, : length // 2]
    return Problem(inputs, scaled(128, causal=causal), flags(*(modes or MIXED)))


def assert_as_accurate(result: Backward, triton_result: Backward, problem: Problem) -> None:
    exact = truth(problem.inputs, problem.spec, grad_lse=problem.grad_lse)
    for name in ("grad_query", "grad_key", "grad_value"):
        true_gradient = getattr(exact, name)
        error, allowed = (float((getattr(x, name).double() - true_gradient).norm()) for x in (result, triton_result))
        # The last term is the fp32 error of gradients that are 0, such as dQ of a row that sees one key.
        slack = 1e-5 * float(true_gradient.norm()) + 2e-6 * true_gradient.numel() ** 0.5
        assert error <= 1.1 * allowed + slack, f"the error of {name} is {error:.2e}, Triton's is {allowed:.2e}"


def assert_equal_up_to_summation_order(result: Backward, again: Backward, heads: list[bool] | None = None) -> None:
    """Bitwise equal, except dQ of heads that are not True in `heads`, and dK and dV if query heads share a key head.
    These may differ by one step of their dtype, in few elements, plus the fp32 error of the additions."""
    assert torch.equal(result.state, again.state)
    if heads is not None:
        assert torch.equal(result.grad_query[:, heads], again.grad_query[:, heads])
    added = ["grad_query"]
    if result.grad_key.shape[1] < result.grad_query.shape[1]:
        added += ["grad_key", "grad_value"]
    else:
        assert torch.equal(result.grad_key, again.grad_key)
        assert torch.equal(result.grad_value, again.grad_value)
    for name in added:
        one, other = getattr(result, name).double(), getattr(again, name).double()
        step = 2.0**-7 if result.grad_query.dtype == torch.bfloat16 else 2.0**-10
        larger = torch.maximum(one.abs(), other.abs())
        assert bool(((one - other).abs() <= step * larger + 2.0**-16 * larger.amax()).all()), name
        assert (one - other).norm() <= 1e-3 * one.norm(), name


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_supported_calls_use_the_hopper_backward(causal: str) -> None:
    inputs, spec = random_inputs(300, 300, 128), scaled(128, causal=causal)
    for given in (inputs, in_bshd_layout(inputs), with_row_gaps(inputs)):
        assert Problem(given, spec).passes() == HOPPER_PASSES
    assert Problem(random_inputs(300, 300, 128, 8, 2, 2, torch.float16), spec).passes() == HOPPER_PASSES | SHARED_PASSES
    assert Problem(inputs, spec, flags(Mode.PLAIN, Mode.ROW_CORRECTED)).passes() == CORRECTED_PASSES
    assert Problem(random_inputs(300, 200, 128), scaled(128)).passes() == HOPPER_PASSES


def test_unsupported_calls_use_triton() -> None:
    inputs = random_inputs(256, 256, 128)
    moved = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x) for x in inputs]
    repeated = inputs._replace(grad=inputs.grad[:, :1].expand_as(inputs.grad))
    for given, spec in (
        (inputs, scaled(128, window_left=64)),
        (inputs, scaled(128, softcap=20.0)),
        (Inputs(*moved), scaled(128)),
        (repeated, scaled(128)),
        (random_inputs(256, 256, 64), scaled(64)),
        (random_inputs(256, 300, 128), scaled(128, causal="bottom_right")),
    ):
        assert Problem(given, spec).passes() == TRITON_PASSES


LENGTHS = (1, 2, 64, 127, 128, 129, 1000, 1024)
CASES = [
    *((torch.bfloat16, n, n, causal, 4, 4, 2) for n in LENGTHS for causal in ("none", "top_left")),
    *((torch.bfloat16, 4096, 4096, causal, 3, 3, 1) for causal in ("none", "top_left")),
    (torch.bfloat16, 333, 777, "none", 4, 1, 3),
    (torch.bfloat16, 777, 333, "none", 2, 2, 1),
    (torch.bfloat16, 1111, 1111, "top_left", 8, 2, 3),
    (torch.bfloat16, 129, 129, "none", 32, 4, 2),
    (torch.bfloat16, 4096, 4096, "top_left", 8, 1, 1),
    (torch.bfloat16, 1024, 1024, "bottom_right", 16, 16, 16),
    (torch.float16, 777, 777, "none", 4, 2, 1),
    (torch.float16, 1111, 1111, "top_left", 4, 2, 1),
]


@pytest.mark.parametrize(("dtype", "length_q", "length_k", "causal", "heads", "kv_heads", "batch"), CASES)
def test_every_length_is_as_accurate_as_triton_and_equal_up_to_summation_order(
    dtype: torch.dtype, length_q: int, length_k: int, causal: str, heads: int, kv_heads: int, batch: int
) -> None:
    inputs = random_inputs(length_q, length_k, 128, heads, kv_heads, batch, dtype)
    problem = Problem(inputs, scaled(128, causal=causal))
    assert problem.passes() == (HOPPER_PASSES if heads == kv_heads else HOPPER_PASSES | SHARED_PASSES)
    result, triton_result = problem.dispatched(), problem.by_triton()
    assert_as_accurate(result, triton_result, problem)
    assert torch.equal(result.state, triton_result.state)
    for _ in range(5):
        assert_equal_up_to_summation_order(result, problem.dispatched())
    for other in (in_bshd_layout(inputs), with_row_gaps(inputs)):
        assert_equal_up_to_summation_order(result, Problem(other, problem.spec).dispatched())


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_backward_is_accurate_for_any_number_of_query_heads_per_program(
    causal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(random_inputs(700, 700, 128, 16, 2, 2), scaled(128, causal=causal))
    triton_result = problem.by_triton()
    for members in (1, 2, 4, 8):
        set_heads_per_program(members, monkeypatch)
        assert problem.passes() == (HOPPER_PASSES if members == 8 else HOPPER_PASSES | SHARED_PASSES)
        result = problem.dispatched()
        assert_as_accurate(result, triton_result, problem)
        again = problem.dispatched()
        assert_equal_up_to_summation_order(result, again)
        assert torch.equal(result.grad_key, again.grad_key) or members < 8


@pytest.mark.parametrize("length", [129, 200, 1000])
def test_rows_with_all_scores_far_below_zero_have_finite_gradients(length: int) -> None:
    inputs = random_inputs(length, length, 128, 4, 2)
    inputs.query[..., 0] = 200.0
    inputs.key[..., 0] = -8.0
    problem = Problem(inputs, scaled(128))
    assert float(problem.saved.lse.max()) < -89.0  # exp(-lse) overflows in fp32
    assert_as_accurate(problem.dispatched(), problem.by_triton(), problem)


def test_memory_around_the_gradients_is_not_written() -> None:
    for causal, length in (("none", 400), ("top_left", 400), ("none", 1)):
        problem = Problem(random_inputs(length, length, 128), scaled(128, causal=causal))
        query, key, value, grad = problem.inputs
        call = call_of(query, key, value, problem.given, grad, *problem.saved[3:])
        tensors = Tensors(grad, *problem.saved, None, None, None, None, None)
        size, around = query.numel(), 64 * 128
        longer = [torch.full((size + 2 * around,), 7.0, dtype=query.dtype, device="cuda") for _ in range(3)]
        grads = tuple(x[around : around + size].view_as(query) for x in longer)
        chosen = configs(call.capability, call.block_d, call.mean_keys)
        backward.launch_backward(call, chosen, tensors, grads)  # type: ignore[arg-type]
        assert_equal_up_to_summation_order(
            Backward._make([*grads, new_state(2, "cuda")]),
            problem.dispatched()._replace(state=new_state(2, "cuda")),
        )
        for x in longer:
            assert bool((x[:around] == 7.0).all())
            assert bool((x[around + size :] == 7.0).all())


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize(("length", "kv_heads"), [(640, 8), (1000, 2)])
def test_heads_of_mixed_modes_are_as_accurate_as_triton(length: int, kv_heads: int, causal: str) -> None:
    problem = with_modes(length, causal, kv_heads)
    assert problem.passes() == (CORRECTED_PASSES if kv_heads == 8 else CORRECTED_PASSES | SHARED_PASSES)
    result, triton_result = problem.dispatched(), problem.by_triton()
    assert_as_accurate(result, triton_result, problem)
    assert torch.equal(result.grad_query[:, CORRECTED], triton_result.grad_query[:, CORRECTED])
    assert torch.equal(result.state, triton_result.state)
    assert min(slot_values(result.state.cpu().numpy(), Slot.TIED_ROWS_BF16)) > 0
    for _ in range(10):
        assert_equal_up_to_summation_order(result, problem.dispatched(), CORRECTED)


def test_plain_modes_change_nothing_and_dq_of_corrected_heads_is_deterministic() -> None:
    plain = with_modes(640, "top_left", 8, *[Mode.PLAIN] * 8)
    assert_equal_up_to_summation_order(plain.dispatched(), Problem(plain.inputs, plain.spec).dispatched())
    corrected = with_modes(640, "top_left", 8, *[Mode.ROW_CORRECTED] * 8)
    assert_equal_up_to_summation_order(corrected.dispatched(), corrected.dispatched(), [True] * 8)


@pytest.mark.parametrize("modes", [None, MIXED])
def test_log_sum_exp_gradient_is_included(modes: tuple[Mode, ...] | None) -> None:
    inputs = random_inputs(500, 500, 128, 8, 4)
    grad_lse = torch.randn(inputs.query.shape[:3], device="cuda")
    given = None if modes is None else flags(*modes)
    problem = Problem(inputs, scaled(128, causal="top_left"), given, grad_lse)
    assert problem.passes() == SHARED_PASSES | (HOPPER_PASSES if modes is None else CORRECTED_PASSES)
    assert_as_accurate(problem.dispatched(), problem.by_triton(), problem)


@pytest.mark.parametrize("modes", [None, MIXED])
def test_deterministic_mode_uses_triton_from_the_next_call_on(modes: tuple[Mode, ...] | None) -> None:
    problem = with_modes(640, "top_left")
    problem = Problem(problem.inputs, problem.spec, None if modes is None else flags(*modes))
    result, triton_result = problem.dispatched(), problem.by_triton()
    assert problem.passes() == (HOPPER_PASSES if modes is None else CORRECTED_PASSES)
    torch.use_deterministic_algorithms(True)
    assert problem.passes() == TRITON_PASSES
    launch._CALLS.clear()
    for turn in range(8):  # each choice is new, then cached, then launched with addresses
        deterministic = turn % 2 == 1
        torch.use_deterministic_algorithms(deterministic)
        given = problem.dispatched()
        if deterministic:
            assert all(torch.equal(a, b) for a, b in zip(given, triton_result, strict=True))
        else:
            assert_equal_up_to_summation_order(given, result)


def test_known_modes_choose_the_passes_but_do_not_change_the_result() -> None:
    for modes, passes in (
        ([Mode.PLAIN, Mode.EXACT_DELTA] * 4, HOPPER_PASSES),
        (list(MIXED), CORRECTED_PASSES),
        ([Mode.ROW_CORRECTED] * 8, TRITON_PASSES),
    ):
        problem = with_modes(333, "top_left", 8, *modes)
        unknown, triton = problem.dispatched(), problem.by_triton()
        assert problem.modes is not None
        note_modes(problem.modes, modes)
        assert problem.passes() == passes
        if passes is TRITON_PASSES:  # tiles may differ
            assert_as_accurate(problem.dispatched(), triton, problem)
        else:
            assert_equal_up_to_summation_order(problem.dispatched(), unknown)


@pytest.mark.parametrize("noted", [False, True])
def test_cuda_graph_matches_eager_and_applies_changed_modes(noted: bool) -> None:
    plain = [Mode.PLAIN] * 8
    problem = with_modes(640, "top_left", 8, *plain)
    modes, state = problem.modes, new_state(8, "cuda")
    assert modes is not None
    query, key, value = (x.clone().requires_grad_() for x in problem.inputs[:3])

    def step() -> Backward:
        state.zero_()
        out = flash_attention(query, key, value, causal=True, state=state, modes=modes)
        assert isinstance(out, Tensor)
        return Backward._make([*torch.autograd.grad(out, (query, key, value), problem.inputs.grad), state])

    eager = []
    for given in (plain, list(MIXED)):
        modes.copy_(flags(*given))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            eager.append(Backward(*(x.clone() for x in step())))
        torch.cuda.current_stream().wait_stream(stream)
    modes.copy_(flags(*plain))
    if noted:
        note_modes(modes, plain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for given, wanted in zip((plain, list(MIXED), plain), (*eager, eager[0]), strict=True):
        modes.copy_(flags(*given))
        graph.replay()
        assert_equal_up_to_summation_order(captured, wanted, CORRECTED if given != plain else None)
    assert not torch.equal(eager[0].grad_key, eager[1].grad_key)


def test_compiled_backward_matches_eager_up_to_summation_order() -> None:
    problem = with_modes(640, "top_left")

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attention(query, key, value, causal=True, modes=problem.modes)
        assert isinstance(out, Tensor)
        return out

    query, key, value = (x.clone().requires_grad_() for x in problem.inputs[:3])
    state = new_state(8, "cuda")  # not used for counting
    compiled = torch.compile(model, fullgraph=True)(query, key, value)
    one, other = (
        Backward._make([*torch.autograd.grad(out, (query, key, value), problem.inputs.grad), state])
        for out in (compiled, model(query, key, value))
    )
    assert_equal_up_to_summation_order(one, other, CORRECTED)
    assert_equal_up_to_summation_order(one, problem.dispatched()._replace(state=state), CORRECTED)


def test_backward_after_the_hopper_forward_is_as_accurate_as_after_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    behind_triton = with_modes(640, "top_left")
    triton_result = behind_triton.by_triton()
    monkeypatch.setattr(hopper, "launched", ORIGINAL_LAUNCHED)
    launch._CALLS.clear()
    problem = with_modes(640, "top_left")
    assert_as_accurate(problem.dispatched(), triton_result, problem)


def test_failed_launch_falls_back_to_triton_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_load() -> object:
        raise ImportError("no such Gluon")

    problem = with_modes(300, "top_left")
    triton_result = problem.by_triton()
    monkeypatch.setattr(hopper.BACKWARD, "load", fail_to_load)
    monkeypatch.setattr(hopper.BACKWARD, "failed", set())
    with pytest.warns(UserWarning, match="backward for Hopper.*no such Gluon"):
        first = problem.dispatched()
    for given in (first, problem.dispatched()):
        assert all(torch.equal(a, b) for a, b in zip(given, triton_result, strict=True))


def test_cached_launch_computes_the_same_as_a_new_one() -> None:
    turns = [with_modes(length, causal) for length in (640, 1000) for causal in ("none", "top_left")]
    turns += [Problem(turn.inputs, turn.spec) for turn in turns]
    first = [turn.dispatched() for turn in turns]
    moved = [Problem(Inputs(*(x.clone() for x in turn.inputs)), turn.spec, turn.modes) for turn in turns]
    again = [turn.dispatched() for turn in moved]
    launch._CALLS.clear()
    uncached = [turn.dispatched() for turn in turns]
    for one, other, third, turn in zip(first, again, uncached, turns, strict=True):
        for given in (other, third):
            assert_equal_up_to_summation_order(one, given, None if turn.modes is None else CORRECTED)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_hopper_needs_four_bytes_more_per_accumulated_element_than_triton(kv_heads: int) -> None:
    inputs = random_inputs(2048, 2048, 128, 4, kv_heads)
    problem = Problem(inputs, scaled(128, causal="top_left"))

    def peak(*, triton: bool) -> int:
        for _ in range(3):  # compiled, then cached
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            (problem.by_triton if triton else problem.dispatched)()
        return torch.cuda.max_memory_allocated() - before

    added = inputs.query.numel() + (2 * inputs.key.numel() if kv_heads < 4 else 0)
    assert peak(triton=False) - peak(triton=True) == 4 * added
