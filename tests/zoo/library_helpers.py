"""Helpers for the entries of libraries: names, cases and random inputs."""

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo.running import Case
from torch import Tensor, nn

Cases = Callable[[nn.Module], list[Case]]
Named = tuple[str, Callable[[], nn.Module], Cases]

LENGTH = 12


def draw(*shape: int) -> Tensor:
    """Normally distributed numbers with a fixed seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def words(*shape: int, first: int = 3, last: int = 60) -> Tensor:
    """Token ids with a fixed seed."""
    return torch.randint(first, last, shape, generator=torch.Generator().manual_seed(5))


def padding(place: str) -> Tensor:
    """True at padding tokens, [2, LENGTH]: at the right, left or inside of the first row."""
    padded = torch.zeros(2, LENGTH, dtype=torch.bool)
    padded[0, {"right": slice(8, 12), "left": slice(0, 4), "inside": slice(4, 7)}[place]] = True
    return padded


def given(**inputs: Any) -> Cases:
    """A single case with these inputs."""
    return lambda model: [Case("unpadded", inputs)]
