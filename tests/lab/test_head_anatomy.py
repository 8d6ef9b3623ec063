"""What the examined batches say of one head: a planted one, whose numbers are known, and one that was called."""

import pytest
import torch
from tests.lab.planted import Attention, called, planted
from torch import nn

from foreshock.lab.diagnosis.anatomy import examine
from foreshock.lab.diagnosis.head_anatomy import head_anatomy


def test_exact_delta_takes_error_out_of_the_gradient_of_the_query_weight() -> None:
    attention = Attention()
    nn.init.constant_(attention.qkv.bias[32:], 32.0)  # a large O loses much to its rounding: delta's error leads
    call, _ = called(attention)
    anatomy = head_anatomy(0, 1, [examine(call, "here")])
    assert anatomy.weight_error_plain is not None
    assert anatomy.weight_error_exact is not None
    assert anatomy.weight_error_plain > anatomy.weight_error_exact > 0


def test_the_numbers_of_a_planted_head_come_out() -> None:
    alike = head_anatomy(0, 0, [planted(tokens=torch.ones(6, 1, 4, dtype=torch.float64)) for _ in range(4)])
    assert alike.similarity == pytest.approx(1.0)
    assert alike.first_direction == pytest.approx(1.0)
    assert alike.top_positions[0] == pytest.approx((3, 1.0))
    assert alike.top_features[0] == pytest.approx((1, 0.75))
    assert alike.one_sidedness == pytest.approx(1.0)
    assert alike.tied_share_of_error == pytest.approx(1.0)
    assert alike.weight_error_plain == pytest.approx(2 * 20**0.5 / 10)
    assert alike.weight_error_exact == pytest.approx(20**0.5 / 10)
    assert alike.delta_share_of_key_shift == pytest.approx(1.0)
    apart = head_anatomy(0, 0, [planted(tokens=torch.eye(4, dtype=torch.float64)[:, None])])
    assert apart.similarity == pytest.approx(0.0)
    assert apart.first_direction == pytest.approx(0.25)
