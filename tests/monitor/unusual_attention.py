"""Attention modules with unusual structures or names, and modules that only resemble attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 16, 2


class ParameterBank(nn.Module):
    """modded-nanogpt's attention: one parameter contains W_Q, W_K and W_V."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = torch.unflatten(F.linear(x, self.bank), -1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class TwoStreams(nn.Module):
    """An MMDiT's attention: each half of the tokens has its own projection, and all tokens attend to each other."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.qkv_x, self.qkv_c = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        both = torch.cat([self.qkv_x(left), self.qkv_c(right)], 1)
        query, key, value = torch.unflatten(both, -1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Convolutions(nn.Module):
    """Attention over pixels with a 1 x 1 convolution as projection; each token is a pixel."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x.mT).unflatten(1, (3, HEADS, -1)).mT.unbind(1)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class InconsistentKeyHeads(ParameterBank):
    """Has an attribute for key heads that does not divide its heads."""

    num_kv_heads, head_dim = 3, WIDTH // HEADS


class UnknownHeads(ParameterBank):
    """Only the call shows the number of heads."""

    num_heads = None  # type: ignore[assignment]


class _Projected(nn.Module):
    """Projections with unknown names."""

    names = ("fc_q", "fc_k", "fc_v")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def projected(self, x: Tensor) -> list[Tensor]:
        return [getattr(self, name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in self.names]


class ManualAttention(_Projected):
    """Attention by matrix products and a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        weights = torch.softmax(query @ key.mT / 4, -1)
        return (F.dropout(weights, 0.1) @ value).transpose(1, 2).flatten(2)


class ManualAttentionWithHeads(ManualAttention):
    """The same in a module that may be attention by its attributes."""

    num_heads, names = HEADS, ("q_proj", "k_proj", "v_proj")


class GatedAttention(_Projected):
    """timm's GPSA: mixes two kinds of attention weights and normalises them again."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.gate = nn.Linear(3, HEADS), nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        content: Tensor = torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(-1)
        place = self.place(torch.ones(1, x.shape[1], x.shape[1], 3)).permute(0, 3, 1, 2).softmax(-1)
        gate = torch.sigmoid(self.gate)
        weights = (1 - gate) * content + gate * place
        out: Tensor = (weights / weights.sum(-1, keepdim=True)) @ value
        return out.transpose(1, 2).flatten(2)


class ReversedProducts(_Projected):
    """SAGAN's attention: the weights are the right operand of the product."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.flatten(0, 1) for each in self.projected(x))
        weights = F.softmax(torch.bmm(query, key.mT), -1)
        out = torch.unflatten(torch.bmm(value.mT, weights.mT).mT, 0, (len(x), HEADS))
        return out.transpose(1, 2).flatten(2)


REGISTRY = {"sdpa": F.scaled_dot_product_attention}


class RegistrySdpa(_Projected):
    """Calls PyTorch's function from a dictionary that was filled before attach."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        return REGISTRY["sdpa"](query, key, value).transpose(1, 2).flatten(2)


class LibraryMHA(torch.autograd.Function):
    """An attention kernel of a library, in PyTorch's operators."""

    @staticmethod
    def forward(ctx: Any, name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return (query @ key.mT).softmax(-1) @ value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            query, key, value = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            out = (query @ key.mT).softmax(-1) @ value
        return None, *torch.autograd.grad(out, (query, key, value), grads)


class LibraryAttention(_Projected):
    """Calls an autograd function of a library that foreshock does not know."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = LibraryMHA.apply("fast", *self.projected(x))  # type: ignore[no-untyped-call]
        return out.transpose(1, 2).flatten(2)


class LibraryAttentionWithHeads(LibraryAttention):
    """Has the attributes of attention, so that it is a candidate."""

    num_heads, names = HEADS, ("q_proj", "k_proj", "v_proj")


class LibraryFlatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], grads[0].sum((0, 1))


class Flatten(nn.Module):
    """Calls another autograd function of a library, which is not attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return LibraryFlatten.apply(x, self.bias)  # type: ignore[no-any-return,no-untyped-call]


class PrototypeSoftmax(nn.Module):
    """A softmax over learned prototypes, which is not attention."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.values = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ F.normalize(self.prototypes, dim=-1).mT, -1) @ self.values


class ExpertRouter(nn.Module):
    """A mixture of experts, which is not attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return torch.einsum("bse,bsew->bsw", shares, torch.einsum("bsw,ewv->bsev", x, self.experts))


class UnrelatedNames(nn.Module):
    """Causal attention whose attributes have unrelated names."""

    def __init__(self) -> None:
        super().__init__()
        self.h = 2
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
