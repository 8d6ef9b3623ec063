"""The datasets of the laboratory: bytes of Python's standard library, and byte-pair tokens of source files.

Byte-pair tokens are computed once and stored in a file. The same source files give the same tokens on every machine,
wherever the files are, and the labels of each run contain the hash of the tokens. A machine with other packages gives
another dataset, unless the token file is copied to it.
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
"""Packages whose source is tokenized in addition to the standard library."""
CHARACTERS: Final = 1_000_000_000
"""Most characters of a dataset; a token has three to four on average."""
VOCABULARIES: Final = {"byte-pairs": 8192, "folders": 50_257}
"""Vocabulary size of each tokenized dataset; the larger one is that of GPT-2."""
_SOURCE: Final = (
    *(".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cc", ".cpp", ".cu"),
    *(".inl", ".pyx", ".pxd", ".js", ".go", ".rs", ".java", ".pl"),
)
_LENGTHS: Final = range(400, 400_001)
"""Accepted file lengths in characters: shorter files have little content, longer ones are mostly tables."""
_TRAINING_SHARE: Final = 8
"""The tokenizer is trained on one of this many files."""
_LEFT_OUT: Final = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test", "lib2to3"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens in a fixed order, and their SHA-256."""

    tokens: Tensor
    """uint8, int16 or int32 [N]"""
    sha256: str
    source: str
    """description in words"""

    def windows(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw `size` windows of `length` tokens and the next token, uniformly: [size, length + 1]."""
        starts = torch.randint(len(self.tokens) - length, (size,), generator=generator)
        return self.tokens[starts[:, None] + torch.arange(length + 1)]


def standard_library() -> Corpus:
    """Return the bytes of all modules of the standard library except its tests, sorted by relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    paths = {inside.as_posix(): path for inside, path in found if not _LEFT_OUT & set(inside.parts)}
    text = b"\n".join(paths[name].read_bytes() for name in sorted(paths))
    tokens = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
    return Corpus(tokens, hashlib.sha256(text).hexdigest(), "bytes of the standard library")


def text_file(name: str) -> Path:
    """Return the path of a dataset: in the folder FORESHOCK_TEXTS, by default in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FORESHOCK_TEXTS") or Path(cache, "foreshock", "texts"), f"{name}.tokens")


def read_text(name: str) -> Corpus:
    """Read a token file: a line that describes the source, then tokens. Raises FileNotFoundError if it is missing."""
    try:
        head, _, data = text_file(name).read_bytes().partition(b"\n")
    except FileNotFoundError:
        command = f"foreshock lab corpus {name}{' --folder DIR --characters N' * (name == 'folders')}"
        raise FileNotFoundError(
            f"there is no text at {text_file(name)}; make it with `{command}`, which takes minutes"
        ) from None
    kind = np.int16 if VOCABULARIES[name] < 2**15 else np.int32  # PyTorch cannot index with uint16
    tokens = torch.from_numpy(np.frombuffer(data, dtype="<u2").astype(kind))
    return Corpus(tokens, hashlib.sha256(data).hexdigest(), f"byte pairs of {head.decode()}")


def installed(packages: Sequence[str] = PACKAGES) -> list[Path]:
    """Return the folders of the standard library and of packages. Raises ModuleNotFoundError for a missing package."""
    files = [str(importlib.import_module(package).__file__) for package in packages]
    return [Path(sysconfig.get_paths()["stdlib"]), *(Path(file).parent for file in files)]


def make_text(name: str, folders: Sequence[Path], characters: int = CHARACTERS) -> Corpus:
    """Tokenize the source files below `folders`, at most `characters` in total, and store the tokens.

    Raises FileNotFoundError for a missing folder, ValueError if there are too few files.
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
    """Yield the distinct texts of files with an accepted length, at most `most` characters in total.

    The order is shuffled with a fixed seed and depends only on relative paths, not on where the folders are.
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
    """Return the tokens of the texts as little-endian uint16, by a tokenizer trained on some of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[::_TRAINING_SHARE], trainer)
    batches = (texts[start : start + 4096] for start in range(0, len(texts), 4096))  # batches limit memory
    tokens = [np.asarray(one.ids, dtype="<u2") for batch in batches for one in tokenizer.encode_batch_fast(batch)]
    data: bytes = np.concatenate(tokens).tobytes()
    return data
