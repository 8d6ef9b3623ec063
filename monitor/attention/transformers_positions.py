"""Tells transformers that a sequence is not packed where nobody can have packed it.

Its models make their masks from position numbers, which may say that a row holds several sequences. In eager mode they
read the numbers back from the device to find out; under torch.compile they cannot, and make a mask of the general kind,
which no kernel serves. But packing is told by giving `position_ids`: numbers that the model makes itself count straight
up from 0.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_utils import PreTrainedModel

from foreshock.monitor.attention.copies import leave_no_trace_in_copies

_NAME: Final = "find_packed_sequence_indices"
_original: Final[Callable[[Tensor], Tensor | None] | None] = getattr(masking_utils, _NAME, None)
"""None in a version that finds out otherwise; models that are compiled whole then go unwatched, and are told so."""


class _Positions:
    """What the watched model whose forward runs was given, process-wide, as torch.compile can follow it."""

    given: bool = True
    """Also where it cannot be told, and outside every watched model."""
    users: int = 0


_positions: Final = _Positions()


def _find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    return _original(position_ids) if _positions.given and _original is not None else None


def _hook(index: int | None) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_ids")
        if given is None and index is not None and len(args) > index:
            given = args[index]
        _positions.given = given is not None or index is None

    return note


def _forget(module: nn.Module, args: Any, output: Any) -> None:
    _positions.given = True


def watch_positions(root: nn.Module) -> Callable[[], None]:
    """Let the models inside `root` make their masks without a look at position numbers that they make themselves;
    returns the undoing."""
    if _original is None:
        return lambda: None
    handles, stay_clean = [], []
    for model in (m for m in root.modules() if isinstance(m, PreTrainedModel)):
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        index = names.index("position_ids") if "position_ids" in names else None
        handles.append(model.register_forward_pre_hook(_hook(index), with_kwargs=True))
        handles.append(model.register_forward_hook(_forget, always_call=True))
        stay_clean.append(leave_no_trace_in_copies(model))
    _positions.users += 1
    vars(masking_utils)[_NAME] = _find_packed_sequence_indices

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for undo_copies in stay_clean:
            undo_copies()
        _positions.users -= 1
        if _positions.users == 0:
            vars(masking_utils)[_NAME] = _original
            _positions.given = True

    return undo
