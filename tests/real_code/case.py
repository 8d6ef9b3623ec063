"""What a case says of a repository: how its model trains, and what is true of its attention, counted by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor, nn

STEPS: Final = 20
SWITCH_AT: Final = 12
"""After this step a person switches every head; until then nothing may change a bit."""
EVERY: Final = 4
"""A sample is taken every this many steps."""
SAMPLED: Final = (1, *range(EVERY, SWITCH_AT + 1, EVERY))
"""Steps whose scores and norms are judged."""

Rows = Callable[[Mapping[str, Tensor], str, int], tuple[Tensor, Tensor]]
"""W_Q and W_K of a layer and head: rows [D, E] picked by hand from the state dict."""


class Lines(Protocol):
    """The two lines that a case adds to a training."""

    def attach(self, model: nn.Module, **given: Any) -> None: ...

    def step(self, loss: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model of one repository."""

    name: str
    repository: str
    """Owner and name, as in the address of its clone."""
    model: str
    train: Callable[[Lines], None]
    """Trains until `Lines.step` ends it, in the folder of the snapshot."""
    layers: int
    """Modules that compute attention."""
    watched: int | None = None
    """Those of them that foreshock measures; None: all."""
    heads: int = 4
    key_heads: int = 4
    rows: Rows | None = None
    """None: foreshock must not report norms."""
    switch: str = "applied"
    """"applied", or a regular expression that the reason of the refusal matches."""
    dropout: bool = False
    """Whether attention drops weights: a switched layer draws other masks, so the loss moves."""
    says: tuple[str, ...] = ()
    """Regular expressions of the lines that this case alone causes. Each must be printed, and no other."""
    folder: str = "."
    """Folder of the snapshot that the training starts in and imports from."""

    @property
    def measured(self) -> int:
        """How many layers foreshock measures."""
        return self.layers if self.watched is None else self.watched


def separate(query: str, key: str, *, width: int, group: int = 1) -> Rows:
    """Weights of their own, [H D, E]; `group` query heads share a key head."""
    return lambda state, layer, head: (
        _head(state[f"{layer}.{query}"], head, width),
        _head(state[f"{layer}.{key}"], head // group, width),
    )


def fused(weight: str, *, width: int, heads: int, group: int = 1) -> Rows:
    """One weight: all queries, then all keys, then all values."""
    return lambda state, layer, head: (
        _head(state[f"{layer}.{weight}"], head, width),
        _head(state[f"{layer}.{weight}"], heads + head // group, width),
    )


def outside(inner: str, rows: Rows) -> Rows:
    """The module that calls attention is a child `inner` of the one that has the weights."""
    return lambda state, layer, head: rows(state, layer.removesuffix(inner), head)


def _head(weight: Tensor, head: int, width: int) -> Tensor:
    return weight[head * width : (head + 1) * width]
