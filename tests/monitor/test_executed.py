"""What a backward would run of attention is read from its graph."""

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

from foreshock.monitor.model.discovery import BY_HAND, OUT_OF_REACH, attention_in


def stacked(*modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules, nn.Linear(WIDTH, 1))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 5, WIDTH)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", [False, True])
def test_each_attention_is_found_under_its_module_and_nothing_else_is(autocast: bool) -> None:
    model = stacked(ByHand(), Pattern(), Gated(), Router(), NonLocalBlock(), ReversedProducts(), ParameterBank())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model)
    assert attention_in([loss], model) == {**dict.fromkeys("1356", BY_HAND), "7": OUT_OF_REACH}


def test_additive_attention_is_found_and_no_classification_head_router_or_pooling_is() -> None:
    attention = [GraphAttention(), GraphAttention(masks=True), GraphAttention(expands=True), Bahdanau(), Distances()]
    others = [ExpectedClass(), SoftRouter(), Pooling(), Router(), Pattern()]
    model = stacked(*attention, *others)
    assert attention_in([loss_of(model)], model) == dict.fromkeys("12345", BY_HAND)


def test_a_bias_of_all_pairs_gives_no_attention_by_product_another_name() -> None:
    model = stacked(WithPairs())
    assert attention_in([loss_of(model)], model) == {"1": BY_HAND}


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
    assert [*(attention_in([loss_of(model)], model) or {})] == ["1.self_attn"]


def test_a_backward_through_another_model_tells_nothing() -> None:
    assert attention_in([loss_of(stacked(ByHand()))], stacked(ByHand())) is None


def test_a_loss_without_a_graph_tells_nothing() -> None:
    assert attention_in([torch.zeros(())], stacked(ByHand())) is None
