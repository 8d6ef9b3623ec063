"""What softmax cannot see of the scores, measured on the laboratory's model while it trains.

Softmax sees differences of scores. The part scale * q_i . mean(k), which every key of a sequence gives to a row i
alike, is lost on it, so that no true gradient holds it back. It is part of a head's offset, and the part that centred
keys take away; |b_K| is what a bias on the keys adds to it. Four quantities, by the names under which a trace carries
them (`TraceWriter.probe`), each [heads of all layers]:
- `key_bias_norm`: Euclidean norm of the key bias that a head reads, 0 without one;
- `common_key_norm`: root mean square over the sequences of |mean(k)|, which models without a bias have too;
- `common_mean`, `common_rms`: mean and root mean square of scale * q_i . mean(k) over the tokens of some sequences,
  in nats. The keys are the raw ones: a mode that centres them changes nothing here.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from foreshock.contract.slots import Floats


class NullPart:
    """Measures one GPT of `foreshock.lab.training.model` on `tokens`, int64 [B, S], always the same.

    One forward pass without gradients; it changes nothing and counts nothing.
    """

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self._model, self._tokens = model, tokens
        self._attentions = [cast(Any, block).attn for block in cast(Any, model).h]

    @torch.no_grad()
    def measure(self) -> Mapping[str, Floats]:
        """The quantities now, by name."""
        caught: dict[nn.Module, Tensor] = {}

        def catch(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            caught[module] = given[0]

        hooks = [attention.register_forward_pre_hook(catch) for attention in self._attentions]
        try:
            self._model(self._tokens, self._tokens)
        finally:
            for hook in hooks:
                hook.remove()
        operands = [attention.operands(caught[attention])[:2] for attention in self._attentions]
        common = [_common(query, key) for query, key in operands]
        together = torch.stack(
            [
                torch.cat([_key_bias_norm(attention) for attention in self._attentions]),
                torch.cat([_common_key_norm(query, key) for query, key in operands]),
                torch.cat([each.mean((0, 2)) for each in common]),
                torch.cat([each.square().mean((0, 2)).sqrt() for each in common]),
            ]
        )
        names = ("key_bias_norm", "common_key_norm", "common_mean", "common_rms")
        return dict(zip(names, together.double().cpu().numpy(), strict=True))


def _common(query: Tensor, key: Tensor) -> Tensor:
    """scale * q_i . mean(k), [B, H, S], of query [B, H, S, D] and key [B, Hkv, S, D]."""
    mean = key.float().mean(2, keepdim=True).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query.float() * mean).sum(-1) / math.sqrt(query.shape[3])


def _common_key_norm(query: Tensor, key: Tensor) -> Tensor:
    """[H], of the key head that each query head reads."""
    norms = key.float().mean(2).square().sum(-1).mean(0).sqrt()  # [Hkv]
    return torch.repeat_interleave(norms, query.shape[1] // key.shape[1])


def _key_bias_norm(attention: Any) -> Tensor:
    """[H]."""
    heads, kv_heads, bias = int(attention.n_head), int(attention.n_kv_head), attention.c_attn.bias
    if bias is None:
        return torch.zeros(heads, device=attention.c_attn.weight.device)
    norms: Tensor = cast(Tensor, bias).view(heads + 2 * kv_heads, -1)[heads : heads + kv_heads].float().norm(dim=1)
    return torch.repeat_interleave(norms, heads // kv_heads)
