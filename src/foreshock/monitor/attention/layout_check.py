"""Norms are of the right rows or unknown: what a layer's projections gave and what its attention got are compared.

Hooks on the projections and the call of attention that follows note a few tokens, in compiled code as in any other. At
the next reading of the norms these numbers show the layout (monitor/model/layouts.py).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch._dynamo
import torch._dynamo.symbolic_convert
from torch import Tensor, nn

from foreshock.monitor.attention.watched_layer import LAYOUT_ATTRIBUTE, leave_no_trace_in_copies
from foreshock.monitor.model.discovery import listed
from foreshock.monitor.model.layers import (
    NOT_FOUND,
    HeadRows,
    Projection,
    base_of,
    change_by_weight,
    computes_otherwise,
    find_projection,
    has_adapters,
    is_sharded,
    normalises_heads,
    outputs_of,
    stored,
    why_projection_unread,
    why_unmeasured,
)
from foreshock.monitor.model.layouts import Call, Corners, InconclusiveCallError, Placed, Rows, parts_of

_TRIES: Final = 3
"""Calls that may fit no layout before the norms stay unknown: one may be of another kind, for example with a cache."""
_UNSEEN: Final = "no call has shown yet which rows are which head's"
_SPREAD: Final = (
    "its projections are spread over processes by tensor parallelism, and no name shows which heads this process has"
)
_HOOK_ID: Final = -1
"""The same in every module, as for watched modules (interception.py)."""
_ALLOWED: Final = 2.0**-6
"""Relative difference of outputs that passes for rounding: twice the precision of bfloat16."""


_Written = tuple[Tensor, Any, Any]
"""The corners of one call (Corners), [4, ...], and how many sequences of how many tokens there were."""


class _Noted:
    """A projection whose outputs are noted."""

    def __init__(self, name: str, holder: nn.Module, check: "LayoutCheck") -> None:
        self.name, self.holder, self.check = name, holder, check
        self.outputs: _Written | None = None
        self.change: tuple[Tensor, Tensor] | None = None
        """As change_by_weight, of a projection with a forward of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class LayoutCheck:
    """Where W_Q and W_K of one layer lie, as its calls show it."""

    def __init__(self, owner: nn.Module | None, heads: int, found: Projection | str) -> None:
        """`found`: what names show, or why they show nothing; then the children of `owner`, if any, are looked at."""
        self.gone = False
        """The layer's module is no part of the model any more: another may stand in its place."""
        self._owner, self._heads = owner, heads
        self._undo: list[Callable[[], None]] = []
        self._accept(found)
        self.announced: Final = found.layout if isinstance(found, Projection) else self.describe()

    def _accept(self, found: Projection | str) -> None:
        self._found = found if isinstance(found, Projection) else None
        self._why = found if isinstance(found, str) else _UNSEEN
        self._proved: Projection | None = None
        self._unscalable, self._tries = "", _TRIES
        self._given: list[_Written] | None = None
        named: list[tuple[str, nn.Module]] = []
        if self._found is not None:
            self._owner = self._found.owner
            of_names = (self._found.query.holder, self._found.key.holder)
            named = [(name, child) for name, child in self._owner.named_children() if child in of_names]
            if self._owner in of_names:
                self._proved = self._found  # PyTorch's own module, whose layout is PyTorch's
        elif self._owner is not None and found == NOT_FOUND:
            named, self._why = list(_projections(self._owner)), _UNSEEN
        self._noted = [_Noted(*each, self) for each in named]
        self._state = self._now()

    def start(self) -> None:
        """Put hooks on the projections."""
        for noted in self._noted:
            other = vars(noted.holder).get(LAYOUT_ATTRIBUTE)
            if isinstance(other, _Noted) and other.holder is noted.holder:  # else it is a copy's
                for check in (self, other.check):
                    check.refuse(f"another layer computes with its {noted.name} as well")
                return
            vars(noted.holder)[LAYOUT_ATTRIBUTE] = noted
            noted.holder._forward_hooks[_HOOK_ID] = _note
            self._undo.append(functools.partial(_unhook, noted.holder, leave_no_trace_in_copies(noted.holder)))

    def refuse(self, why: str) -> None:
        """No call shows anything, for this reason."""
        self._tries, self._why, self._proved = 0, why, None

    def stop(self) -> None:
        """Take the hooks out again."""
        while self._undo:
            self._undo.pop()()

    @property
    def open(self) -> bool:
        """Whether a call is still to show where the heads lie."""
        return self._unproved and self._given is None

    @property
    def of_no_name(self) -> bool:
        """Whether no name shows where the weights lie."""
        return self._found is None

    @property
    def _unproved(self) -> bool:
        return bool(self._noted) and self._proved is None and self._tries > 0

    @property
    def proved(self) -> Projection | None:
        """What `locate` gave last."""
        return None if self.gone else self._proved

    # ---- in the forward -------------------------------------------------------------------------------------------

    def meet(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Attention is given query [..., H, S, D], key and value [..., Hkv, S, D]: keep a few of their tokens."""
        if torch.compiler.is_compiling():
            if self._noted and query.dim() > 3 and query.shape[-3] == self._heads and not _in_nested_checkpoints():
                self._given = [_corners(x, 3) for x in (query, key, value)]
        elif self.open:
            try:
                self._meet(*(x.unsqueeze(-3) if x.dim() == 3 else x for x in (query, key, value)))
            except Exception as error:
                self.refuse(f"its layout could not be looked at: {type(error).__name__}: {str(error)[:100]}")

    def _meet(self, *given: Tensor) -> None:
        heads = given[0].shape[-3]
        if heads != self._heads:
            self._tries -= 1
            self._why = f"attention was given {heads} heads where {self._heads} were announced"
        elif all(x.numel() and not x.is_nested for x in given):
            self._given = [_corners(x, 3) for x in given]

    # ---- at a step boundary ---------------------------------------------------------------------------------------

    def current(self) -> Projection | None:
        """Where the weights lie now; None while that is unknown, and where keys have a part that all heads share."""
        found = self.locate()
        return found if found is not None and found.query_of_shared is None else None

    def scalable(self) -> Projection | str:
        """What QK-Clip may scale now, or why it may not."""
        found = self.locate()
        return self._unscalable or found or self.describe().removeprefix("norms unknown: ")

    def describe(self) -> str:
        """Where the weights lie, or why that is unknown."""
        if self.gone:
            return "norms unknown: its module was taken out of the model"
        if self._proved is None:
            return f"norms unknown: {self._why}"
        shared = self._proved.query_of_shared is not None
        return "norms unknown: a part of its keys is the same in all heads" if shared else self._proved.layout

    def locate(self) -> Projection | None:
        """Where the weights lie now, by what calls have shown."""
        if self.gone:
            return None
        if self._owner is not None and self._now() != self._state:
            self._find_again(self._owner)
        if self._owner is not None and self._unproved and self._given is not None:
            try:
                self._proved = self._prove(self._owner, self._given)
            except InconclusiveCallError:
                pass  # another call may show it
            except ValueError as error:
                unread = (why_projection_unread(*child) for child in self._owner.named_children())
                self._tries, self._why = self._tries - 1, "; ".join(filter(None, (*unread, str(error))))
        return self._proved

    def _now(self) -> list[tuple[Any, ...]]:
        """What makes a projection another than it was: a wrapper round it, adapters, a computed weight, a new
        forward."""
        modules = [] if self._owner is None else [child for _, child in _descendants(self._owner)]
        if self._found is not None and self._found.query.holder is self._owner:
            modules.append(self._owner)
        return [
            (each, type(each), "forward" in vars(each), has_adapters(each), stored(each) is None) for each in modules
        ]

    def _find_again(self, owner: nn.Module) -> None:
        """A projection was replaced, wrapped or given adapters since."""
        self.stop()
        if any(is_sharded(stored(base_of(noted.holder))) for noted in self._noted):
            self._owner = None
            self._accept("its sharded projections were changed after attach")
            return
        was = self._found
        found = was and find_projection(owner, self._heads, len(was.key.starts), was.query.head_dim)
        self._accept(found or why_unmeasured(owner))
        self.start()

    def _prove(self, owner: nn.Module, given: list[_Written]) -> Projection:
        """Where the weights lie, as a call shows it. Raises as parts_of."""
        noted = {each.name: each for each in self._noted}
        written = {name: each.outputs for name, each in noted.items() if each.outputs is not None}
        self._given = None
        for each in self._noted:
            each.outputs = None
        query, key, value = map(_numbers, given)
        error = max(torch.finfo(x.dtype).eps for x, *_ in (*given, *written.values()))
        outputs = {name: _numbers(each) for name, each in written.items()}
        call = Call(outputs, query, key, value, error, normalises_heads(owner))
        widths = {name: each.numbers.shape[1] for name, each in outputs.items()}
        if self._found is None and any(outputs_of(noted[name].holder) != width for name, width in widths.items()):
            raise ValueError(_SPREAD)
        known = (None, None) if self._found is None else (self._found.query, self._found.key)
        made = {noted[name].holder: (name, width) for name, width in widths.items()}
        of_names = [
            (made[side.holder][0], _as_made(side, made[side.holder][1])) if side and side.holder in made else None
            for side in known
        ]
        parts = parts_of(call, *of_names)
        of_query, of_key = (
            _rows(noted[part.name].holder, part, side, widths[part.name])
            for part, side in zip(parts[:2], known, strict=True)
        )
        of_shared = parts.query_of_shared
        names = dict.fromkeys(part.name for part in parts[:3] if part is not None)
        layout = f"found by a call ({', '.join(names)})"
        if self._found is not None:
            layout = self._found.layout + ("" if (of_query, of_key) == known else ", in an order that a call showed")
        shared = of_shared and _rows(noted[of_shared.name].holder, of_shared, None, 0)
        placed = Projection(layout, of_query, of_key, owner, shared)
        if any(part.normalised for part in parts[:3] if part is not None):
            placed = placed.of_weights_alone("heads are normalised")
        for each in (noted[name] for name in names if computes_otherwise(noted[name].holder)):
            changes = each.change
            if changes is None or not bool((changes[0] - changes[1]).norm() <= _ALLOWED * changes[1].norm()):
                placed = placed.of_weights_alone(f"{type(each.holder).__name__} has a forward of its own")
        if parts.keys_are_values:
            self._unscalable = f"outputs of {parts.key.name} are keys and values at once"
        return placed


def _unhook(holder: nn.Module, stay_clean: Callable[[], None]) -> None:
    holder._forward_hooks.pop(_HOOK_ID, None)
    vars(holder).pop(LAYOUT_ATTRIBUTE, None)
    stay_clean()


def _note(module: nn.Module, args: Any, output: Any) -> None:
    """A projection has computed this."""
    noted: _Noted | None = getattr(module, LAYOUT_ATTRIBUTE, None)
    if noted is None or not isinstance(output, Tensor) or output.dim() < 2:
        return
    if torch.compiler.is_compiling():
        if _in_nested_checkpoints():
            return
    elif not _is_to_be_noted(noted, module, args, output):
        return
    noted.outputs = _corners(output, 2)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _in_nested_checkpoints() -> bool:
    """Whether the traced code is in a checkpoint within another one, where compiling fails if attributes are written:
    PyTorch (2.13) hands them out of the inner one only. Runs while torch.compile traces; False where it does not."""
    translator = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    return translator is not None and len(translator.output.tracers) > 2


def _is_to_be_noted(noted: _Noted, module: nn.Module, args: Any, output: Tensor) -> bool:
    """Whether it is, in code that is not compiled; one with a forward of its own is compared with its weight."""
    check = noted.check
    if noted.holder is not module or not check.open or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    if is_sharded(output) and check.of_no_name:
        check.refuse(_SPREAD)
    if type(output) is not Tensor or not output.numel():
        return False
    if args and computes_otherwise(module):
        with torch.no_grad():
            noted.change = change_by_weight(module, args[0], output)
    return True


def _corners(x: Tensor, token_dims: int) -> _Written:
    """The corners of x, of which all but the last token_dims dimensions number the sequences, and the last but one the
    tokens of each."""
    first = last = x.detach()
    while first.dim() > token_dims:
        first, last = first[0], last[-1]
    corners = torch.stack([each.select(-2, at) for each in (first, last) for at in (0, -1)])
    return corners, math.prod(x.shape[: x.dim() - token_dims]), x.shape[-2]


def _numbers(written: _Written) -> Corners:
    corners, sequences, length = written
    return Corners(corners.cpu().double().numpy(), (int(sequences), int(length)))


def _as_made(side: HeadRows, width: int) -> Rows:
    """The rows of a side among the outputs, `width` of them, of which this process may compute a part alone."""
    before = 0 if width == outputs_of(side.holder) else side.starts[0]
    return Rows(tuple(start - before for start in side.starts), side.stride)


def _rows(holder: nn.Module, part: Placed, known: HeadRows | None, width: int) -> HeadRows:
    """The rows of the weight that give these outputs, `width` of them; raises ValueError if a process computes a part
    of the outputs, and other heads than its part of the weights shows."""
    placed = HeadRows(holder, "weight", part.rows.starts, part.head_dim, part.rows.stride)
    if known is None or width == outputs_of(holder):
        return placed
    if part.rows != _as_made(known, width) or part.head_dim != known.head_dim:
        raise ValueError("this process computes other heads than its part of the weights shows")
    return known


def _descendants(owner: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Children and their names, and those of plain containers among them."""
    for name, child in owner.named_children():
        yield f"{prefix}{name}", child
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _descendants(child, f"{prefix}{name}.")


def _projections(owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The projections of a layer and their names: children with a matrix as weight."""
    for name, child in _descendants(owner):
        if not isinstance(child, nn.Embedding) and outputs_of(child) is not None:
            yield name, child


def table_of_norms(names: Sequence[str], checks: Sequence[LayoutCheck]) -> str:
    """A line for each group of layers whose weights lie otherwise than the table of `attach` shows, or unknown."""
    groups: dict[str, list[str]] = {}
    for name, check in zip(names, checks, strict=True):
        if (now := check.describe()) != check.announced:
            groups.setdefault(now, []).append(name)
    return "\n".join(f"{len(each)} x W_Q and W_K ({listed(each)}): {how}" for how, each in groups.items())
