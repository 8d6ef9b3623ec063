"""The comparison with the truth that attach() and `foreshock doctor` make before a kernel is trusted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels import self_check
from foreshock.kernels.flash_attention import flash_attention

pytestmark = pytest.mark.promise("K12")


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    """Attention as it is, but for what `change` does to its output or its state."""

    def wrong(*tensors: Tensor, **options: Any) -> Tensor:
        return change(flash_attention(*tensors, **options), **options)

    monkeypatch.setattr(self_check, "flash_attention", wrong)


def test_attention_that_is_right_is_told_by_how_much_it_errs() -> None:
    assert "allowed 2" in self_check.run("cpu")


def uncounted(out: Tensor, state: Tensor, **_: Any) -> Tensor:
    state[:, Slot.ROWS] -= 1
    return out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out, **_: out * 1.05, r"O is off by .* PyTorch's own bf16 by"),
        (
            lambda out, **_: out * 1.05 if out.shape[3] == 128 else out,  # as Hopper's own kernels have
            r"head dim 128 with 4 key heads: O is off by .* PyTorch's own bf16 by",
        ),
        (lambda out, **_: out.detach() + 1.05 * (out - out.detach()), r"d[QKV] is off by"),
        (uncounted, "rows were counted per head instead of 192"),
    ],
    ids=["output", "output at one head dim", "gradient", "count"],
)
def test_what_is_wrong_is_found(change: Callable[..., Tensor], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, change)
    with pytest.raises(RuntimeError, match=said):
        self_check.run("cpu")


def test_one_that_is_wrong_in_one_version_of_the_kernels_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[int] = []

    def each(dim: int, group: int) -> Iterator[None]:
        for version in range(group):
            versions.append(version)
            yield

    monkeypatch.setattr(self_check, "each_version", each)
    broken(monkeypatch, lambda out, **_: out * 1.05 if versions[-1] == 1 else out)
    with pytest.raises(RuntimeError, match=r"head dim 128 with 2 key heads: O is off"):
        self_check.run("cpu")
    assert versions == [0, 0, 0, 1]
