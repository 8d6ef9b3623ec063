"""What the rival monitors are given, against the same quantities by other means."""

import numpy as np
import torch
from torch import Tensor

from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.lab.training.rival_signals import ModelProbe

SHAPE = ModelConfig(layers=2, heads=2, width=32, context=16, attention_dtype="float32")


def made() -> tuple[GPT, Tensor]:
    torch.manual_seed(0)
    return GPT(SHAPE), torch.randint(0, 256, (3, 16))


def projection(model: GPT, layer: int) -> Tensor:
    """The weight of Q, K and V, [3 * 32, 32]."""
    weight = dict(model.named_parameters())[f"h.{layer}.attn.c_attn.weight"]
    assert isinstance(weight, Tensor)
    return weight


def test_stable_rank_is_that_of_a_decomposition() -> None:
    model, tokens = made()
    measured = ModelProbe(model, tokens).measure()["stable_rank"]
    weights = [projection(model, layer)[:32].view(2, 16, 32) for layer in (0, 1)]
    values = torch.linalg.svdvals(torch.cat(weights).detach())
    np.testing.assert_allclose(measured, (values.square().sum(-1) / values[:, 0].square()).numpy(), rtol=1e-4)


def test_the_entropy_of_an_update_is_that_of_a_decomposition_and_nothing_without_an_update() -> None:
    model, tokens = made()
    probe = ModelProbe(model, tokens)
    assert np.isnan(probe.measure()["entropy_start"]).all()
    weight = projection(model, 1)
    old = weight.detach().clone()
    with torch.no_grad():
        weight += 0.01 * torch.randn_like(weight)
    measured = probe.measure()
    np.testing.assert_array_equal(measured["entropy_start"], measured["entropy_last"])
    change = weight.detach() - old
    query, key, d_query, d_key = old[:16], old[32:48], change[:16], change[32:48]
    squares = torch.linalg.svdvals(d_query.T @ key + query.T @ d_key).square()
    expected = torch.special.entr(squares / squares.sum()).sum()
    assert np.isnan(measured["entropy_start"][:2]).all()
    np.testing.assert_allclose(measured["entropy_start"][2], expected.item(), rtol=1e-3)


def test_an_update_along_one_direction_has_little_entropy() -> None:
    model, tokens = made()
    probe = ModelProbe(model, tokens)
    probe.measure()
    weight = projection(model, 0)
    with torch.no_grad():
        weight[:16] += torch.outer(torch.randn(16), torch.randn(32))
    assert probe.measure()["entropy_last"][0] < 1e-3


def test_the_sign_share_is_one_when_every_input_lies_on_one_side() -> None:
    model, tokens = made()
    probe = ModelProbe(model, tokens)
    first = probe.measure()["sign_share"]
    assert first.shape == (6,)
    assert ((first >= 0.5) & (first <= 1.0)).all()
    with torch.no_grad():
        model.wte.weight[:] = torch.randn(32)
        assert model.wpe is not None
        model.wpe.weight[:] = 0.0
    assert probe.measure()["sign_share"].tolist() == [1.0] * 6


def test_weights_that_are_not_finite_read_nan_and_raise_nothing() -> None:
    model, tokens = made()
    probe = ModelProbe(model, tokens)
    probe.measure()
    with torch.no_grad():
        projection(model, 1)[0, 0] = torch.nan
    measured = probe.measure()
    np.testing.assert_array_equal(np.isnan(measured["stable_rank"]), [False, False, True, False])
