"""What the examined batches say of one head: a planted one, whose numbers are known, and one that was called."""

import pytest
import torch
from tests.lab.planted import Attention, called, planted
from torch import nn

from foreshock.lab.diagnosis.anatomy import examine
from foreshock.lab.diagnosis.head_anatomy import head_anatomy


def test_equation_2_gives_the_difference_that_exact_delta_makes() -> None:
    attention = Attention()
    nn.init.constant_(attention.qkv.bias[32:], 32.0)  # a large O loses much to its rounding: delta's error leads
    call, _ = called(attention)
    anatomy = head_anatomy(0, 1, [examine(call, "here")])
    assert anatomy.equation_2 is not None
    cosine, length = anatomy.equation_2
    assert cosine > 0.99  # dS and dQ are rounded to bf16 besides
    assert length == pytest.approx(1.0, abs=0.05)
    assert anatomy.weight_error_plain is not None
    assert anatomy.weight_error_exact is not None
    assert anatomy.weight_error_plain > anatomy.weight_error_exact > 0


def test_the_numbers_of_a_planted_head_come_out() -> None:
    alike = head_anatomy(0, 0, [planted(tokens=torch.ones(6, 1, 4, dtype=torch.float64)) for _ in range(4)])
    assert alike.similarity == pytest.approx(1.0)
    assert alike.spectrum[0] == pytest.approx(1.0)
    assert alike.top_positions[0] == pytest.approx((3, 1.0))
    assert alike.top_features[0] == pytest.approx((1, 0.75, 1.0))
    assert alike.one_sidedness == pytest.approx(1.0)
    assert alike.tied_share_of_error == pytest.approx(1.0)
    assert alike.weight_coherence_plain == pytest.approx(4.0)  # four identical errors
    assert alike.weight_error_rank_one == pytest.approx(1.0)
    assert alike.weight_error_plain == pytest.approx(2 * 20**0.5 / 10)
    assert alike.delta_share_of_weight_error == pytest.approx(0.75)
    assert alike.delta_share_of_key_shift == pytest.approx(1.0)
    assert alike.equation_2 == pytest.approx((1.0, 1.0))
    assert alike.push_plain > 100  # -(sum of dK) . mean key is 8 in every batch
    apart = head_anatomy(0, 0, [planted(tokens=torch.eye(4, dtype=torch.float64)[:, None])])
    assert apart.similarity == pytest.approx(0.0)
    assert apart.spectrum[0] == pytest.approx(0.25)
