"""One training in some mode of execution, with an agent and without: what must be equal to the last bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention.watched_layer import numerics_for
from foreshock.monitor.model.layers import local_tensor

EVERY_STEP: dict[str, Any] = {
    "attention": "kernels",
    "sample_every_steps": 1,
    "sample_every_seconds": 0.0,
    "strict": True,
    "quiet": True,
    "url": None,
}


@contextmanager
def operator_alone(numerics: str = "auto") -> Iterator[None]:
    """Our operator under F.scaled_dot_product_attention, with no agent, no state and no modes."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        chosen: Any = numerics_for(query, numerics)
        return flash_attention(query, key, value, causal="top_left" if is_causal else "none", numerics=chosen)

    before = F.scaled_dot_product_attention
    vars(F)["scaled_dot_product_attention"] = attention
    try:
        yield
    finally:
        vars(F)["scaled_dot_product_attention"] = before


@dataclass
class Trained:
    """What came out of a training: the loss of each step, the weights, and what the agent said."""

    losses: list[Tensor]
    weights: list[Tensor]
    listener: Listener = field(default_factory=Listener)
    run: str = ""
    report: str = ""

    @property
    def words(self) -> list[Any]:
        """The head states of each sample, [heads, SLOT_COUNT]."""
        return [sample.words() for sample in self.listener.of(wire.Sample)]

    @property
    def rows(self) -> list[int]:
        """Rows counted per head over all samples."""
        return np.sum([slot_values(words, Slot.ROWS) for words in self.words], axis=0).astype(int).tolist()  # type: ignore[no-any-return]

    @property
    def norms(self) -> Any:
        """The last spectral norms of W_Q, [heads]."""
        return self.listener.of(wire.Sample)[-1].query_norm.numpy()

    def assert_same_bits(self, other: "Trained") -> None:
        """Losses and weights are equal to the last bit."""
        for a, b in zip(self.losses + self.weights, other.losses + other.weights, strict=True):
            assert torch.equal(a, b), float((a.double() - b.double()).abs().max())


def _weights(model: nn.Module) -> list[Tensor]:
    """What this process holds of every weight."""
    return [local_tensor(weight).clone() for weight in model.parameters()]


Loop = Callable[[nn.Module, Callable[[Tensor], None]], list[Tensor]]
"""Trains a model, calls its second argument with the loss after every optimizer step, and returns the losses."""


def alone(model: nn.Module, loop: Loop, numerics: str = "auto") -> Trained:
    """Train with our operator and no agent."""
    with operator_alone(numerics):
        losses = loop(model, lambda loss: None)
    return Trained(losses, _weights(model))


def watched(
    model: nn.Module, loop: Loop, *, during: Callable[[Agent], None] | None = None, **overrides: Any
) -> Trained:
    """Train with an agent, which closes in the end; `during` is called after each of its steps."""
    listener = Listener()
    with attach(model, **{**EVERY_STEP, **overrides}) as agent:
        agent.subscribe(listener)

        def stepped(loss: Tensor) -> None:
            agent.step(loss)
            if during is not None:
                during(agent)

        losses = loop(model, stepped)
    return Trained(losses, _weights(model), listener, agent.run, agent.report())
