"""What the entries of libraries are made of: a name, a model and its cases, and inputs that are drawn."""

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo.running import Case
from torch import Tensor, nn

Cases = Callable[[nn.Module], list[Case]]
Named = tuple[str, Callable[[], nn.Module], Cases]

LENGTH = 12


def draw(*shape: int) -> Tensor:
    """Normal numbers, the same ones always."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def words(*shape: int, first: int = 3, last: int = 60) -> Tensor:
    """Numbers of words."""
    return torch.randint(first, last, shape, generator=torch.Generator().manual_seed(5))


def padding(place: str) -> Tensor:
    """True where a token is padding, [2, LENGTH]: on the right, on the left or inside the first row."""
    padded = torch.zeros(2, LENGTH, dtype=torch.bool)
    padded[0, {"right": slice(8, 12), "left": slice(0, 4), "inside": slice(4, 7)}[place]] = True
    return padded


def given(**inputs: Any) -> Cases:
    """One case, with these inputs."""
    return lambda model: [Case("unpadded", inputs)]
