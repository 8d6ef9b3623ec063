"""Check that norms are measured on the right rows, by comparing a layer's projections with the inputs of its attention.

Names suggest which outputs of a projection belong to which head of queries and keys (monitor/model/layers.py). Hooks on
the projections and the following call of attention record the first and the last token of two sequences, also in
compiled code. When the norms are measured next, these values either confirm a suggested layout, or the norms are not
measured. To confirm it, the features of each head must have the same length as those that attention received, up to one
factor for all heads and tokens. Rotary positions do not change lengths, and other rows have different lengths.

In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), one part of each key belongs to its head
and is computed from a latent. The other part, which encodes the positions, is the same in all heads.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch._dynamo
import torch._dynamo.symbolic_convert
from torch import Tensor, nn

from foreshock.monitor.attention.watched_layer import LAYOUT_ATTRIBUTE, leave_no_trace_in_copies, transformed
from foreshock.monitor.guard import logger
from foreshock.monitor.model.layers import (
    HeadRows,
    Projection,
    change_by_weight,
    computes_otherwise,
    has_adapters,
    latent_children,
    latent_projections,
    normalises_heads,
    outputs_of,
    projections,
    stored,
)

Numbers = npt.NDArray[np.float64]

_LENGTH: Final = 1e-5
"""Relative difference up to which two lengths count as equal, unless the operands' rounding allows more."""
_ORDERS: Final = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3))
"""Which corners of a projection's outputs may be those that attention received: the same ones; those of a projection
with the tokens' dimension before that of the sequences; only the first and the last, which are the same in any order
and for concatenated sequences."""


class Call(NamedTuple):
    """The corners of one call: the first and the last token of the first sequence and of the last one."""

    outputs: Mapping[nn.Module, Numbers]
    """The outputs of each projection, [4, C]."""
    query: Numbers
    key: Numbers
    value: Numbers
    """The inputs of attention, [4, H, D]."""
    error: float
    """The largest relative rounding error of these values."""
    names: str = ""
    """The names of the projections."""


class InconclusiveCallError(Exception):
    """This call neither confirms nor refutes a layout, for example because all values are 0. Another call may."""


def confirmed(call: Call, proposed: Sequence[Projection]) -> tuple[Projection, bool]:
    """Return the first of `proposed` that produces the queries and keys of a call, and whether the call uses these keys
    as values too.

    Raises ValueError with a message if none does, and InconclusiveCallError if this call does not allow a conclusion.
    """
    given = [call.query, call.key, *call.outputs.values()]
    if not call.outputs or not all(x.size and np.isfinite(x).all() and x.any() for x in given):
        raise InconclusiveCallError
    shared = shared_features(call)
    for projection in proposed:
        key = call.key[..., ~shared]
        sides = [
            (projection.query, call.query[..., ~shared]),
            (projection.key, key),
            (projection.query_of_shared, call.query[..., shared]),
        ]
        if all(_gives(side, part, call) for side, part in sides):
            values = call.value[..., : projection.key.head_dim]
            return projection, values.shape == key.shape and _gives(projection.key, values, call)
    of = f"the outputs of its projections ({call.names}) give its queries and keys"
    heads, dim = call.query.shape[1:]
    raise ValueError(f"no known layout shows how {of}, {heads} heads of {dim} features")


def shared_features(call: Call) -> npt.NDArray[np.bool_]:
    """Return the key features that are the same in all heads; none if all features are."""
    same: npt.NDArray[np.bool_] = np.all(call.key == call.key[:, :1], axis=(0, 1))
    return same & ~same.all()


