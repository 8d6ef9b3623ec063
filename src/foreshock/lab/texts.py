"""The texts that the laboratory trains on: bytes that every Python carries, and byte pairs of source files.

Byte pairs are made once and kept in a file. The same files give the same tokens on every machine, wherever they are;
each run has their hash among its labels. Machines with other packages train on another text, or are given the file.
"""

import hashlib
import importlib
import os
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from foreshock.lab.recording.whole_file import whole_file

PACKAGES: Final = ("torch", "transformers", "sympy", "numpy", "matplotlib", "networkx")
"""What byte pairs are made from besides the standard library."""
CHARACTERS: Final = 1_000_000_000
"""Of a text, at most; three to four of them make a token."""
VOCABULARIES: Final = {"byte-pairs": 8192, "folders": 50_257}
"""Tokens of each text that is made; GPT-2 has as many as the larger one."""
_SOURCE: Final = (
    *(".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cc", ".cpp", ".cu"),
    *(".inl", ".pyx", ".pxd", ".js", ".go", ".rs", ".java", ".pl"),
)
_LENGTHS: Final = range(400, 400_001)
"""Characters of a file: shorter ones say little, longer ones are tables."""
_TRAINING_SHARE: Final = 8
"""One file in this many trains the byte pairs."""
_LEFT_OUT: Final = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test", "lib2to3"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens in a fixed order, and their SHA-256."""

    tokens: Tensor
    """uint8, int16 or int32 [N]"""
    sha256: str
    source: str
    """what it is, in words"""

    def windows(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """`size` windows of `length` tokens and the one that follows, drawn uniformly: [size, length + 1]."""
        starts = torch.randint(len(self.tokens) - length, (size,), generator=generator)
        return self.tokens[starts[:, None] + torch.arange(length + 1)]


def standard_library() -> Corpus:
    """Every module of the standard library but its tests, as bytes, by their relative paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    paths = {inside.as_posix(): path for inside, path in found if not _LEFT_OUT & set(inside.parts)}
    text = b"\n".join(paths[name].read_bytes() for name in sorted(paths))
    tokens = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
    return Corpus(tokens, hashlib.sha256(text).hexdigest(), "bytes of the standard library")


def text_file(name: str) -> Path:
    """Where a text is: in FORESHOCK_TEXTS, or under the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FORESHOCK_TEXTS") or Path(cache, "foreshock", "texts"), f"{name}.tokens")


def read_text(name: str) -> Corpus:
    """A text that was made: a line that says of what, and the tokens. Raises FileNotFoundError where none was made."""
    try:
        head, _, data = text_file(name).read_bytes().partition(b"\n")
    except FileNotFoundError:
        command = f"foreshock lab corpus {name}{' --folder DIR --characters N' * (name == 'folders')}"
        raise FileNotFoundError(
            f"there is no text at {text_file(name)}; make it with `{command}`, which takes minutes"
        ) from None
    kind = np.int16 if VOCABULARIES[name] < 2**15 else np.int32  # torch indexes both
    tokens = torch.from_numpy(np.frombuffer(data, dtype="<u2").astype(kind))
    return Corpus(tokens, hashlib.sha256(data).hexdigest(), f"byte pairs of {head.decode()}")


def installed(packages: Sequence[str] = PACKAGES) -> list[Path]:
    """The folders of the standard library and of packages. Raises ModuleNotFoundError for one that is not installed."""
    files = [str(importlib.import_module(package).__file__) for package in packages]
    return [Path(sysconfig.get_paths()["stdlib"]), *(Path(file).parent for file in files)]


def make_text(name: str, folders: Sequence[Path], characters: int = CHARACTERS) -> Corpus:
    """Make a text of the source files below `folders`, at most `characters` long, and keep it in its file.

    Raises FileNotFoundError for a folder that is not there, ValueError where there are too few files.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise FileNotFoundError(f"{missing[0]} is not a folder; give --folder one that is there")
    without = {"site-packages", "dist-packages"} if name == "byte-pairs" else set()
    inside = ((n, folder, path.relative_to(folder)) for n, folder in enumerate(folders) for path in folder.rglob("*"))
    named = {
        (number, path.as_posix()): folder / path
        for number, folder, path in inside
        if path.suffix in _SOURCE and (folder / path).is_file() and not without & set(path.parts)
    }
    texts = list(_texts_of(named, characters))
    if len(texts) < 2:
        raise ValueError(
            f"{len(texts)} files of source of a usual length were found within {characters} characters; name folders "
            f"with files that end with {', '.join(_SOURCE)}, and allow more --characters"
        )
    head = f"{len(texts):,} files with {sum(map(len, texts)):,} characters"
    with whole_file(text_file(name)) as part:
        part.write_bytes(head.encode() + b"\n" + _encoded(VOCABULARIES[name], texts))
    return read_text(name)


def _texts_of(named: Mapping[Any, Path], most: int) -> Iterator[str]:
    """The text of each file of a usual length, the same content once, until there are `most` characters.

    The order is shuffled by a fixed seed, by names that do not know where the files lie.
    """
    paths = [named[name] for name in sorted(named)]
    random.Random(0).shuffle(paths)  # noqa: S311
    seen: set[bytes] = set()
    characters = 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) not in _LENGTHS or digest in seen:
            continue
        seen.add(digest)
        characters += len(text)
        if characters > most:
            return
        yield text


def _encoded(vocabulary: int, texts: Sequence[str]) -> bytes:
    """The tokens of the texts, little-endian uint16, by byte pairs that some of them give."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[::_TRAINING_SHARE], trainer)
    batches = (texts[start : start + 4096] for start in range(0, len(texts), 4096))  # all at once take much memory
    tokens = [np.asarray(one.ids, dtype="<u2") for batch in batches for one in tokenizer.encode_batch_fast(batch)]
    data: bytes = np.concatenate(tokens).tobytes()
    return data
