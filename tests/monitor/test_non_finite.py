"""Nonfinite values: their origin, their first step, and loss scaling, which is not a failure."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import batch, next_token_loss, tiny_gpt
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foreshock.contract import wire
from foreshock.contract.incident import RunContext, Warned, incidents
from foreshock.monitor import AgentConfig, attach
from foreshock.monitor.crisis import Crisis, broken_parameters, look_at
from foreshock.monitor.detect.non_finite import NonFiniteTracker, Origin, place_of

LAYERS, HEADS = 4, 3
REFS = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


def place_for(*, into: int = LAYERS, out: tuple[int, ...] = (), out_layer: int = LAYERS, backward: int = -1) -> str:
    """The reported origin if these are nonfinite: inputs of layers from `into` on, outputs of heads `out` of layer
    `out_layer`, and gradients of layers up to `backward`."""
    layers = np.array([layer for layer, _ in REFS])
    by_input = np.where(layers >= into, 8.0, 0.0)
    by_output = np.array([5.0 if (layer, head) in {(out_layer, h) for h in out} else 0.0 for layer, head in REFS])
    broken = np.maximum(by_input + by_output, np.where(layers <= backward, 8.0, 0.0))
    return place_of(REFS, broken, by_input, by_output)


def test_origin_is_located_between_the_layers_that_show_it() -> None:
    last, first = LAYERS - 1, "first in the forward"
    assert place_for() == ""
    for layer in range(LAYERS):  # a NaN loss makes all gradients NaN
        expected = place_for(into=layer + 1, out_layer=layer, out=(1,), backward=last)
        assert expected == f"{first}, in the attention output of layer {layer} head 1; its inputs are finite"
    for before, layer in itertools.pairwise(range(LAYERS)):
        between = f"between the attention of layer {before} and the inputs of layer {layer}"
        assert place_for(into=layer, backward=last) == f"{first}, {between}, or in its mask"
        assert place_for(backward=before) == f"first in the backward, between layer {before} and layer {layer}"
    assert "at or before the inputs of layer 0" in place_for(into=0, backward=last)
    assert "after the attention of layer 3" in place_for(backward=last)
    by_input = np.array([8.0 if ref == (2, 1) or ref[0] > 2 else 0.0 for ref in REFS])
    sentence = place_of(REFS, np.full(len(REFS), 8.0), by_input, np.zeros(len(REFS)))
    assert sentence.endswith("between the attention of layer 1 and the inputs of layer 2 head 1, or in its mask")


@pytest.mark.parametrize("length", [10, 200, 400])
def test_long_names_drop_whole_sentences_but_never_the_origin(length: int) -> None:
    names = (
        f"1 of 9 gradients is not finite: the last one is that of {'deep.' * (length // 5)}weight. Nor is its weight."
    )
    found = Origin(3, "first in the forward, between layer 1 and layer 2", "6 of 72 rows see no key.", names)
    sentence = NonFiniteTracker(harm="weights", origin=found).sentence(5, len(REFS))
    assert len(sentence) <= 500
    assert sentence.startswith(
        "Numbers are not finite since step 3, first in the forward, between layer 1 and layer 2. "
    )
    assert "6 of 72 rows see no key." in sentence
    assert ("deep." in sentence) == (length < 400)
    assert sentence.endswith(".")


class Block(nn.Module):
    """Three linear layers in sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]


def broken(module: nn.Module, grads: Any) -> Any:
    return (grads[0] * math.nan,)


def gradients(model: nn.Module) -> Any:
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]


def test_broken_backward_is_traced_to_its_module() -> None:
    model = Block()
    model.second.register_full_backward_pre_hook(broken)
    model(torch.ones(2, 4)).sum().backward()
    [found] = look_at(gradients(model))
    assert found[:4] == (6, 4, "second.bias", "third.weight")
    assert found.sentence("gradients") == (
        "4 of 6 gradients are not finite: "
        "the last one is that of second.bias, and third.weight, which follows it, is finite."
    )
    [every] = look_at([("a", torch.tensor([math.nan])), ("b", torch.tensor([math.inf]))])
    assert every.sentence("weights") == "None of 2 weights is finite."


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf, -math.inf])
def test_single_nonfinite_number_is_found(nonfinite: float) -> None:
    model = Block()
    with torch.no_grad():
        model.third.weight[3, 2] = nonfinite
    assert look_at(model.named_parameters())[0][:4] == (6, 1, "third.weight", "third.bias")


def test_finite_and_missing_tensors_give_no_finding() -> None:
    model = Block()
    extra = [("step", torch.tensor(3)), ("empty", torch.empty(0))]
    huge = [("huge", torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16))]
    findings = look_at(gradients(model), [*model.named_parameters(), *extra], huge)
    assert [each.broken for each in findings] == [0] * 3
    assert findings[-1].largest == ("huge", torch.finfo(torch.float16).max)


