"""The operators under autograd, torch.compile, activation checkpointing and opcheck; every step is counted once."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import foreshock.kernels.flash_attention.triton_kernels as triton_kernels_package
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, Numerics, flash_attention, new_state, op
from foreshock.kernels.flash_attention.op import attention_backward, attention_forward

Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MODES = torch.tensor([0, 1, 8, 4], dtype=torch.int32)
OPTIONS = (9, 9, None)


def layer(query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> Tensor:
    return flash_attention(query, key, value, causal=True, state=state, modes=MODES)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 9, 8, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def step(attention: Layer) -> list[Tensor]:
    """Output, gradients and the stacked states of three layers, of which only the second ran."""
    states = torch.stack([new_state(4)] * 3)
    query, key, value = tensors()
    out = attention(query, key, value, states[1])
    torch.autograd.backward(out.float().square().sum())
    grads = [x.grad for x in (query, key, value) if x.grad is not None]
    return [out.detach(), *grads, states]


def compiled(function: Layer, backend: str) -> Layer:
    torch._dynamo.reset()
    result: Layer = torch.compile(function, backend=backend, fullgraph=True)
    return result


def checkpointed(function: Layer, use_reentrant: bool) -> Layer:
    def wrapped(*inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(function, *inputs, use_reentrant=use_reentrant)
        return out

    return wrapped


@pytest.mark.promise("K10")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor imports TorchScript
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda f: checkpointed(f, True), id="reentrant checkpoint"),
        pytest.param(lambda f: checkpointed(f, False), id="checkpoint"),
        pytest.param(lambda f: compiled(f, "aot_eager"), id="aot_eager"),
        pytest.param(lambda f: compiled(checkpointed(f, False), "aot_eager"), id="aot_eager of a checkpoint"),
        pytest.param(lambda f: checkpointed(compiled(f, "aot_eager"), False), id="checkpoint of aot_eager"),
        pytest.param(lambda f: compiled(f, "inductor"), id="inductor"),
        pytest.param(lambda f: compiled(checkpointed(f, False), "inductor"), id="inductor of a checkpoint"),
    ],
)
def test_step_is_counted_once_and_in_its_layer(wrap: Callable[[Layer], Layer]) -> None:
    eager, wrapped = step(layer), step(wrap(layer))
    assert all(torch.equal(a, b) for a, b in zip(eager, wrapped, strict=True))
    assert slot_values(eager[-1].numpy(), Slot.ROWS).tolist() == [[0] * 4, [18] * 4, [0] * 4]


@pytest.mark.promise("K10")
def test_recomputed_forward_has_the_same_dropout() -> None:
    def dropping(query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> Tensor:
        return flash_attention(query, key, value, causal=True, dropout_p=0.3, state=state)

    torch.manual_seed(0)
    eager = step(dropping)
    for use_reentrant in (True, False):
        torch.manual_seed(0)
        wrapped = step(checkpointed(dropping, use_reentrant))
        assert all(torch.equal(a, b) for a, b in zip(eager, wrapped, strict=True))


def test_state_reset_between_forward_and_backward_still_counts_the_step() -> None:
    state = new_state(4)
    query, key, value = tensors()
    out = layer(query, key, value, state)
    state.copy_(new_state(4))
    torch.autograd.backward(out.float().sum())
    assert slot_values(state.numpy(), Slot.ROWS).tolist() == [18] * 4


class DispatchRecorder(TorchDispatchMode):
    """Records foreshock's operators that go through PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "foreshock":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class FunctionRecorder(TorchFunctionMode):
    """Records foreshock's operators that are called as functions of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "foreshock":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


OPERATORS = ["attention_forward", "attention_backward"]


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of foreshock's operators that go through the dispatcher from now on."""
    names: list[str] = []
    for name in OPERATORS:
        operator_of_name = getattr(op, name)

        def called(*given: Any, name: str = name, operator: Any = operator_of_name) -> Any:
            names.append(name)
            return operator(*given)

        monkeypatch.setattr(op, name, called)
    return names


