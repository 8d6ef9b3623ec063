"""Takes an offset that has already grown out of the scores, without touching a probability.

Scores are scale * q_i . k_j. Subtracting one vector c from every key of a row takes scale * q_i . c from all scores of
the row, which softmax does not see. A bias on the keys that reaches attention unturned is such a c (the paper's null
direction in its purest form): no gradient but rounding error ever moved it, and setting it to zero undoes all it did.
Where keys are rotated or normalised after the bias, c has to be subtracted from the finished keys: `centred`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from foreshock.lab.training.capture import AttentionCall, Capture

_LARGEST_CODE: Final = 256
"""Whole numbers up to here are exact in bfloat16."""
_MOMENTA: Final = ("exp_avg", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class Removed:
    """What was taken out of one key head."""

    layer: int
    kv_head: int
    bias_norm: float
    """Euclidean norm of the key bias that was set to zero"""
    offset_before: float
    """mean score that it added, scale * q . b over the probed batch, in nats"""


def centred(key: Tensor) -> Tensor:
    """`key` [B, Hkv, S, D] less the mean over S of each head's keys, in its dtype; the mean is at least float32.

    To be called on keys as attention is given them, after rotary. No probability changes but by rounding; in exact
    arithmetic the gradient of the removed direction becomes zero, so it also keeps an offset from growing. Not for soft
    caps or attention sinks, whose scores do not enter as differences, nor for keys that come piecemeal (decoding).
    """
    wide = key.to(torch.promote_types(key.dtype, torch.float32))
    return (wide - wide.mean(dim=2, keepdim=True)).to(key.dtype)


def remove_offset(
    model: nn.Module,
    loss: Callable[[], Tensor],
    heads: Collection[tuple[int, int]] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> list[Removed]:
    """Set the key bias of `heads` (layer, query head; None for all) of a watched model to zero; what was removed.

    `loss` runs the model on a batch (`Training.peek_loss`); its graph tells which parameter is the key bias and whether
    it reaches attention unturned. Query heads that share a key head share its bias. In `optimizers` the momentum along
    the bias is forgotten; second moments stay: from zero, Adam's next step would be up to (1 - beta1) / sqrt(1 - beta2)
    learning rates long. Call it between two steps; of a `Training` inside `on_stream`.

    Raises ValueError, before anything is changed, for a head that does not exist, and for one whose offset cannot be
    removed in this way: no key bias, keys turned or normalised after it, scores under a soft cap.
    """
    with Capture(model) as capture, torch.enable_grad():
        loss()
    calls = {call.layer: call for call in capture.calls}
    chosen = _chosen(calls, heads)
    found = {layer: _key_bias(calls[layer]) for layer in chosen}
    removed = []
    with torch.no_grad():
        for layer, kv_heads in chosen.items():
            parameter, places = found[layer]
            for kv_head in kv_heads:
                removed.append(_measure(calls[layer], kv_head, parameter[places[kv_head]]))
                parameter[places[kv_head]] = 0.0
                for remembered in (optimizer.state.get(parameter, {}) for optimizer in optimizers):
                    for name in _MOMENTA:
                        if isinstance(momentum := remembered.get(name), Tensor):
                            momentum[places[kv_head]] = 0.0
    return removed


def _chosen(calls: dict[int, AttentionCall], heads: Collection[tuple[int, int]] | None) -> dict[int, list[int]]:
    """Key heads by layer."""
    sizes = {layer: (call.query.shape[1], call.key.shape[1]) for layer, call in calls.items()}
    if heads is None:
        return {layer: list(range(kv_heads)) for layer, (_, kv_heads) in sorted(sizes.items())}
    chosen: dict[int, list[int]] = {}
    for layer, head in sorted(set(heads)):
        if layer not in sizes or not 0 <= head < sizes[layer][0]:
            known = ", ".join(f"layer {known} with {size} heads" for known, (size, _) in sorted(sizes.items()))
            raise ValueError(f"there is no layer {layer} head {head}; the model has {known}")
        kv_head = head // (sizes[layer][0] // sizes[layer][1])
        if kv_head not in chosen.setdefault(layer, []):
            chosen[layer].append(kv_head)
    return chosen


def _key_bias(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The parameter that holds the key bias, and where in it each [Hkv, D] lies.

    What the keys of the last token are to every vector-shaped parameter is read from their graph: an unturned bias
    enters with factor one, so numbers given to the keys come back, each at the place that it belongs to.
    """
    where = f"layer {call.layer} ({call.name})"
    if call.spec.softcap > 0:
        raise ValueError(f"{where} has a soft cap on its scores, which sees an offset; it cannot be removed unseen")
    kv_heads, _, dim = call.key.shape[1:]
    if max(kv_heads, dim) > _LARGEST_CODE:
        raise ValueError(f"{where} has {kv_heads} key heads of {dim} features; up to {_LARGEST_CODE} each are served")
    vectors = [x for x in call.module.parameters() if x.dim() == 1 and x.requires_grad]
    refusal = ValueError(
        f"{where} has no bias on its keys that reaches attention unturned (rotary or a norm of keys comes after it, or "
        "there is none); take the offset out inside attention: foreshock.lab.training.offset_removal.centred"
    )
    if not (vectors and call.key.requires_grad):
        raise refusal
    head_code = torch.arange(1, kv_heads + 1, device=call.key.device)[:, None].expand(-1, dim)
    dim_code = torch.arange(1, dim + 1, device=call.key.device)[None, :].expand(kv_heads, -1)
    answers = []
    for code in (head_code, dim_code):
        given = torch.zeros_like(call.key)
        given[-1, :, -1] = code.to(given.dtype)
        answers.append(torch.autograd.grad(call.key, vectors, given, retain_graph=True, allow_unused=True))
    for parameter, of_head, of_dim in zip(vectors, *answers, strict=True):
        if of_head is None or of_dim is None or not of_dim.any():
            continue
        places = torch.nonzero(of_dim).flatten()
        code = torch.stack([of_head[places], of_dim[places]], 1).double()
        order = torch.argsort((code[:, 0] - 1) * dim + code[:, 1])
        if torch.equal(code[order], torch.stack([head_code.flatten(), dim_code.flatten()], 1).double()):
            return parameter, places[order].view(kv_heads, dim)
    raise refusal


def _measure(call: AttentionCall, kv_head: int, bias: Tensor) -> Removed:
    group = call.query.shape[1] // call.key.shape[1]
    query = call.query[:, kv_head * group : (kv_head + 1) * group].float()
    offset = call.spec.scale * (query @ bias.float()).mean()
    return Removed(call.layer, kv_head, float(bias.norm()), float(offset))
