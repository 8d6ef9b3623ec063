"""What a backward would run of attention is read from its graph."""

import math
from contextlib import nullcontext

import pytest
import torch
from tests.monitor.unusual_attention import (
    WIDTH,
    Bahdanau,
    ByHand,
    Distances,
    ExpectedClass,
    Gated,
    GraphAttention,
    NonLocalBlock,
    ParameterBank,
    Pattern,
    Pooling,
    ReversedProducts,
    Router,
    SoftRouter,
)
from torch import Tensor, nn

from foreshock.monitor.model.executed import BY_HAND, OUT_OF_REACH, attention_in, broken_rows


def stacked(*modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules, nn.Linear(WIDTH, 1))


def executed(loss: Tensor, model: nn.Module) -> dict[str, str] | None:
    found = attention_in([loss], model)
    return None if found is None else {name: each.how for name, each in found.items()}


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 5, WIDTH)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", [False, True])
def test_each_attention_is_found_under_its_module_and_nothing_else_is(autocast: bool) -> None:
    model = stacked(ByHand(), Pattern(), Gated(), Router(), NonLocalBlock(), ReversedProducts(), ParameterBank())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model)
    assert executed(loss, model) == {**dict.fromkeys("1356", BY_HAND), "7": OUT_OF_REACH}


def test_additive_attention_is_found_and_no_classification_head_router_or_pooling_is() -> None:
    attention = [GraphAttention(), GraphAttention(masks=True), GraphAttention(expands=True), Bahdanau(), Distances()]
    others = [ExpectedClass(), SoftRouter(), Pooling(), Router(), Pattern()]
    model = stacked(*attention, *others)
    assert executed(loss_of(model), model) == dict.fromkeys("12345", BY_HAND)


def test_a_bias_of_all_pairs_gives_no_attention_by_product_another_name() -> None:
    model = stacked(WithPairs())
    assert executed(loss_of(model), model) == {"1": BY_HAND}


class WithPairs(ByHand):
    """As in AlphaFold: scores have a bias that comes from a sum over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleDict({"left": nn.Linear(WIDTH, 3), "right": nn.Linear(WIDTH, 3)})
        self.bias = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        bias = self.bias(self.pairs["left"](x)[:, :, None] + self.pairs["right"](x)[:, None]).permute(0, 3, 1, 2)
        out: Tensor = (query @ key.mT + bias).softmax(-1) @ value
        return out.transpose(1, 2).flatten(2)


def test_an_attention_whose_weights_lie_in_a_layer_of_pytorch_bears_the_name_of_that_layer() -> None:
    model = stacked(nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True))
    assert [*(executed(loss_of(model), model) or {})] == ["1.self_attn"]


def test_a_backward_through_another_model_tells_nothing() -> None:
    assert executed(loss_of(stacked(ByHand())), stacked(ByHand())) is None


def test_a_loss_without_a_graph_tells_nothing() -> None:
    assert executed(torch.zeros(()), stacked(ByHand())) is None


def masked(model: nn.Module, x: Tensor, mask: Tensor, packs: bool) -> Tensor:
    """The loss of a model whose attention by hand hides keys with -inf; packs: saved tensors are packed."""
    context = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x) if packs else nullcontext()
    with context:
        query, key, value = model[1].projected(model[0](x))  # type: ignore[index]
        weights = (query @ key.mT).masked_fill(mask, -math.inf).softmax(-1)
        return model[2]((weights @ value).transpose(1, 2).flatten(2)).nansum()  # type: ignore[index, no-any-return]


@pytest.mark.parametrize(
    ("hidden", "broken", "packs", "said"),
    [
        (2, False, False, "4 of 10 rows of a head see no key, or hold a score that overflows"),
        (0, True, False, "10 of 10 rows of a head see no key, or hold a score that is not finite"),
        (0, False, False, ""),
        (2, False, True, ""),
    ],
)
def test_rows_that_a_softmax_by_hand_gives_as_nan_are_counted_and_no_gradient_changes(
    hidden: int, broken: bool, packs: bool, said: str
) -> None:
    model, mask = stacked(ByHand()), torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask[:hidden] = True
    x = torch.randn(2, 5, WIDTH)
    x[:, 0] *= math.nan if broken else 1.0
    plain = torch.autograd.grad(masked(model, x, mask, packs), list(model.parameters()), allow_unused=True)
    loss = masked(model, x, mask, packs)
    [found] = (attention_in([loss], model) or {}).values()
    rows, here = broken_rows(found)
    assert said == rows.partition(":")[0]
    assert here == ("overflows" in rows)
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)
