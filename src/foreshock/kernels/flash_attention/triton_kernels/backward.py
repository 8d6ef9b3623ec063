"""FlashAttention-2 backward in Triton, in three passes: rows (delta), dQ, dK and dV; then the statistics.

The passes do not use atomics, so that equal inputs give equal bits: every block of rows writes its own partial
statistics, and one small kernel adds them up in a fixed order. That kernel adds the sums to the state by atomics, so
that backwards of several streams may count into one state. The dQ pass runs before the dK, dV pass, because it corrects
delta of heads whose rows are corrected.

If Hopper's own backward is used (hopper.py), it computes dQ, dK and dV in one pass, and the order of its additions to
dQ varies. The dQ pass then runs before it for heads whose rows are corrected, unless the host knows that there are none
(known_modes.py).
"""

import torch
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention.known_modes import known_modes, snapshot
from foreshock.kernels.flash_attention.launch import Call, call_of, on_device
from foreshock.kernels.flash_attention.spec import Arguments, Saved
from foreshock.kernels.flash_attention.triton_kernels import hopper
from foreshock.kernels.flash_attention.triton_kernels.counting import launch_count
from foreshock.kernels.flash_attention.triton_kernels.grad_key import launch_grad_key
from foreshock.kernels.flash_attention.triton_kernels.grad_query import launch_grad_query
from foreshock.kernels.flash_attention.triton_kernels.passes import Grads, Tensors
from foreshock.kernels.flash_attention.triton_kernels.rows import launch_rows
from foreshock.kernels.flash_attention.triton_kernels.tuning import Configs, configs


def attention_backward(
    grad_out: Tensor, saved: Saved, state: Tensor | None, given: Arguments, grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; add the statistics of every row to `state` unless it is None.

    grad_lse: the gradient of the log-sum-exp [B, H, Sq]; None means zero.
    """
    query, key, value = saved[:3]
    if state is not None and saved.second.shape != saved.row_max.shape:
        raise ValueError("the forward was called without state, so ties are unknown; pass it to both, or to neither")
    grad_lse = None if grad_lse is None else grad_lse.to(torch.float32).contiguous()
    call = call_of(query, key, value, given, grad_out, *saved[3:], state, grad_lse)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if call.blank(*grads):
        if state is not None:
            state[:, Slot.EMPTY_ROWS] += query.shape[0] * query.shape[2]
        return grads
    if grad_out.stride(-1) != 1:  # an expanded gradient, such as that of a sum
        grad_out = grad_out.contiguous()
    chosen = configs(call.capability, call.block_d, call.mean_keys)
    with on_device(query):
        packed = (given.cu_seqlens_q, given.cu_seqlens_k)
        tensors = Tensors(grad_out, *saved, state, given.modes, *packed, given.seed, grad_lse)
        launch_backward(call, chosen, tensors, grads)
        if call.packed:
            call.blank_rest(given.cu_seqlens_q, call.longest_q, (grads[0], 0.0))
            call.blank_rest(given.cu_seqlens_k, call.longest_k, (grads[1], 0.0), (grads[2], 0.0))
    return grads


def launch_backward(call: Call, chosen: Configs, given: Tensors, grads: Grads) -> None:
    """Launch the three passes under given configurations, or Hopper's pass in place of two, and the statistics."""
    by_hopper = hopper.takes_backward(call, given, grads)
    members = hopper.members_of(call, grads[0].device) if by_hopper else 0
    known = known_modes(given.modes)
    name = ("made", chosen, members, known, *[tensor is None for tensor in given])
    made = call.plans.get(name, False)
    if by_hopper:
        given = given._replace(modes=snapshot(given.modes) if known.some_corrected else given.modes)
    rows = launch_rows(call, given, made and call.takes_addresses())
    if by_hopper:
        if known.some_corrected:
            launch_grad_query(call, chosen.grad_query, given, rows, grads[0], corrected_only=True)
        others = given if known.some_corrected else given._replace(modes=None)
        if not hopper.BACKWARD.launched(call, others, rows, grads):
            launch_backward(call, chosen, given, grads)  # from the start: delta may be corrected already
            return
    else:
        corrected = chosen.corrected if known.all_corrected else None
        launch_grad_query(call, corrected or chosen.grad_query, given, rows, grads[0])
        launch_grad_key(call, chosen.grad_key, given, rows, grads[1:])
    if given.state is not None:
        launch_count(call, given, rows, given.state)
    if not made:
        call.plans[name] = True
