"""Attention whose parts bear no name that one could expect."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 16, 2


class ParameterBank(nn.Module):
    """As in modded-nanogpt: one parameter holds W_Q, W_K and W_V."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = torch.unflatten(F.linear(x, self.bank), -1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class TwoStreams(nn.Module):
    """As in an MMDiT: half the tokens are projected by one layer, half by another; all attend to all."""

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
    """Attention over the pixels of an image, with 1 x 1 convolutions; here each token is a pixel."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x.mT).unflatten(1, (3, HEADS, -1)).mT.unbind(1)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class UnevenKeys(ParameterBank):
    """Tells a number of key heads that is not meant for its heads."""

    num_kv_heads, head_dim = 3, WIDTH // HEADS


class NobodyTellsHeads(ParameterBank):
    """Only the call has the number of heads."""

    num_heads = None  # type: ignore[assignment]


class _Projected(nn.Module):
    """Three layers of no known name make queries, keys and values."""

    names = ("fc_q", "fc_k", "fc_v")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def projected(self, x: Tensor) -> list[Tensor]:
        return [getattr(self, name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in self.names]


class ByHand(_Projected):
    """As in many lectures, in a module whose name says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        weights = torch.softmax(query @ key.mT / 4, -1)
        return (F.dropout(weights, 0.1) @ value).transpose(1, 2).flatten(2)


class Gated(_Projected):
    """As timm's GPSA: two kinds of weights are mixed, and normalised again."""

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
    """As in SAGAN: the weights are the right operand."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.flatten(0, 1) for each in self.projected(x))
        weights = F.softmax(torch.bmm(query, key.mT), -1)
        out = torch.unflatten(torch.bmm(value.mT, weights.mT).mT, 0, (len(x), HEADS))
        return out.transpose(1, 2).flatten(2)


OF_PYTORCH: tuple[Callable[..., Tensor]] = (F.scaled_dot_product_attention,)


class PyTorchsOfATuple(_Projected):
    """PyTorch's function itself, in an object that cannot be changed."""

    def forward(self, x: Tensor) -> Tensor:
        [attend] = OF_PYTORCH
        return attend(*self.projected(x)).transpose(1, 2).flatten(2)


class GraphAttention(nn.Module):
    """As in Velickovic et al. 2018: scores are sums of a number of each node."""

    def __init__(self, *, masks: bool = False, expands: bool = False) -> None:
        super().__init__()
        self.masks, self.expands = masks, expands
        self.weight = nn.Linear(WIDTH, WIDTH, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(WIDTH, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.weight(x)
        source, target = nodes @ self.source, (nodes @ self.target).mT
        if self.expands:
            source, target = source.expand(-1, -1, x.shape[1]), target.expand(-1, x.shape[1], -1)
        scores = F.leaky_relu(source + target, 0.2)
        if self.masks:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        out: Tensor = F.dropout(scores.softmax(-1), 0.1) @ nodes
        return out


class Bahdanau(nn.Module):
    """As in Bahdanau et al. 2015, of all queries at once."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.of_query, self.of_key = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.score = nn.Linear(WIDTH, 1, bias)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.tanh(self.of_query(x)[:, :, None] + self.of_key(x)[:, None])
        out: Tensor = self.score(pairs).squeeze(-1).softmax(-1) @ x
        return out


class Distances(_Projected):
    """Weights fall with the distance of query and key."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        distance = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
        out: Tensor = (-distance).softmax(-1) @ value
        return out.transpose(1, 2).flatten(2)


class ExpectedClass(nn.Module):
    """A classification head whose probabilities weigh what each class stands for: no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.classes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.norm(x)).softmax(-1) @ self.classes(torch.arange(7))
        return out


class SoftRouter(nn.Module):
    """Routes by token, place and time, and mixes the experts' outputs by a product: no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.time = nn.Embedding(9, WIDTH), nn.Linear(1, WIDTH)
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        placed = x + self.place(torch.arange(x.shape[1]))
        timed = placed + self.time(torch.ones(len(x), 1, 1))
        shares: Tensor = self.gate(timed).softmax(-1)
        return torch.squeeze(shares[..., None, :] @ self.experts(x).unflatten(-1, (3, WIDTH)), -2)


class Pooling(nn.Module):
    """One score of each token: no pair of tokens is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.score(torch.tanh(self.hidden(x))).softmax(1)
        return x + weights.mT @ x


class Pattern(nn.Module):
    """A softmax over prototypes, which are parameters: no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.values = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ F.normalize(self.prototypes, dim=-1).mT, -1) @ self.values


class Router(nn.Module):
    """A mixture of experts: no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return torch.einsum("bse,bsew->bsw", shares, torch.einsum("bsw,ewv->bsev", x, self.experts))


class Mixing(nn.Module):
    """The same under names that say nothing: `h` heads."""

    def __init__(self) -> None:
        super().__init__()
        self.h = 2
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
