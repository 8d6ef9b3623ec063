"""A small transformer, broken at a chosen place and step as public bug reports describe, under an agent."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.incident import RunContext, Warned, incidents
from foreshock.monitor import attach

LAYERS, HEADS, WIDTH, LENGTH, BATCH, VOCABULARY = 4, 4, 32, 12, 6, 40
HEAD_DIM = WIDTH // HEADS


class Attention(nn.Module):
    """Separate projections; `operands` and `core` are what a report says of the attention function."""

    source: Tensor | None = None
    """What keys and values are made of; None: what queries are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        source = x if self.source is None else self.source
        query, key, value = (
            each(given).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each, given in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        out = self.core(*self.operands(query, key, value), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key, value

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


class Block(nn.Module):
    """Pre-norm, as everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass
class Outcome:
    """What the run and its agent did."""

    losses: list[float] = field(default_factory=list)
    events: list[wire.Event] = field(default_factory=list)
    table: str = ""
    first_step: int = 1

    @property
    def harmed(self) -> int:
        """The first step whose loss is not finite; a step past the end if none is."""
        return self.first_loss(lambda loss: not math.isfinite(loss))

    def first_loss(self, is_bad: Callable[[float], bool]) -> int:
        """The first step with such a loss; a step past the end if there is none."""
        end = self.first_step + len(self.losses)
        return next((step for step, loss in enumerate(self.losses, self.first_step) if is_bad(loss)), end)

    @property
    def told(self) -> str:
        """The words of the first warning: its incident, and what is left to people. Empty without a warning."""
        if not self.raised:
            return ""
        first = Warned(0, self.raised[0].step, self.raised[0])
        incident = incidents([first], RunContext("row_corrected", policy="observe"))[0]
        return f"{incident.sentence} {incident.to_do}"

    @property
    def later(self) -> list[str]:
        """What updates of warnings say."""
        return [one.sentence for one in self.events if isinstance(one, wire.Verdict) and one.state == "updated"]

    @property
    def raised(self) -> list[wire.Verdict]:
        """Warnings, in their order."""
        return [event for event in self.events if isinstance(event, wire.Verdict) and event.state == "raised"]


def train(
    steps: int = 40,
    *,
    lr: float = 1e-2,
    clip: float | None = None,
    before: Callable[[Any, int], Any] | None = None,
    mask: Tensor | None = None,
    skip_broken: bool = False,
    known: bool = True,
    make: Callable[[], nn.Module] = Model,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    labels: Callable[[Tensor, int], Tensor] | None = None,
    loss_of: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    first_step: int = 1,
    compiled: bool = False,
    **settings: Any,
) -> Outcome:
    """Train for `steps`. before: called with model and step before each step; what it returns is removed afterwards.

    mask: as scaled_dot_product_attention takes it. skip_broken: as a loss scaler, do not step on such gradients. known:
    give the agent numbers, as trainers that log do, and not tensors. make: gives the model. optimizer: of its
    parameters, in place of AdamW. labels: changes those of a step. loss_of: the loss of logits, labels and step, in
    place of the cross-entropy. first_step: above 1 in a run that is resumed. compiled: by torch.compile,
    after attach.
    """
    torch.manual_seed(0)
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = torch.optim.AdamW(trained, lr=lr) if optimizer is None else optimizer(trained)
    agent = attach(model, **{"quiet": True, "sample_every_steps": 10, **settings})
    if compiled:
        model.compile(backend="inductor")
    found = Outcome(first_step=first_step)
    agent.subscribe(found.events.append)
    for step in range(first_step, first_step + steps):
        handles = before(model, step) if before is not None else None
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        logits = model(tokens[:, :-1], mask)
        wanted = tokens[:, 1:].flatten()
        wanted = wanted if labels is None else labels(wanted, step)
        by_token = logits.flatten(0, 1).float()
        loss = F.cross_entropy(by_token, wanted) if loss_of is None else loss_of(by_token, wanted, step)
        update.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for handle in handles or ():
            handle.remove()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if clip is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
        if norm.isfinite() or not skip_broken:
            update.step()
        found.losses.append(loss.item())
        given = (loss.item(), norm.item()) if known else (loss, norm)
        agent.step(*given, step=step)
    found.table = agent.report()
    agent.close()
    return found


def poison(module: nn.Module, number: float = math.nan) -> Any:
    """Break the gradient that leaves `module` towards its input and its weights, as a faulty backward does."""

    def broken(_: nn.Module, grads: Any) -> Any:
        return (torch.full_like(grads[0], number),)

    return module.register_full_backward_pre_hook(broken)