@pytest.mark.promise("K10")
@pytest.mark.parametrize(
    ("mode", "names"), [(DispatchRecorder, OPERATORS), (FunctionRecorder, OPERATORS[:1])]
)  # the backward is not called as a function
def test_pytorch_modes_see_operators_that_eager_calls_do_not_dispatch(
    dispatched: list[str], mode: Callable[[], DispatchRecorder | FunctionRecorder], names: list[str]
) -> None:
    plain = step(layer)
    assert dispatched == []
    with mode() as seen:
        in_mode = step(layer)
    assert dispatched == seen.names == names
    assert all(torch.equal(one, other) for one, other in zip(plain, in_mode, strict=True))


def test_default_device_does_not_send_calls_through_the_dispatcher(dispatched: list[str]) -> None:
    query, key, value = tensors()
    plain = flash_attention(query, key, value, causal=True, dropout_p=0.5, state=new_state(4))
    with torch.device("meta"):
        out = flash_attention(query, key, value, causal=True, state=new_state(4, "cpu"))
        torch.autograd.backward(out.float().square().sum())
    assert dispatched == []
    assert out.device == plain.device
    assert all(x.grad is not None and x.grad.device == x.device for x in (query, key, value))


@pytest.mark.parametrize("packed", [False, True])
def test_meta_tensors_give_shapes_and_dtypes(packed: bool) -> None:
    given = [x.detach().to("meta").requires_grad_() for x in (x[:1] for x in tensors())]
    ends = torch.zeros(3, dtype=torch.int32, device="meta") if packed else None
    state = torch.zeros(new_state(4).shape, dtype=torch.int64, device="meta")
    out = flash_attention(*given, causal=True, state=state, cu_seqlens_q=ends, cu_seqlens_k=ends)
    torch.autograd.backward(out.float().square().sum())
    properties = [(x.shape, x.dtype, x.device) for x in (out, *(x.grad for x in given if x.grad is not None))]
    assert properties == [(given[0].shape, torch.bfloat16, given[0].device)] * 4


@pytest.mark.promise("K10")
def test_profiler_shows_the_operators() -> None:
    with torch.profiler.profile(acc_events=True) as profile:  # PyTorch 2.11 warns without acc_events
        step(layer)
    assert {f"foreshock::{name}" for name in OPERATORS} <= {event.key for event in profile.key_averages()}


class TensorSubclass(Tensor):
    """A subclass of Tensor."""


def negated(x: Tensor) -> Tensor:
    """x as a view with the negative bit: the memory has opposite signs."""
    return torch._neg_view(-x)


