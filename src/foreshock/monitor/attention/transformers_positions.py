"""Shows transformers that a sequence is not packed where nobody can have packed it.

Its models make their masks from position numbers, which may say that a row holds several sequences. In eager mode they
read the numbers back from the device to find out, as they do without us; under torch.compile they cannot, and make a
mask of the general kind, which no kernel serves. But packing is shown by giving `position_ids`: numbers that the model
makes itself count straight up from 0. This is so only while our kernels are to serve a layer (backend_selector.py).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import PreTrainedModel

from foreshock.monitor.attention.copies import leave_no_trace_in_copies

_NAME: Final = "_preprocess_mask_arguments"
_POSITIONS: Final = "position_ids"
_ARGUMENTS: Final = ["config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids"]
_function: Final[Any] = getattr(masking_utils, _NAME, None)
_original: Final[Any] = (
    _function if _function and list(inspect.signature(_function).parameters)[:5] == _ARGUMENTS else None
)
"""None in a version that finds out otherwise; models that are compiled whole then go unwatched, with a warning."""


class _Counting:
    """The watched model that counts its own positions in the forward that is traced; process-wide, as torch.compile can
    follow it. What makes a mask for any other model, in this thread or another, finds a configuration not its own."""

    config: Any = None
    """Of that model; None where numbers were given, where it is unknown, and in eager mode."""
    users: int = 0


_counting: Final = _Counting()


def _preprocess(
    config: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Any,
    *more: Any,
    **named: Any,
) -> Any:
    if torch.compiler.is_compiling() and config is _counting.config:
        position_ids = None
    return _original(config, inputs_embeds, attention_mask, past_key_values, position_ids, *more, **named)


@functools.cache  # a function of its own each time would make torch.compile start anew
def _hook(names: tuple[str, ...]) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
    # Found by name: of a model compiled whole this hook is traced by itself, and under dynamic=True a place among the
    # arguments would be a symbol, whose comparison makes a graph of its own.
    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            return
        given = dict(zip(names, args, strict=False)).get(_POSITIONS, kwargs.get(_POSITIONS))
        _counting.config = module.config if given is None and _POSITIONS in names else None

    return note


def _forget(module: nn.Module, args: Any, output: Any) -> None:
    _counting.config = None


def watch_positions(root: nn.Module) -> Callable[[], None]:
    """Let the models inside `root` make their masks without a look at position numbers that they make themselves;
    returns the undoing."""
    if _original is None:
        return lambda: None
    handles, stay_clean = [], []
    for model in (m for m in root.modules() if isinstance(m, PreTrainedModel)):
        names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        handles.append(model.register_forward_pre_hook(_hook(names), with_kwargs=True))
        handles.append(model.register_forward_hook(_forget, always_call=True))
        stay_clean.append(leave_no_trace_in_copies(model))
    _counting.users += 1
    vars(masking_utils)[_NAME] = _preprocess

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for undo_copies in stay_clean:
            undo_copies()
        _counting.users -= 1
        if _counting.users == 0:
            vars(masking_utils)[_NAME] = _original
            _counting.config = None

    return undo
