"""Keys and values without the part that all of a sequence share, for the heads that ask (README.md, modes)."""

from typing import NamedTuple

import torch
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.kernels.flash_attention.visibility import place


class Centring(NamedTuple):
    """What is subtracted; 0 for heads that do not ask."""

    keys: Tensor
    """From every key, [B, H, Sk, D], or [B, H, 1, D] where all rows are of one sequence; as the two below."""
    values: Tensor
    """From every value."""
    seen_key: Tensor
    """What `keys` is for the sequence of each query, [B, H, Sq, D]."""
    seen_value: Tensor


def refusal(mode: int, spec: AttentionSpec) -> str | None:
    """Why attention as `spec` says cannot compute a mode's flags, in a sentence; None where it can.

    Flags lie in device memory, where a kernel cannot refuse: it computes as if the flag named here first were not set.
    """
    if mode & Mode.CENTRED_KEYS and spec.softcap > 0:
        return (
            f"centred_keys does not serve a softcap ({spec.softcap}): capped scores do not enter as differences, so "
            "that the mean key cannot be taken out; use row_corrected"
        )
    if mode & Mode.CENTRED_VALUES and spec.dropout_p > 0:
        return (
            f"centred_values does not serve dropout (dropout_p {spec.dropout_p}): rows of P do not sum to 1 after it; "
            "use row_corrected"
        )
    if mode & (Mode.STABLE_SOFTMAX | Mode.PAPER_SOFTMAX) and mode & Mode.CENTRED_VALUES:
        return "stable_softmax and paper_softmax exclude centred_values; use one or the other"
    return None


def check_modes(modes: Tensor | None, spec: AttentionSpec) -> None:
    """Raise ValueError with a sentence for a refused mode. Only a CPU's are looked at: elsewhere that would wait."""
    if modes is None or modes.device.type != "cpu":
        return
    for head, mode in enumerate(modes.tolist()):
        if sentence := refusal(mode, spec):
            raise ValueError(f"head {head} has mode {mode}: {sentence}")


def flagged(modes: Tensor | None, flag: int) -> Tensor | None:
    """The heads whose mode has `flag`, bool [H]; None when it is known that there are none."""
    if modes is None:
        return None
    heads = (modes & flag).bool()
    return None if modes.device.type == "cpu" and not bool(heads.any()) else heads


def centring(
    key: Tensor,
    value: Tensor,
    queries: int,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    spec: AttentionSpec,
    operand: torch.dtype,
) -> Centring | None:
    """What the modes take from keys and values [B, H, Sk, D], one a query head; None when no head asks.

    Under `paper` means are rounded to the operand dtype: any vector that all keys lose is exact, and a difference of
    two 16-bit numbers is so too where the common part is the larger.
    """
    keys_of = None if spec.softcap > 0 else flagged(modes, Mode.CENTRED_KEYS)
    values_of = None if spec.dropout_p > 0 else flagged(modes, Mode.CENTRED_VALUES)
    if keys_of is None and values_of is None:
        return None
    rounded = operand if spec.numerics == "paper" else None
    taken: list[Tensor] = []
    seen: list[Tensor] = []
    for tensor, heads in ((key, keys_of), (value, values_of)):
        if heads is None:
            nothing = tensor.new_zeros(1, 1, 1, 1)
            taken.append(nothing)
            seen.append(nothing)
            continue
        of_rows, of_queries = _means(tensor, queries, cu_seqlens_q, cu_seqlens_k)
        for means, found in ((of_rows, taken), (of_queries, seen)):
            means = means if rounded is None else means.to(rounded).to(means.dtype)
            # A mean that is not finite would reach rows that do not see what it comes from.
            found.append(torch.where(heads.view(1, -1, 1, 1) & means.isfinite(), means, 0.0))
    return Centring(taken[0], taken[1], seen[0], seen[1])


def _means(x: Tensor, queries: int, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean row of the sequence of every row of x [B, H, S, D], and of every query."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        mean = x.mean(2, keepdim=True)
        return mean, mean
    sequence_k, _ = place(cu_seqlens_k, x.shape[2])
    sequence_q, _ = place(cu_seqlens_q, queries)
    sums = x.new_zeros(*x.shape[:2], len(cu_seqlens_k), x.shape[3]).index_add_(2, sequence_k, x)
    lengths = torch.nn.functional.pad(cu_seqlens_k.diff(), (0, 1)).clamp(min=1).view(-1, 1)
    means = sums / lengths
    means[:, :, -1] = 0.0  # rows past the last sequence
    return means[:, :, sequence_k], means[:, :, sequence_q]
