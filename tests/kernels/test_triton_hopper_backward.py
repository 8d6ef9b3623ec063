"""The backward for Hopper on such a GPU: who is served, that it is as exact as Triton's, and all that surrounds it.
The forward is Triton's but in one test, so that what fails here is the backward."""

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
ALONE = {"rows", "hopper backward", "hopper dQ", "count"}
SHARED = {"hopper dK", "hopper dV"}
"""Beside these where query heads share a key head."""
BESIDE = ALONE | {"dQ of corrected heads"}
TRITON = {"rows", "dQ", "dK dV", "count"}
LAUNCHED = hopper.launched


@pytest.fixture(autouse=True)
def not_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls remember who serves them: none outlives a test. Each program takes one query head, but where a test says
    otherwise, and short calls of heads that share a key head are served as well."""
    monkeypatch.delenv("FORESHOCK_KERNELS", raising=False)
    monkeypatch.setattr(hopper, "_SHORT", 0)
    take(1, monkeypatch)
    monkeypatch.setattr(hopper, "launched", lambda *_: False)
    yield
    torch.use_deterministic_algorithms(False)
    launch._CALLS.clear()


def take(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each program take so many query heads, or all of a key head if that has fewer."""
    monkeypatch.setattr(hopper, "members_of", lambda call, _: min(members, call.heads // call.kv_heads))
    launch._CALLS.clear()


class Backward(NamedTuple):
    """What a backward returns, and the state that it counted into."""

    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    state: Tensor


class Problem:
    """Inputs, modes and the gradient of the log-sum-exp of one call, and what its forward leaves."""

    def __init__(
        self, inputs: Inputs, spec: AttentionSpec, modes: Tensor | None = None, grad_lse: Tensor | None = None
    ) -> None:
        self.inputs, self.spec, self.modes, self.grad_lse = inputs, spec, modes, grad_lse
        lengths = inputs.query.shape[2], inputs.key.shape[2]
        self.given = Arguments(modes, None, None, *lengths, None, spec)
        query, key, value, _ = inputs
        self.saved = Saved(query, key, value, *forward.attention_forward(query, key, value, self.given))

    def as_served(self) -> Backward:
        state = new_state(self.inputs.query.shape[1], "cuda")
        grads = backward.attention_backward(self.inputs.grad, self.saved, state, self.given, self.grad_lse)
        return Backward(*grads, state)

    def by_triton(self) -> Backward:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper, "takes_backward", lambda *_: False)
            return self.as_served()

    def passes(self) -> set[str]:
        """The passes that are launched."""
        launch._CALLS.clear()
        self.as_served()
        (call,) = launch._CALLS.values()
        names = [known[0] for known in call.ready]
        return {name if isinstance(name, str) else name[0] for name in names}


def rows_of_heads(inputs: Inputs) -> Inputs:
    """The same numbers in tensors [B, S, H, D] in memory."""
    return Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))


def apart(inputs: Inputs) -> Inputs:
    """The same numbers with others between their rows."""
    wide = [torch.full((*x.shape[:3], 144), 7.0, dtype=x.dtype, device="cuda")[..., :128] for x in inputs]
    return Inputs(*(to.copy_(x) for to, x in zip(wide, inputs, strict=True)))


