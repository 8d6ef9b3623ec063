"""The models of the step benchmark: as large as their names say, and causal."""

import math

import pytest
import torch

from foreshock.benchmarks.agent_models import SHAPES, Model, Shape


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
