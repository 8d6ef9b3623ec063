"""Text that every Python carries: the source of its own standard library, read as bytes."""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VOCABULARY = 256
"""A token is a byte."""
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test", "lib2to3"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens in a fixed order, and their SHA-256."""

    tokens: Tensor
    """uint8 [N]"""
    sha256: str
    source: str
    """what it is, in words"""
    held_out: Tensor | None = None
    """tokens that are not trained on"""

    def windows(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """`size` windows of `length` tokens and the one that follows, drawn uniformly: uint8 [size, length + 1]."""
        starts = torch.randint(len(self.tokens) - length, (size,), generator=generator)
        return self.tokens[starts[:, None] + torch.arange(length + 1)]

    def held_out_windows(self, size: int, length: int) -> Tensor | None:
        """`size` windows [size, length + 1] spread evenly over the held-out text; None where there is too little."""
        if self.held_out is None or len(self.held_out) <= length:
            return None
        starts = torch.linspace(0, len(self.held_out) - length - 1, size, dtype=torch.float64).long()
        return self.held_out[starts[:, None] + torch.arange(length + 1)]


def standard_library(root: Path | None = None) -> Corpus:
    """Every module of the standard library (or of `root`) but its tests, in the order of their relative paths.

    Raises FileNotFoundError where there is too little source to train on.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        (path.relative_to(root) for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts)),
        key=lambda path: path.as_posix(),
    )
    text = b"\n".join((root / path).read_bytes() for path in paths)
    if len(text) < 2**20:
        raise FileNotFoundError(
            f"{root} holds {len(text)} bytes of Python source; the laboratory needs at least 1 MiB. "
            "Use a Python whose standard library is on disk as .py files"
        )
    tokens = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
    source = f"{len(paths)} modules of the standard library of Python {platform.python_version()}"
    return Corpus(tokens, hashlib.sha256(text).hexdigest(), source)
