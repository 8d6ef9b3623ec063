"""What rounding does to dW_Q and to the row sums of dS under each mode, against float64, by the size of a common key.

`python -P -m foreshock.benchmarks.row_error`; the reference, on a CPU. Queries, keys and values of independent noise;
all queries and keys share a direction, which makes the offset, and all values another. dW_Q = sum over tokens of
dq_t x_t^T for random inputs x.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foreshock.contract.modes import Mode, mode_name
from foreshock.kernels.flash_attention import AttentionSpec, Numerics, reference
from foreshock.kernels.flash_attention.reference import row_sum_defect
from foreshock.kernels.flash_attention.spec import Arguments, Saved

OFFSETS = (0.0, 30.0, 300.0, 3000.0, 1e4)
MODES = (
    Mode.PLAIN,
    Mode.EXACT_DELTA,
    Mode.ROW_CORRECTED,
    Mode.CENTRED_KEYS,
    Mode.CENTRED_VALUES,
    Mode.EXACT_DELTA | Mode.CENTRED_KEYS,
    Mode.CENTRED_KEYS | Mode.CENTRED_VALUES,
    Mode.ROW_CORRECTED | Mode.CENTRED_KEYS,
    Mode.ROW_CORRECTED | Mode.CENTRED_KEYS | Mode.CENTRED_VALUES,
)


class RowError(NamedTuple):
    """What one arm errs by."""

    weight: float
    """Norm of the error of dW_Q over its norm."""
    row_sum: float
    """Root mean square of the row sums of dS as it is multiplied for dK, thus rounded; exact arithmetic makes it 0."""
    key_sum: float
    """Norm of dK summed over tokens, what trains a key bias, over the norm of dK; exact arithmetic makes it 0."""


def problem(offset: float, seed: int = 0, length: int = 256, dim: int = 64, shared_value: float = 2.0) -> list[Tensor]:
    """query, key, value, gradient [2, 1, length, dim] in bf16, and the inputs x [2, length, 128]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (2, 1, length, dim)
    common = draw(dim)
    common = common / common.norm()
    query = draw(*shape) + 4 * common
    key = draw(*shape) + common * offset * math.sqrt(dim) / 4
    value = draw(*shape) + shared_value * draw(dim)
    return [*(x.bfloat16() for x in (query, key, value, draw(*shape))), draw(2, length, 128)]


def row_error(inputs: list[Tensor], mode: Mode, numerics: Numerics) -> RowError:
    """One arm, causal, against float64."""
    query, key, value, grad, x = inputs
    modes = torch.full((query.shape[1],), int(mode), dtype=torch.int32)

    def gradients(numerics: Numerics, dtype: torch.dtype) -> tuple[AttentionSpec, Tensor, Tensor]:
        spec = AttentionSpec(query.shape[3] ** -0.5, "top_left", numerics=numerics)
        given = Arguments(modes, None, None, query.shape[2], key.shape[2], None, spec)
        q, k, v, g = (x.to(dtype) for x in (query, key, value, grad))
        saved = Saved(q, k, v, *reference.attention_forward(q, k, v, given))
        grads = reference.attention_backward(g, saved, None, given)
        return spec, torch.einsum("bhsd,bse->de", grads[0].double(), x.double()), grads[1].double()

    _, truth, _ = gradients("float64", torch.float64)
    spec, given, grad_key = gradients(numerics, query.dtype)
    error = ((given - truth).norm() / truth.norm()).item()
    key_sum = (grad_key.sum((0, 1, 2)).norm() / grad_key.norm()).item()
    return RowError(error, row_sum_defect(grad, query, key, value, modes, spec)[1], key_sum)


def mean_error(offset: float, mode: Mode, numerics: Numerics, seeds: int = 4) -> RowError:
    """The mean of some seeds."""
    found = [row_error(problem(offset, seed), mode, numerics) for seed in range(seeds)]
    return RowError(*(sum(column) / seeds for column in zip(*found, strict=True)))


def main() -> None:
    """Print a table of dW_Q's error, row sum and key sum for every mode and offset."""
    arms: list[tuple[str, Mode, Numerics]] = [("float32", Mode.PLAIN, "float32")]
    arms += [(mode_name(mode), mode, "kernel") for mode in MODES]
    arms += [(f"paper, {mode_name(mode)}", mode, "paper") for mode in MODES]
    print("| variant | " + " | ".join(f"{offset:g}" for offset in OFFSETS) + " |")
    print("|---|" + "---|" * len(OFFSETS))
    for name, mode, numerics in arms:
        cells = (" / ".join(f"{x:.1e}" for x in mean_error(offset, mode, numerics)) for offset in OFFSETS)
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
