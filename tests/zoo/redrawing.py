"""Zoo entries with other random numbers: another seed, spread and dtype of weights, and other token order."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from tests.zoo.judge import Entry
from tests.zoo.running import DEVIATION, SEED, Case, draw_weights
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Redrawing:
    """Parameters of the random numbers of every entry."""

    seed: int = SEED
    spread: float = DEVIATION
    """Standard deviation of the weights."""
    dtype: str = "float32"

    def __str__(self) -> str:
        if self == Redrawing():
            return ""
        return f" (seed {self.seed}, spread {self.spread:g}, {self.dtype})"

    def of(self, entry: Entry) -> Entry:
        """The entry with these numbers."""
        if self == Redrawing():
            return entry

        def build() -> nn.Module:
            model = entry.build()
            draw_weights(model, self.seed, self.spread)
            return model._apply(self._cast)  # type: ignore[no-untyped-call, no-any-return]

        def cases(model: nn.Module) -> list[Case]:
            return [dataclasses.replace(case, given=self._inputs(case.given)) for case in entry.cases(model)]

        return dataclasses.replace(entry, name=f"{entry.name}{self}", build=build, cases=cases)

    def _inputs(self, given: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        return given | {name: self._cast(self._reordered(name, value)) for name, value in tensors.items()}

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(getattr(torch, self.dtype)) if x.is_floating_point() else x

    def _reordered(self, name: str, value: Tensor) -> Tensor:
        """Token ids in another order."""
        if not name.endswith("input_ids"):
            return value
        return value[:, torch.randperm(value.shape[1], generator=torch.Generator().manual_seed(self.seed))]
