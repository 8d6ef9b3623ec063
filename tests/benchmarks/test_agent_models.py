"""The models of the step benchmark: as large as their names say, and causal."""

import math

import pytest
import torch

from foreshock.benchmarks.agent_models import SHAPES, Attention, Model, Shape

TINY = Shape("tiny", 2, 32, 4, 2, 32, 61, 16, 2, gated=True, whole=False)


def test_the_shapes_are_those_that_are_promised() -> None:
    small, large = SHAPES
    assert (small.layers, small.width, small.length, small.batch) == (12, 768, 1024, 32)
    assert (large.length, large.gated) == (4096, True)


@pytest.mark.parametrize(("shape", "parameters"), [(SHAPES[0], 124.5e6), (SHAPES[1], 1.236e9)])
def test_a_model_has_as_many_parameters_as_the_one_that_it_is_named_after(shape: Shape, parameters: float) -> None:
    with torch.device("meta"):
        model = Model(shape)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("gated", [True, False])
def test_a_model_that_has_learnt_nothing_finds_all_tokens_nearly_alike(gated: bool) -> None:
    torch.manual_seed(3)
    shape = Shape("tiny", 2, 32, 4, 4, 32, 61, 16, 2, gated=gated, whole=False)
    ids = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(4))
    assert float(Model(shape)(ids).detach()) == pytest.approx(math.log(61), rel=0.05)


def test_no_token_is_attended_to_by_those_before_it() -> None:
    torch.manual_seed(5)
    attention = Attention(TINY)
    x = torch.randn(2, 16, 32)
    before = attention(x, None)
    x[:, 9:] += 1.0
    after = attention(x, None)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])
