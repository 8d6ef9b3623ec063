"""Text from the source files of folders, for example of installed packages: byte pairs, some files held out.

The same files give the same text wherever the folders lie, and the hash says so. One file in HELD_OUT_EVERY is not
trained on: what a run loses on those shows what reading the others again and again does.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from foreshock.lab.recording.whole_file import whole_file
from foreshock.lab.texts.byte_pairs import SUFFIXES, encoded, texts_folder, texts_of, tokenizer_of
from foreshock.lab.texts.corpus import Corpus

VOCABULARY: Final = 50_257
"""As many as GPT-2's has."""
HELD_OUT_EVERY: Final = 100
_SOURCE: Final = (*SUFFIXES, ".c", ".cc", ".cpp", ".cu", ".inl", ".pyx", ".pxd", ".js", ".go", ".rs", ".java", ".pl")


def folder_text_file() -> Path:
    """Where the text lies: folders.tokens in the folder of texts."""
    return texts_folder() / "folders.tokens"


def folder_text() -> Corpus:
    """The text of `folder_text_file`, tokens below VOCABULARY. Raises FileNotFoundError for one not made."""
    path = folder_text_file()
    try:
        head, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no text at {path}; make it with `foreshock lab corpus folders --folder DIR --characters N`, "
            "which takes minutes"
        ) from None
    made: dict[str, Any] = json.loads(head)
    tokens = torch.from_numpy(np.frombuffer(data, dtype="<u2").astype(np.int32))
    source = (
        f"byte pairs of {made['files']:,} files with {made['characters']:,} characters, and of "
        f"{made['held_out_files']:,} held-out files with {made['held_out_characters']:,}"
    )
    trained = int(made["tokens"])
    return Corpus(tokens[:trained], hashlib.sha256(data).hexdigest(), source, held_out=tokens[trained:])


def make_folder_text(folders: Sequence[Path], characters: int) -> Corpus:
    """Make the text from files below `folders`, at most `characters` long, and keep it in `folder_text_file`.

    Files are taken in an order that a fixed seed shuffles, the same content once. Raises FileNotFoundError for a folder
    that is not there, ValueError where there are too few files.
    """
    texts = list(texts_of(_files(folders), characters))
    if len(texts) < 2:
        raise ValueError(
            f"{len(texts)} files of source of a usual length were found within {characters} characters; name folders "
            f"with files that end with {', '.join(_SOURCE)}, and allow more --characters"
        )
    held_out = texts[::HELD_OUT_EVERY]
    trained = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    tokenizer = tokenizer_of(trained, VOCABULARY)
    parts = [encoded(tokenizer, trained), encoded(tokenizer, held_out)]
    made = {
        "files": len(trained),
        "characters": sum(map(len, trained)),
        "tokens": len(parts[0]),
        "held_out_files": len(held_out),
        "held_out_characters": sum(map(len, held_out)),
    }
    with whole_file(folder_text_file()) as part:
        part.write_bytes(json.dumps(made).encode() + b"\n" + np.concatenate(parts).tobytes())
    return folder_text()


def _files(folders: Sequence[Path]) -> list[Path]:
    """Every file of source below the folders, by names that do not know where these lie."""
    named: dict[tuple[int, str], Path] = {}
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder; give --folder one that is there")
        for path in folder.rglob("*"):
            if path.suffix in _SOURCE and path.is_file():
                named[number, path.relative_to(folder).as_posix()] = path
    paths = [named[name] for name in sorted(named)]
    random.Random(0).shuffle(paths)  # noqa: S311
    return paths