def _gives(side: HeadRows | None, part: Numbers, call: Call) -> bool:
    """Whether the outputs of a projection become this part [4, H, d] of the inputs of attention, for all heads."""
    if side is None or not part.shape[2]:
        return side is None and not part.shape[2]
    outputs = call.outputs.get(side.holder)
    heads = len(side.starts)
    if outputs is None or part.shape[2] != side.head_dim or part.shape[1] % heads:
        return False
    rows = side.outputs - (0 if outputs.shape[1] == outputs_of(side.holder) else side.starts[0])  # a process's shard
    if rows.max() >= outputs.shape[1]:
        return False
    of_heads = outputs[:, rows.repeat(part.shape[1] // heads, 0)]  # neighbouring query heads share a key head
    orders = ((of_heads[list(order)], part[[0, 3] if len(order) == 2 else slice(None)]) for order in _ORDERS)
    return any(_as_long(*both, call.error) for both in orders)


def _as_long(ours: Numbers, theirs: Numbers, error: float) -> bool:
    """Whether the vectors of `theirs` have the same lengths as those of `ours`, up to one factor. Both [t, H, D]."""
    lengths, wanted = np.linalg.norm(ours, axis=2), np.linalg.norm(theirs, axis=2)
    known = lengths[lengths > 0]
    if len(np.unique(known)) < 2 or np.any((lengths == 0) != (wanted == 0)):
        return False
    ratios = wanted[lengths > 0] / known
    return bool(np.ptp(ratios) <= 2 * max(_LENGTH, 4 * error / theirs.shape[2] ** 0.5) * np.median(ratios))


_TRIES: Final = 3
"""Calls that do not fit any layout before the norms stay unmeasured. More than one, because a call may be of another
kind, for example with a cache."""
_NORMALISED: Final = "its queries and keys are normalised, so its weights alone do not bound its scores"
_NOT_SHOWN: Final = "no call has shown yet which rows belong to which head"
_CHANGED: Final = "its projections were changed after attach; attach again to measure their norms"
_HOOK_ID: Final = -1
"""Key of the hook, the same in every module as for watched modules (interception.py)."""
_ALLOWED: Final = 2.0**-6
"""Relative difference of outputs that rounding may explain: twice the precision of bfloat16."""


class _Noted:
    """A projection whose outputs are recorded."""

    def __init__(self, name: str, holder: nn.Module, check: "LayoutCheck") -> None:
        self.name, self.holder, self.check = name, holder, check
        self.outputs: Tensor | Exception | None = None
        """The corners of the last call, [4, C], or the error that prevented recording them."""
        self.change: tuple[Tensor, Tensor] | None = None
        """The result of change_by_weight, for a projection with a forward of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class LayoutCheck:
    """Finds the rows of W_Q and W_K of one layer from its calls."""

    def __init__(self, owner: nn.Module | None, heads: int, found: Projection | str, name: str = "a layer") -> None:
        """`found`: the layout that names suggest, or why they do not; then `owner` may have the names of latent
        attention. `name`: the layer's name in the log."""
        self._heads, self._name = heads, name
        self._found = found if isinstance(found, Projection) else None
        self._why = found if isinstance(found, str) else ""
        self._owner = owner if self._found is None else self._found.owner
        self.gone = False
        """Whether the layer's module is no longer part of the model; another may have replaced it."""
        self._proved: Projection | None = None
        self._unscalable, self._tries, self._failed = "", _TRIES, False
        self._given: list[Tensor] | Exception | None = None
        """The corners of query, key and value of the last call, [4, H, D] each, or the error that prevented recording
        them."""
        noted: list[tuple[str, nn.Module]] = []
        if self._owner is not None and self._found is not None:
            holders = (self._found.query.holder, self._found.key.holder)
            noted = [(name, child) for name, child in self._owner.named_children() if child in holders]
            if any(each is not None and normalises_heads(each) for each in (owner, self._owner)):
                self.refuse(_NORMALISED)
            elif self._owner in holders:
                self._proved = self._found  # nn.MultiheadAttention, whose layout is known
        elif self._owner is not None:
            noted = latent_children(self._owner)
        self._noted = [_Noted(*each, self) for each in noted] if self._tries else []
        self._undo: Final = ExitStack()
        self._as_built: Final = self._now()
        """The state of the projections at attach."""
        self._watches_changes = False

    def start(self) -> None:
        """Register hooks on the projections, and look for changes since attach."""
        self._watches_changes = True
        for noted in self._noted:
            other = vars(noted.holder).get(LAYOUT_ATTRIBUTE)
            if isinstance(other, _Noted) and other.holder is noted.holder:  # else the holder is a copied module
                for check in (self, other.check):
                    check.refuse(f"another layer computes with its {noted.name} as well")
                return
            vars(noted.holder)[LAYOUT_ATTRIBUTE] = noted
            noted.holder._forward_hooks[_HOOK_ID] = _note
            self._undo.callback(leave_no_trace_in_copies(noted.holder))
            self._undo.callback(vars(noted.holder).pop, LAYOUT_ATTRIBUTE, None)
            self._undo.callback(noted.holder._forward_hooks.pop, _HOOK_ID, None)

    def refuse(self, why: str) -> None:
        """Stop checking calls, for this reason; the norms stay unmeasured."""
        self._tries, self._why, self._proved = 0, why, None

    def stop(self) -> None:
        """Remove the hooks, and ignore later changes of the projections."""
        self._watches_changes = False
        self._undo.close()

    @property
    def open(self) -> bool:
        """Whether a call has yet to show which rows belong to which head."""
        return bool(self._noted) and self._proved is None and self._tries > 0 and self._given is None

    # ---- in the forward -------------------------------------------------------------------------------------------

    def observe_call(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record a few tokens of the inputs of attention: query [..., H, S, D], key and value [..., Hkv, S, D]."""
        if torch.compiler.is_compiling():
            if self._noted and query.dim() > 3 and query.shape[-3] == self._heads and not _in_nested_checkpoints():
                self._given = [_corners(x, 3) for x in (query, key, value)]
        elif self.open:
            try:
                given = [x.unsqueeze(-3) if x.dim() == 3 else x for x in (query, key, value)]
                if all(x.numel() and not x.is_nested for x in given):
                    self._given = [_corners(x, 3) for x in given]
            except Exception as error:
                self._given = error.with_traceback(None)  # the traceback would keep the call's tensors alive

    # ---- at a step boundary ---------------------------------------------------------------------------------------

    def current(self) -> Projection | None:
        """Return the current location of the weights; None if it is unknown, or if keys have a part that all heads
        share."""
        found = self.locate()
        return found if found is not None and found.query_of_shared is None else None

    def scalable(self) -> Projection | str:
        """Return the rows that QK-Clip may scale now, or why it may not scale any."""
        found = self.locate()  # first, because it may set the reason
        return self._unscalable or found or self._why or _NOT_SHOWN

    def describe(self, *, ran: bool = False) -> str:
        """Describe the layout of the weights, as far as calls have shown it, or why their norms are not measured.
        `ran`: whether the model ran since attach; before, the layout is the one that names suggest."""
        found = self._proved or self._found
        why = "its module was taken out of the model" if self.gone else self._why
        if ran and self.open:
            why = why or _NOT_SHOWN
        if found is not None and found.query_of_shared is not None:
            why = "a part of its keys is the same in all heads"
        return found.layout + found.gaps if found is not None and not why else f"norms are not measured: {why}"

    def locate(self) -> Projection | None:
        """Check the last recorded call, and return the current location of the weights; None if it is unknown."""
        if self.gone:
            return None
        if self._watches_changes and self._now() != self._as_built:
            self.refuse(_CHANGED)
            self.stop()
        given, self._given = self._given, None
        if given is not None and self.open:
            try:
                self._proved, self._why = self._prove(given), ""
            except InconclusiveCallError:
                pass  # another call may show it
            except ValueError as error:
                self._tries, self._why = self._tries - 1, str(error)
            except Exception as error:
                self._note_failure(error)
        return self._proved

    def _note_failure(self, error: Exception) -> None:
        """Log that a call could not be checked. Later calls are tried, without a limit if memory ran out."""
        if not isinstance(error, torch.OutOfMemoryError):
            self._tries -= 1
        self._why = f"its layout could not be looked at: {type(error).__name__}: {str(error)[:100]}"
        if not self._failed:
            logger.warning("foreshock: norms of %s are not measured: %s. Training continues", self._name, self._why)
        self._failed = True

    def _now(self) -> list[tuple[Any, ...]]:
        """Return, for each projection, a state that changes with a wrapper round it, adapters, a computed weight or a
        new forward."""
        there = dict(self._owner.named_children()) if self._owner is not None else {}
        held = [(there.get(each.name) is each.holder, each.holder, "weight") for each in self._noted]
        if self._found is not None and self._found.query.holder is self._owner:  # nn.MultiheadAttention
            held.append((True, self._owner, self._found.query.weight))
        return [
            (own, type(it), "forward" in vars(it), has_adapters(it), stored(it, of) is None) for own, it, of in held
        ]

    def _prove(self, given: Sequence[Tensor] | Exception) -> Projection:
        """Return the location of the weights that a call shows. Raises the errors of `confirmed`, and the error that
        prevented recording the call."""
        written: dict[nn.Module, Tensor] = {}
        for each in self._noted:
            outputs, each.outputs = each.outputs, None
            if isinstance(outputs, Exception):
                given = outputs
            elif outputs is not None:
                written[each.holder] = outputs
        if isinstance(given, Exception):
            raise given
        if missing := [each.name for each in self._noted if each.holder not in written]:
            raise ValueError(f"no call of {', '.join(missing)} returned a plain tensor")
        error = max(torch.finfo(x.dtype).eps for x in (*given, *written.values()))
        query, key, value, *made = (x.cpu().double().numpy() for x in (*given, *written.values()))
        call = Call(
            dict(zip(written, made, strict=True)), query, key, value, error, ", ".join(n.name for n in self._noted)
        )
        owner, found = self._owner, self._found
        assert owner is not None
        if found is None:
            shared = shared_features(call)
            proposed = latent_projections(owner, self._heads, int((~shared).sum()), int(shared.sum()))
        else:
            sizes = len(found.query.starts), len(found.key.starts), found.query.head_dim
            proposed = [found, *(each for each in projections(owner, *sizes) if each != found)]
        placed, keys_are_values = confirmed(call, proposed)
        for each in self._noted:
            if computes_otherwise(each.holder):
                changes = each.change
                if changes is None or not bool((changes[0] - changes[1]).norm() <= _ALLOWED * changes[1].norm()):
                    kind = type(each.holder).__name__
                    self._unscalable = f"its scores do not follow from its weights: {kind} has a forward of its own"
        if keys_are_values:
            self._unscalable = "its keys are values as well"
        return placed


def _note(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a projection: record corners of its output."""
    noted: _Noted | None = getattr(module, LAYOUT_ATTRIBUTE, None)
    if noted is None or not isinstance(output, Tensor) or output.dim() < 2:
        return
    if torch.compiler.is_compiling():
        if not _in_nested_checkpoints():
            noted.outputs = _corners(output, 2)
    elif (
        noted.holder is module and noted.check.open and type(output) is Tensor and output.numel() and not transformed()
    ):
        try:
            if args and computes_otherwise(module):  # then its output is compared with that of its weight
                with torch.no_grad():
                    noted.change = change_by_weight(module, args[0], output)
            noted.outputs = _corners(output, 2)
        except Exception as error:
            noted.outputs = error.with_traceback(None)  # the traceback would keep the call's tensors alive


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _in_nested_checkpoints() -> bool:
    """Whether the traced code is in a checkpoint within another checkpoint. Compilation fails there if attributes are
    written, because PyTorch (2.13) passes them out of the inner checkpoint only. Runs while torch.compile traces;
    otherwise returns False."""
    translator = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    return translator is not None and len(translator.output.tracers) > 2


def _corners(x: Tensor, token_dims: int) -> Tensor:
    """Return the corners of x: the first and the last token of the first and of the last sequence. All dimensions but
    the last `token_dims` index the sequences; the second-last dimension indexes the tokens."""
    first = last = x.detach()
    while first.dim() > token_dims:
        first, last = first[0], last[-1]
    return torch.stack([each.select(-2, at) for each in (first, last) for at in (0, -1)])
