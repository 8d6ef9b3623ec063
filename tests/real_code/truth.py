"""The scores of a model's attention by float64, without foreshock: each call of PyTorch's function, computed again."""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class CallScores:
    """Of one module's calls in one step, each [H]."""

    rows: Tensor
    largest: Tensor
    """The largest score."""
    largest_row_max: Tensor
    """The largest absolute value of a row's maximum."""
    offset: Tensor
    """Sum over the rows of log-sum-exp less the logarithm of the number of visible keys."""

    def joined(self, other: "CallScores") -> "CallScores":
        """Of this call and another one."""
        return CallScores(
            self.rows + other.rows,
            torch.maximum(self.largest, other.largest),
            torch.maximum(self.largest_row_max, other.largest_row_max),
            self.offset + other.offset,
        )


def scores_of(
    query: Tensor, key: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> CallScores:
    """Of queries [..., H, S, D] and keys [..., H or fewer, T, D]."""
    query, key = query.detach().double(), key.detach().double()
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    scores = scores.transpose(0, -3).flatten(1, -2)  # [H, rows, T]
    visible = (scores > -math.inf).sum(-1)
    seen, maxima = visible > 0, scores.amax(-1)
    offset = torch.where(seen, scores.logsumexp(-1) - visible.clamp(min=1).log(), 0.0)
    return CallScores(
        seen.sum(-1),
        maxima.amax(-1),
        torch.where(seen, maxima.abs(), 0.0).amax(-1),
        offset.sum(-1),
    )


@contextlib.contextmanager
def recorded_scores(model: nn.Module, where: Callable[[], dict[str, CallScores] | None]) -> Iterator[None]:
    """Record the calls that train in the dictionary that `where` gives, by the module that makes them."""
    names = {id(module): name for name, module in model.named_modules()}
    running: list[str] = []
    real = torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(real)
    def recorder(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        into = where() if torch.is_grad_enabled() and query.requires_grad and not query.is_meta else None
        if into is not None:
            given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                now = scores_of(
                    query,
                    key,
                    given.get("attn_mask"),
                    causal=given.get("is_causal", False),
                    scale=given.get("scale"),
                )
            name = running[-1] if running else ""
            into[name] = into[name].joined(now) if name in into else now
        out: Tensor = real(query, key, value, *args, **kwargs)
        return out

    def enter(module: nn.Module, _: Any) -> None:
        running.append(names.get(id(module), running[-1] if running else ""))

    def leave(*_: Any) -> None:
        running.pop()

    with contextlib.ExitStack() as stack:
        for hook in (
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ):
            stack.callback(hook.remove)
        for module in list(sys.modules.values()):  # some have imported the function by its name
            for name in [name for name, value in list(vars(module).items()) if value is real]:
                stack.callback(setattr, module, name, real)
                setattr(module, name, recorder)
        yield