def with_modes(length: int, causal: str, kv_heads: int = 8, *modes: Mode) -> Problem:
    """Eight heads whose rows have several largest scores."""
    inputs = random_inputs(length, length, 128, 8, kv_heads, 2)
    inputs.key[:, :, length // 2 : length // 2 * 2] = inputs.key[:, :, : length // 2]
    return Problem(inputs, scaled(128, causal=causal), flags(*(modes or MIXED)))


def assert_as_exact(ours: Backward, theirs: Backward, problem: Problem) -> None:
    exact = truth(problem.inputs, problem.spec, grad_lse=problem.grad_lse)
    for name in ("grad_query", "grad_key", "grad_value"):
        right = getattr(exact, name)
        error, allowed = (float((getattr(x, name).double() - right).norm()) for x in (ours, theirs))
        # The last term is what fp32 leaves where the gradient is nothing else: a row that sees one key has dQ 0.
        slack = 1e-5 * float(right.norm()) + 2e-6 * right.numel() ** 0.5
        assert error <= 1.1 * allowed + slack, f"{name} errs by {error:.2e}, Triton's by {allowed:.2e}"


def assert_equal_but_for_the_order_of_sums(ours: Backward, again: Backward, heads: list[bool] | None = None) -> None:
    """Equal bits, but of dQ (of heads that are not True in `heads`), and of dK and dV where query heads share a key
    head: at most one step of their type apart, which few of their numbers are, and what fp32 loses over the
    additions."""
    assert torch.equal(ours.state, again.state)
    if heads is not None:
        assert torch.equal(ours.grad_query[:, heads], again.grad_query[:, heads])
    added = ["grad_query"]
    if ours.grad_key.shape[1] < ours.grad_query.shape[1]:
        added += ["grad_key", "grad_value"]
    else:
        assert torch.equal(ours.grad_key, again.grad_key)
        assert torch.equal(ours.grad_value, again.grad_value)
    for name in added:
        one, other = getattr(ours, name).double(), getattr(again, name).double()
        step = 2.0**-7 if ours.grad_query.dtype == torch.bfloat16 else 2.0**-10
        larger = torch.maximum(one.abs(), other.abs())
        assert bool(((one - other).abs() <= step * larger + 2.0**-16 * larger.amax()).all()), name
        assert (one - other).norm() <= 1e-3 * one.norm(), name


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_the_calls_that_it_is_written_for_are_served(causal: str) -> None:
    inputs, spec = random_inputs(300, 300, 128), scaled(128, causal=causal)
    for given in (inputs, rows_of_heads(inputs), apart(inputs)):
        assert Problem(given, spec).passes() == ALONE
    assert Problem(random_inputs(300, 300, 128, 8, 2, 2, torch.float16), spec).passes() == ALONE | SHARED
    assert Problem(inputs, spec, flags(Mode.PLAIN, Mode.ROW_CORRECTED)).passes() == BESIDE
    assert Problem(random_inputs(300, 200, 128), scaled(128)).passes() == ALONE


def test_all_others_are_left_to_triton() -> None:
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
        assert Problem(given, spec).passes() == TRITON


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
def test_every_length_is_as_exact_as_by_triton_and_gives_equal_bits_but_for_the_order_of_sums(
    dtype: torch.dtype, length_q: int, length_k: int, causal: str, heads: int, kv_heads: int, batch: int
) -> None:
    inputs = random_inputs(length_q, length_k, 128, heads, kv_heads, batch, dtype)
    problem = Problem(inputs, scaled(128, causal=causal))
    assert problem.passes() == (ALONE if heads == kv_heads else ALONE | SHARED)
    ours, theirs = problem.as_served(), problem.by_triton()
    assert_as_exact(ours, theirs, problem)
    assert torch.equal(ours.state, theirs.state)
    for _ in range(5):
        assert_equal_but_for_the_order_of_sums(ours, problem.as_served())
    for other in (rows_of_heads(inputs), apart(inputs)):
        assert_equal_but_for_the_order_of_sums(ours, Problem(other, problem.spec).as_served())


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_however_many_query_heads_a_program_takes_it_is_as_exact(causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(random_inputs(700, 700, 128, 16, 2, 2), scaled(128, causal=causal))
    theirs = problem.by_triton()
    for members in (1, 2, 4, 8):
        take(members, monkeypatch)
        assert problem.passes() == (ALONE if members == 8 else ALONE | SHARED)
        ours = problem.as_served()
        assert_as_exact(ours, theirs, problem)
        again = problem.as_served()
        assert_equal_but_for_the_order_of_sums(ours, again)
        assert torch.equal(ours.grad_key, again.grad_key) or members < 8


@pytest.mark.parametrize("length", [129, 200, 1000])
def test_rows_whose_scores_all_lie_far_below_zero_have_finite_gradients(length: int) -> None:
    inputs = random_inputs(length, length, 128, 4, 2)
    inputs.query[..., 0] = 200.0
    inputs.key[..., 0] = -8.0
    problem = Problem(inputs, scaled(128))
    assert float(problem.saved.lse.max()) < -89.0  # exp of minus that is infinite in fp32
    assert_as_exact(problem.as_served(), problem.by_triton(), problem)


def test_nothing_round_the_gradients_is_harmed() -> None:
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
        assert_equal_but_for_the_order_of_sums(
            Backward._make([*grads, new_state(2, "cuda")]),
            problem.as_served()._replace(state=new_state(2, "cuda")),
        )
        for x in longer:
            assert bool((x[:around] == 7.0).all())
            assert bool((x[around + size :] == 7.0).all())


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize(("length", "kv_heads"), [(640, 8), (1000, 2)])
def test_heads_of_every_mode_beside_each_other_are_as_exact_as_by_triton(
    length: int, kv_heads: int, causal: str
) -> None:
    problem = with_modes(length, causal, kv_heads)
    assert problem.passes() == (BESIDE if kv_heads == 8 else BESIDE | SHARED)
    ours, theirs = problem.as_served(), problem.by_triton()
    assert_as_exact(ours, theirs, problem)
    assert torch.equal(ours.grad_query[:, CORRECTED], theirs.grad_query[:, CORRECTED])
    assert torch.equal(ours.state, theirs.state)
    assert min(slot_values(ours.state.cpu().numpy(), Slot.TIED_ROWS_BF16)) > 0
    for _ in range(10):
        assert_equal_but_for_the_order_of_sums(ours, problem.as_served(), CORRECTED)


def test_modes_that_are_all_plain_change_nothing_and_all_corrected_leave_no_dq_to_it() -> None:
    plain = with_modes(640, "top_left", 8, *[Mode.PLAIN] * 8)
    assert_equal_but_for_the_order_of_sums(plain.as_served(), Problem(plain.inputs, plain.spec).as_served())
    corrected = with_modes(640, "top_left", 8, *[Mode.ROW_CORRECTED] * 8)
    assert_equal_but_for_the_order_of_sums(corrected.as_served(), corrected.as_served(), [True] * 8)


@pytest.mark.parametrize("modes", [None, MIXED])
def test_a_gradient_of_the_log_sum_exp_is_taken_in(modes: tuple[Mode, ...] | None) -> None:
    inputs = random_inputs(500, 500, 128, 8, 4)
    grad_lse = torch.randn(inputs.query.shape[:3], device="cuda")
    given = None if modes is None else flags(*modes)
    problem = Problem(inputs, scaled(128, causal="top_left"), given, grad_lse)
    assert problem.passes() == SHARED | (ALONE if modes is None else BESIDE)
    assert_as_exact(problem.as_served(), problem.by_triton(), problem)


@pytest.mark.parametrize("modes", [None, MIXED])
def test_who_wants_equal_bits_gets_triton_s_from_one_call_to_the_next(modes: tuple[Mode, ...] | None) -> None:
    problem = with_modes(640, "top_left")
    problem = Problem(problem.inputs, problem.spec, None if modes is None else flags(*modes))
    ours, theirs = problem.as_served(), problem.by_triton()
    assert problem.passes() == (ALONE if modes is None else BESIDE)
    torch.use_deterministic_algorithms(True)
    assert problem.passes() == TRITON
    launch._CALLS.clear()
    for turn in range(8):  # each way is new, then remembered, then given addresses
        deterministic = turn % 2 == 1
        torch.use_deterministic_algorithms(deterministic)
        given = problem.as_served()
        if deterministic:
            assert all(torch.equal(a, b) for a, b in zip(given, theirs, strict=True))
        else:
            assert_equal_but_for_the_order_of_sums(given, ours)


def test_what_the_host_knows_of_modes_leaves_out_launches_and_chooses_passes_but_changes_no_result() -> None:
    for modes, passes in (
        ([Mode.PLAIN, Mode.EXACT_DELTA] * 4, ALONE),
        (list(MIXED), BESIDE),
        ([Mode.ROW_CORRECTED] * 8, TRITON),
    ):
        problem = with_modes(333, "top_left", 8, *modes)
        unknown, triton = problem.as_served(), problem.by_triton()
        assert problem.modes is not None
        note_modes(problem.modes, modes)
        assert problem.passes() == passes
        if passes is TRITON:  # perhaps in other tiles
            assert_as_exact(problem.as_served(), triton, problem)
        else:
            assert_equal_but_for_the_order_of_sums(problem.as_served(), unknown)


@pytest.mark.parametrize("noted", [False, True])
def test_a_captured_graph_computes_the_same_bits_and_obeys_a_mode_changed_between(noted: bool) -> None:
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
        assert_equal_but_for_the_order_of_sums(captured, wanted, CORRECTED if given != plain else None)
    assert not torch.equal(eager[0].grad_key, eager[1].grad_key)


def test_compiled_it_gives_the_same_bits_but_for_the_order_of_sums() -> None:
    problem = with_modes(640, "top_left")

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attention(query, key, value, causal=True, modes=problem.modes)
        assert isinstance(out, Tensor)
        return out

    query, key, value = (x.clone().requires_grad_() for x in problem.inputs[:3])
    state = new_state(8, "cuda")  # nothing is counted
    compiled = torch.compile(model, fullgraph=True)(query, key, value)
    one, other = (
        Backward._make([*torch.autograd.grad(out, (query, key, value), problem.inputs.grad), state])
        for out in (compiled, model(query, key, value))
    )
    assert_equal_but_for_the_order_of_sums(one, other, CORRECTED)
    assert_equal_but_for_the_order_of_sums(one, problem.as_served()._replace(state=state), CORRECTED)


def test_behind_hopper_s_own_forward_it_is_as_exact_as_behind_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    behind_triton = with_modes(640, "top_left")
    theirs = behind_triton.by_triton()
    monkeypatch.setattr(hopper, "launched", LAUNCHED)
    launch._CALLS.clear()
    problem = with_modes(640, "top_left")
    assert_as_exact(problem.as_served(), theirs, problem)


def test_where_it_cannot_be_launched_triton_serves_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise ImportError("no such Gluon")

    problem = with_modes(300, "top_left")
    theirs = problem.by_triton()
    monkeypatch.setattr(hopper.BACKWARD, "load", broken)
    monkeypatch.setattr(hopper.BACKWARD, "failed", set())
    with pytest.warns(UserWarning, match="backward for Hopper.*no such Gluon"):
        first = problem.as_served()
    for given in (first, problem.as_served()):
        assert all(torch.equal(a, b) for a, b in zip(given, theirs, strict=True))


def test_a_launch_that_is_remembered_computes_what_a_new_one_does() -> None:
    turns = [with_modes(length, causal) for length in (640, 1000) for causal in ("none", "top_left")]
    turns += [Problem(turn.inputs, turn.spec) for turn in turns]
    first = [turn.as_served() for turn in turns]
    moved = [Problem(Inputs(*(x.clone() for x in turn.inputs)), turn.spec, turn.modes) for turn in turns]
    again = [turn.as_served() for turn in moved]
    launch._CALLS.clear()
    anew = [turn.as_served() for turn in turns]
    for one, other, third, turn in zip(first, again, anew, turns, strict=True):
        for given in (other, third):
            assert_equal_but_for_the_order_of_sums(one, given, None if turn.modes is None else CORRECTED)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_takes_four_bytes_an_element_of_what_it_adds_to_more_than_triton_s(kv_heads: int) -> None:
    inputs = random_inputs(2048, 2048, 128, 4, kv_heads)
    problem = Problem(inputs, scaled(128, causal="top_left"))

    def peak(*, triton: bool) -> int:
        for _ in range(3):  # compiled, then remembered
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            (problem.by_triton if triton else problem.as_served)()
        return torch.cuda.max_memory_allocated() - before

    added = inputs.query.numel() + (2 * inputs.key.numel() if kv_heads < 4 else 0)
    assert peak(triton=False) - peak(triton=True) == 4 * added