class OpaqueTensor(Tensor):
    """A tensor subclass that does not support norms, like a quantised tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in func.__name__:
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_tensors_without_plain_numbers_are_skipped() -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 4, device="meta"), nn.LazyLinear(4))
    extra = [
        ("sparse", torch.eye(3).to_sparse()),
        ("eighth", torch.full((4,), math.nan).to(torch.float8_e4m3fn)),
        ("quantised", torch.full((4,), math.nan).as_subclass(OpaqueTensor)),
        ("complex", torch.full((4,), math.nan, dtype=torch.complex64)),
    ]
    assert [each.broken for each in look_at(model.named_parameters(), extra)] == [0, 0]


def finding_sentence(model: nn.Module, *optimizers: torch.optim.Optimizer, finite_loss: bool = True) -> str:
    return broken_parameters(model, optimizers, finite_loss=finite_loss).sentence


def test_sentence_combines_gradients_and_loss_and_omits_missing_gradients() -> None:
    model = Block()
    assert finding_sentence(model) == finding_sentence(model, finite_loss=False) == "Weights are finite."
    torch.nn.init.constant_((loaded := Block()).first.weight, math.nan)
    assert "1 of 6 weights is not finite" in finding_sentence(loaded)
    assert "gradients are finite" not in finding_sentence(loaded)
    model(torch.ones(2, 4)).sum().backward()
    assert "norm overflows" in finding_sentence(model)
    assert "look at the labels" in finding_sentence(model, finite_loss=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert "The loss was finite: look at how it is computed" in finding_sentence(model)
    assert "The loss was finite" not in finding_sentence(model, finite_loss=False)


def test_overflowing_norm_and_single_broken_gradient_are_traced_to_their_parameter() -> None:
    model = Block()
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 3e30 if place == 2 else 1.0)
    assert "The largest one, 3e+30, is that of second.weight." in finding_sentence(model)
    assert model.second.bias.grad is not None
    model.second.bias.grad[0] = math.nan
    assert "Only this gradient is broken, so check the operation that uses it" in finding_sentence(model)
    torch.nn.init.constant_(model.third.weight, math.nan)
    assert "that of second.bias, and third.weight, which follows it, is finite. 1 of 6 weights is" in finding_sentence(
        model
    )
    torch.nn.init.ones_(model.third.weight)
    torch.nn.init.constant_(model.second.bias, math.nan)
    assert "that of second.bias, and third.weight, which follows it, is finite. Nor is its weight." in finding_sentence(
        model
    )


def test_optimizer_is_found_and_its_nonfinite_learning_rate_or_state_reported() -> None:
    model, other = Block(), Block()
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=lr, momentum=0.9) for each, lr in ((model, math.nan), (other, math.inf))
    ]
    model(torch.ones(2, 4)).sum().backward()
    assert "learning rate" not in finding_sentence(model)
    optimizers[0].step()
    assert "The gradients are finite, so an update of the optimizer broke these weights" in finding_sentence(model)
    assert "The optimizer's learning rate is nan." in finding_sentence(model)
    model, optimizers[0] = Block(), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizers[0] = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizers[0].state[model.first.weight]["momentum_buffer"] = torch.tensor(math.nan)
    assert "The optimizer's state is not finite" in finding_sentence(model)
    torch.nn.init.constant_(model.second.weight, math.nan)
    assert "next update" not in finding_sentence(model)


@pytest.mark.parametrize(
    ("optimizer", "eps"),
    [
        (None, "Adam's default eps of 1e-08 is 0"),
        (lambda model: torch.optim.Adam(model.parameters(), eps=1e-9), "the eps of 1e-09 is 0"),
        (lambda model: torch.optim.Adam(model.parameters(), eps=1e-4), None),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), None),
    ],
)
def test_broken_float16_weights_are_traced_to_an_epsilon_that_underflows(optimizer: Any, eps: str | None) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = Block().to(dtype)
        given = [] if optimizer is None else [optimizer(model)]
        assert "float16" not in finding_sentence(model, *given)
        torch.nn.init.constant_(model.second.weight, math.nan)
        sentence = finding_sentence(model, *given)
        assert (eps is not None and dtype == torch.float16) == ("Weights are in float16" in sentence)
        assert eps is None or dtype != torch.float16 or eps in sentence


class CountHostReads(TorchFunctionMode):
    """Counts reads of tensor values by the host, which wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__")
        self.count += getattr(func, "__name__", "") in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("blocks", [1, 30])
def test_host_synchronises_once_for_any_number_of_tensors(blocks: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(blocks)), Block().half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        optimizer.state[model[0].first.weight]["momentum_buffer"][0, 0] = math.inf  # type: ignore[index, union-attr]
    with CountHostReads() as reads:
        found = broken_parameters(model, [optimizer], finite_loss=True)
    assert found.weights
    assert "optimizer's state is not finite" in found.sentence
    assert reads.count == 1


