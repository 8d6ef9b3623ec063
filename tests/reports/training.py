"""Trains a small transformer with an agent, with failures injected as public bug reports describe."""

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
    """Attention with separate projections; subclasses override `operands` and `core` to reproduce a report."""

    source: Tensor | None = None
    """The input of keys and values; None for self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        source = x if self.source is None else self.source
        query, key, value = (
            projection(projection_input).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, projection_input in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        out = self.core(*self.operands(query, key, value), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key, value

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


class Block(nn.Module):
    """A pre-norm transformer block."""

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
    """The losses of a run and the events of its agent."""

    losses: list[float] = field(default_factory=list)
    events: list[wire.Event] = field(default_factory=list)
    table: str = ""
    first_step: int = 1

    @property
    def failure_step(self) -> int:
        """The first step with a non-finite loss; the step after the last if all are finite."""
        return self.first_loss(lambda loss: not math.isfinite(loss))

    def first_loss(self, is_bad: Callable[[float], bool]) -> int:
        """The first step with such a loss; the step after the last if there is none."""
        end = self.first_step + len(self.losses)
        return next((step for step, loss in enumerate(self.losses, self.first_step) if is_bad(loss)), end)

    @property
    def first_text(self) -> str:
        """The text of the first warning: its incident and the action for users. Empty without a warning."""
        if not self.raised:
            return ""
        first = Warned(0, self.raised[0].step, self.raised[0])
        incident = incidents([first], RunContext("row_corrected", policy="observe"))[0]
        return f"{incident.sentence} {incident.to_do}"

    @property
    def later_texts(self) -> list[str]:
        """The texts of updated warnings."""
        return [one.sentence for one in self.events if isinstance(one, wire.Verdict) and one.state == "updated"]

    @property
    def raised(self) -> list[wire.Verdict]:
        """The raised warnings, in order."""
        return [event for event in self.events if isinstance(event, wire.Verdict) and event.state == "raised"]


def train(
    steps: int = 40,
    *,
    lr: float = 1e-2,
    clip: float | None = None,
    before: Callable[[Any, int], Any] | None = None,
    mask: Tensor | None = None,
    skip_broken: bool = False,
    as_numbers: bool = True,
    make: Callable[[], nn.Module] = Model,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    labels: Callable[[Tensor, int], Tensor] | None = None,
    loss_of: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    first_step: int = 1,
    compiled: bool = False,
    **settings: Any,
) -> Outcome:
    """Train for `steps`. before: called with model and step before each step; the hooks that it returns are removed
    after the backward pass.

    mask: attn_mask of scaled_dot_product_attention. skip_broken: skip updates with non-finite gradients, like a loss
    scaler. as_numbers: pass numbers to the agent, as trainers that log do, instead of tensors. make: builds the model.
    optimizer: builds the optimizer, instead of AdamW. labels: changes the labels of a step. loss_of: the loss from
    logits, labels and step, instead of cross-entropy. first_step: above 1 for a resumed run. compiled: use
    torch.compile after attach.
    """
    torch.manual_seed(0)
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = torch.optim.AdamW(trained, lr=lr) if optimizer is None else optimizer(trained)
    agent = attach(model, **{"quiet": True, "sample_every_steps": 10, **settings})
    if compiled:
        model.compile(backend="inductor")
    outcome = Outcome(first_step=first_step)
    agent.subscribe(outcome.events.append)
    for step in range(first_step, first_step + steps):
        handles = before(model, step) if before is not None else None
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        logits = model(tokens[:, :-1], mask)
        targets = tokens[:, 1:].flatten()
        targets = targets if labels is None else labels(targets, step)
        by_token = logits.flatten(0, 1).float()
        loss = F.cross_entropy(by_token, targets) if loss_of is None else loss_of(by_token, targets, step)
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
        outcome.losses.append(loss.item())
        metrics = (loss.item(), norm.item()) if as_numbers else (loss, norm)
        agent.step(*metrics, step=step)
    outcome.table = agent.report()
    agent.close()
    return outcome


def poison(module: nn.Module, number: float = math.nan) -> Any:
    """Replace the output gradient of `module`, so its inputs and weights get the gradients of a faulty backward."""

    def replace_gradient(_: nn.Module, grads: Any) -> Any:
        return (torch.full_like(grads[0], number),)

    return module.register_full_backward_pre_hook(replace_gradient)
