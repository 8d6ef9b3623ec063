"""What rounding does: float64 errs by nothing, an offset makes plain rounding worse, and a cure undoes that."""

import pytest
import torch
from tests.kernels.row_error import RowError, mean_error, problem, row_error

from foreshock.contract.modes import Mode

SEED = 11
"""None that the table is made with."""


def error(offset: float, mode: Mode, numerics: str) -> RowError:
    inputs = problem(offset, SEED, length=96, dim=32)
    return row_error(inputs, mode, numerics)  # type: ignore[arg-type]


def test_the_truth_is_float64_of_the_same_operands() -> None:
    inputs = [x.double() for x in problem(30.0, SEED, length=64, dim=32)]
    exact = row_error(inputs, Mode.PLAIN, "float64")
    assert exact.weight < 1e-12
    assert exact.key_sum < 1e-12


@pytest.mark.parametrize("numerics", ["kernel", "paper"])
def test_rounding_errs_more_than_float32_and_the_more_the_larger_the_offset(numerics: str) -> None:
    small, large = (error(offset, Mode.PLAIN, numerics) for offset in (0.0, 300.0))
    assert small.weight > 2 * error(0.0, Mode.PLAIN, "float32").weight
    assert large.weight > 3 * small.weight


def test_corrected_rows_err_alike_at_every_offset() -> None:
    near, far = (error(offset, Mode.ROW_CORRECTED, "kernel").weight for offset in (0.0, 300.0))
    assert far < 3 * near


def test_a_mean_is_that_of_its_seeds_and_a_problem_is_its_seeds_alone() -> None:
    found = [row_error(problem(30.0, seed), Mode.PLAIN, "kernel") for seed in range(2)]
    mean = mean_error(30.0, Mode.PLAIN, "kernel", seeds=2)
    assert mean == pytest.approx([sum(column) / 2 for column in zip(*found, strict=True)])
    again, other = problem(30.0, 3), problem(30.0, 4)
    assert all(torch.equal(a, b) for a, b in zip(again, problem(30.0, 3), strict=True))
    assert not torch.equal(again[0], other[0])