@pytest.mark.promise("K10")
@pytest.mark.parametrize("other", [lambda x: x.as_subclass(TensorSubclass), negated], ids=["subclass", "negative bit"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_subclasses_and_negative_views_go_through_the_dispatcher(
    dispatched: list[str], other: Callable[[Tensor], Tensor], place: int
) -> None:
    def layer_with_replaced_operand(query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> Tensor:
        given = [other(x) if at == place else x for at, x in enumerate((query, key, value))]
        return layer(given[0], given[1], given[2], state).as_subclass(Tensor)

    plain, others = step(layer), step(layer_with_replaced_operand)
    assert dispatched == OPERATORS
    assert all(torch.equal(one, another) for one, another in zip(plain, others, strict=True))


@pytest.mark.promise("K10")
@pytest.mark.parametrize("zero", [False, True], ids=["negative bit", "zero tensor"])
def test_negative_and_zero_tensor_output_gradients_go_through_the_dispatcher(dispatched: list[str], zero: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    plain = torch.zeros(2, 4, 9, 8) if zero else torch.randn(2, 4, 9, 8, generator=generator)
    plain = plain.bfloat16()
    given = torch._efficientzerotensor((2, 4, 9, 8), dtype=torch.bfloat16) if zero else negated(plain)

    def gradients(direction: Tensor) -> tuple[Tensor, ...]:
        (query, key, value), state = tensors(), new_state(4)
        out = layer(query, key, value, state)
        return *torch.autograd.grad(out, (query, key, value), direction), state

    expected = gradients(plain)
    assert dispatched == []
    got = gradients(given)
    assert dispatched == ["attention_backward"]
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


@pytest.mark.promise("K10")
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traced_graph_contains_the_operator(pre_dispatch: bool) -> None:
    inputs = [x.detach() for x in tensors()]
    traced = make_fx(lambda *operands: flash_attention(*operands, causal=True), pre_dispatch=pre_dispatch)(*inputs)
    assert torch.ops.foreshock.attention_forward.default in {node.target for node in traced.graph.nodes}
    others = [x + 1 for x in inputs]
    assert torch.equal(traced(*others), flash_attention(*others, causal=True))


def test_autocast_does_not_affect_the_operators() -> None:
    plain = step(layer)
    with torch.autocast("cpu", torch.bfloat16):
        cast = step(layer)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.promise("K10")
@pytest.mark.parametrize("numerics", ["kernel", "float32"])
@pytest.mark.parametrize("with_state", [True, False])
def test_opcheck_passes(numerics: Numerics, with_state: bool) -> None:
    query, key, value = tensors()
    state, modes = (new_state(4), MODES) if with_state else (None, None)
    spec = AttentionSpec(0.3, "top_left", numerics=numerics)
    rest = (state, modes, None, None, *OPTIONS, spec.text)
    torch.library.opcheck(attention_forward, (query, key, value, *rest))
    inputs = [x.detach() for x in (query, key, value)]
    outputs = attention_forward(*inputs, *rest)
    torch.library.opcheck(attention_backward, (torch.ones_like(inputs[0]), *inputs, *outputs, *rest))


@pytest.mark.promise("K6")
def test_opcheck_passes_with_permuted_inputs_and_packed_sequences() -> None:
    query, key, value = (x.detach().transpose(1, 2).contiguous().transpose(1, 2)[:1] for x in tensors())
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    rest = (new_state(4), MODES, cu_seqlens, cu_seqlens, *OPTIONS, AttentionSpec(0.3, "top_left").text)
    torch.library.opcheck(attention_forward, (query.requires_grad_(), key, value, *rest))


@pytest.fixture
def reset_kernel_choice() -> Iterator[None]:
    op._triton.cache_clear()
    yield
    op._triton.cache_clear()


@pytest.mark.promise("K11")
@pytest.mark.usefixtures("reset_kernel_choice")
@pytest.mark.parametrize(
    ("given", "kernels", "warns"),
    [
        ("reference", False, False),
        ("triton", True, False),
        ("", True, False),
        *((wrong, True, True) for wrong in ("Triton", "refrence", "gluon")),
    ],
)
def test_environment_variable_chooses_the_kernels_and_an_invalid_value_warns_once(
    given: str, kernels: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="without Triton, another warning is given")
    monkeypatch.setenv("FORESHOCK_KERNELS", given)
    message = f"FORESHOCK_KERNELS is '{given}'; set it to 'triton' .* or to 'reference'"
    with pytest.warns(UserWarning, match=message) if warns else nullcontext():
        assert (op._triton() is not None) == kernels
    assert (op._triton() is not None) == kernels  # and no second warning, which would be an error


@pytest.mark.promise("K11")
@pytest.mark.usefixtures("reset_kernel_choice")
def test_missing_kernels_fall_back_to_the_reference_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "foreshock.kernels.flash_attention.triton_kernels.backward", None)
    monkeypatch.delattr(triton_kernels_package, "backward", raising=False)
    with pytest.warns(UserWarning, match="Triton kernels cannot be imported"):
        assert op._triton() is None
    assert op._triton() is None  # and no second warning, which would be an error
