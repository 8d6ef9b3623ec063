"""The comparison with float64 that attach() and `foreshock doctor` make before they use a kernel."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels import self_check
from foreshock.kernels.flash_attention import flash_attention

pytestmark = pytest.mark.promise("K12")


def break_attention(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    """Let `change` modify the output or the state of attention."""

    def changed_attention(*tensors: Tensor, **options: Any) -> Tensor:
        return change(flash_attention(*tensors, **options), **options)

    monkeypatch.setattr(self_check, "flash_attention", changed_attention)


def test_correct_attention_passes_and_its_error_is_reported() -> None:
    assert "allowed 2" in self_check.run("cpu")


def count_one_row_less(out: Tensor, state: Tensor, **_: Any) -> Tensor:
    state[:, Slot.ROWS] -= 1
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, **_: out * 1.05, r"O is off by .* PyTorch's own bf16 by"),
        (
            lambda out, **_: out * 1.05 if out.shape[3] == 128 else out,  # the head dim of the Hopper kernels
            r"head dim 128 with 4 key heads: O is off by .* PyTorch's own bf16 by",
        ),
        (lambda out, **_: out.detach() + 1.05 * (out - out.detach()), r"d[QKV] is off by"),
        (count_one_row_less, "rows were counted per head instead of 192"),
    ],
    ids=["output", "output at one head dim", "gradient", "count"],
)
def test_wrong_output_gradient_or_count_is_found(
    change: Callable[..., Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_attention(monkeypatch, change)
    with pytest.raises(RuntimeError, match=message):
        self_check.run("cpu")


def test_error_in_only_one_kernel_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[int] = []

    def each(dim: int, group: int) -> Iterator[None]:
        for version in range(group):
            versions.append(version)
            yield

    monkeypatch.setattr(self_check, "each_version", each)
    break_attention(monkeypatch, lambda out, **_: out * 1.05 if versions[-1] == 1 else out)
    with pytest.raises(RuntimeError, match=r"head dim 128 with 2 key heads: O is off"):
        self_check.run("cpu")
    assert versions == [0, 0, 0, 1]