def check_steps(losses: dict[int, float], norms: dict[int, float], end: int, weights_break: int = 10**9) -> list[int]:
    """The steps before `end`, except the first, at which a Crisis with an interval of 5 steps checks the parameters."""
    model, seen = Block(), []

    def get_model() -> nn.Module:
        seen.append(step)
        if step >= weights_break:
            torch.nn.init.constant_(model.first.weight, math.nan)
        return model

    crisis = Crisis(get_model, list, 5, lambda _: None)
    for step in range(1, end):
        crisis.look(step, losses.get(step, 1.0), norms.get(step, 1.0))
    assert seen[0] == 1
    return seen[1:]


def test_crisis_checks_parameters_at_broken_losses_but_never_at_healthy_steps() -> None:
    nan = math.nan
    every = dict.fromkeys(range(10, 30), nan)
    assert check_steps({}, {}, 30) == []
    assert check_steps({}, every, 30) == [10, 15, 20, 25]
    assert check_steps({12: nan, 14: nan}, every, 15) == [10, 12, 14]
    assert check_steps(every, every, 30) == [*range(10, 16), 20, 25]
    assert check_steps(every, every, 30, weights_break=12) == [10, 11, 12]


@pytest.mark.parametrize(
    ("first", "step", "loss", "watched"),
    [(4.0, 2, 8.5, True), (4.0, 100, 8.5, True), (4.0, 101, 8.5, False), (4.0, 2, 7.9, False), (-4.0, 2, 8.5, False)],
)
def test_early_loss_of_twice_the_first_starts_one_close_watch(
    first: float, step: int, loss: float, watched: bool
) -> None:
    for kind in (float, torch.tensor):
        steps: list[int] = []
        crisis = Crisis(Block, list, 50, steps.append)
        for each in range(1, step + 3):
            assert crisis.look(each, kind(loss if each >= step else first), 1.0) is None
        assert steps == [step] * watched


def test_crisis_reports_every_nan_loss_but_nan_norms_and_weights_only_at_intervals() -> None:
    model = Block()
    for loss, answered_steps in ((math.nan, list(range(2, 20))), (1.0, [2, 7, 12, 17])):
        crisis = Crisis(lambda: model, list, 5, lambda _: None)
        assert crisis.look(1, 1.0, 1.0) is None
        assert [step for step in range(2, 20) if crisis.look(step, loss, math.nan)] == answered_steps
    torch.nn.init.constant_(model.first.weight, math.nan)
    crisis = Crisis(lambda: model, list, 5, lambda _: None)  # reports broken weights once per crisis
    assert [step for step in range(1, 205) if crisis.look(step, math.nan, 1.0)] == [1, 102, 203]


@pytest.mark.parametrize("recorded", ["loss", "loss and gradient norm"])
@pytest.mark.parametrize("attention", ["kernels", "keep"])
def test_gradscaler_with_a_high_initial_scale_raises_no_warning(attention: Any, recorded: str) -> None:
    model, listener = tiny_gpt(), Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with attach(model, **{**EVERY_STEP, "attention": attention}) as agent:
        agent.subscribe(listener)
        for step in range(26):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = next_token_loss(model(batch(step)), batch(step))
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            agent.step(loss, norm if "norm" in recorded else None)
    samples = listener.of(wire.Sample)
    skipped = [sample for sample in samples if sample.grad_norm_nonfinite_steps]
    assert ("norm" in recorded) == (len(skipped) > 5)
    assert not samples[-1].grad_norm_nonfinite_steps
    assert scaler.get_scale() < 2.0**20
    assert not listener.of(wire.Verdict)


@pytest.mark.parametrize("poisoned", [13, 20, 21])
@pytest.mark.parametrize("norms", [True, False])
def test_advised_checkpoint_precedes_the_update_that_broke_the_weights(
    poisoned: int, norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are taken every ten steps, and the loss shows a broken update one step later."""
    model, listener = tiny_gpt(), Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite_steps = [0]
    monkeypatch.setattr(AgentConfig, "close_watch_steps", 0)
    with attach(model, **{**EVERY_STEP, "sample_every_steps": 10}) as agent:
        agent.subscribe(listener)
        for step in range(1, 41):
            optimizer.zero_grad()
            loss = next_token_loss(model(batch(step)), batch(step))
            torch.autograd.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if norms else None
            gradient = next(model.parameters()).grad
            if step == poisoned and gradient is not None:
                gradient.fill_(math.nan)  # like the backward of a broken kernel
            optimizer.step()
            agent.step(loss, norm)
            if all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
                finite_steps.append(step)
    verdicts = [verdict for verdict in listener.of(wire.Verdict) if verdict.layer is None]
    assert verdicts
    for verdict in verdicts:
        assert verdict.evidence["suspect_step"] == finite_steps[-1] + 1 == poisoned
        [incident] = incidents([Warned(0, verdict.step, verdict)], RunContext("row_corrected"))
        assert f"a checkpoint before step {poisoned}" in incident.to_do
