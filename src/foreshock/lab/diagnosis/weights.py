"""Weights of any usual checkpoint, loaded into a model: files of torch and safetensors, and folders of them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

_SHOWN: Final = 3
"""Names of many that a sentence lists."""
_HOLDERS: Final = ("model", "state_dict", "model_state_dict", "module", "app", "weights")
"""Keys under which training loops, Lightning, DeepSpeed and torchtitan keep the weights."""
_WRAPPERS: Final = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What DDP, torch.compile, FSDP and checkpointing write into names."""


def some(names: Iterable[str], between: str = ", ") -> str:
    """The first three, and how many more there are."""
    shown = list(names)
    more = len(shown) - _SHOWN
    return between.join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Load what `path` holds into the model; sentences about what was left out or is not as it was trained.

    Prefixes of wrappers and of an enclosing or enclosed model are found by themselves. Raises ValueError with a
    sentence for a file that is no checkpoint, one of another model, and one that lacks parameters of the model.
    """
    given = _weights_in(read(path))
    if not given:
        raise ValueError(f"{path} holds no weights; expected tensors by name, or such under {', '.join(_HOLDERS)}")
    wanted = model.state_dict()
    names = _named_alike(list(given), list(wanted))
    found = {names[name]: tensor for name, tensor in given.items() if name in names}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if found.keys().isdisjoint(parameters):
        raise ValueError(f"{path} is of another model: {some(given)} fit no parameter of {type(model).__name__}, "
                         f"which has {some(wanted)}")  # fmt: skip
    try:
        left_out = model.load_state_dict(found, strict=False).missing_keys
    except RuntimeError as error:  # a line for each parameter of another shape, after a first one
        raise ValueError(
            f"{path} is of another model: {some(map(str.strip, str(error).splitlines()[1:]), '; ')}"
        ) from None
    held = {wanted[name].data_ptr() for name in found}  # a tied weight is saved once
    if missing := [name for name in left_out if name in parameters and wanted[name].data_ptr() not in held]:
        raise ValueError(f"{path} lacks {some(missing)}, which {type(model).__name__} has; give the whole model")
    extra = [name for name in given if name not in names]
    return [f"{path.name}: {some(extra)} belong to no part of the model and were left out."] if extra else []


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, on the CPU; nothing in it is run. Raises ValueError with a sentence for what is none."""
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    try:
        saved = _read_folder(path) if path.is_dir() else _read_file(path)
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__} {reason}".strip()
        if "Weights only load failed" in reason:
            reason = "it holds objects beside tensors; save model.state_dict()"
        raise ValueError(f"{path} is nothing that torch loads safely: {reason}") from None
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds a {type(saved).__name__}; give a checkpoint, a dictionary")
    return saved


def _read_file(path: Path) -> Any:
    if path.stat().st_size == 0:
        raise ValueError("it is empty")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True, map_location="cpu")


def _read_folder(path: Path) -> dict[str, Any]:
    if (path / ".metadata").is_file():
        # Its metadata are a pickle, which could run anything.
        raise ValueError(
            "a distributed checkpoint must be made one file first: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"
        )
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise ValueError("a folder without *.safetensors or pytorch_model*.bin")
    return {name: tensor for file in files for name, tensor in _read_file(file).items()}


def _weights_in(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors by name, from wherever the loop put them."""
    for holder in _HOLDERS:
        if isinstance(inner := saved.get(holder), Mapping):
            return _weights_in(inner)
    return {str(name): value for name, value in saved.items() if isinstance(value, Tensor)}


def _named_alike(given: list[str], wanted: list[str]) -> dict[str, str]:
    """The model's name for each name of the checkpoint, with the prefix taken off or put on that fits most names."""
    plain = {_WRAPPERS.sub("", name): name for name in wanted}
    bare = {name: _WRAPPERS.sub("", name) for name in given}

    def fitting(taken: str, put: str) -> dict[str, str]:
        return {
            name: plain[put + bare[name].removeprefix(taken)]
            for name in given
            if bare[name].startswith(taken) and put + bare[name].removeprefix(taken) in plain
        }

    # Where names are those of a part, or of a whole around it, its longest name ends like one of the others.
    longest, longest_given = max(plain, key=len), max(bare.values(), key=len)
    taken = {name.removesuffix(longest) for name in bare.values() if name.endswith(f".{longest}")}
    put = {name.removesuffix(longest_given) for name in plain if name.endswith(f".{longest_given}")}
    choices = [("", ""), *((prefix, "") for prefix in sorted(taken)), *(("", prefix) for prefix in sorted(put))]
    return max((fitting(*choice) for choice in choices), key=len)  # the first of equals: as it is
