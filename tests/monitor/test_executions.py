"""Models in modes of execution: losses and weights of the operator alone to the last bit, counts of eager mode."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from tests.monitor.executions import Trained, alone, watched
from tests.monitor.tiny_models import (
    CausalSelfAttention,
    Checkpoint,
    GroupedQueryAttention,
    TinyViT,
    batch,
    next_token_loss,
    tiny_gpt,
)
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from foreshock.contract.slots import COUNT_SLOTS, Slot

# inductor itself calls what PyTorch is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")

STEPS = 2


@dataclass(frozen=True)
class Mode:
    """How a step is run."""

    compile: dict[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    micro_batches: int = 1
    autocast: bool = False
    dtype: torch.dtype = torch.float32

    def loop(self, model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        """Some optimizer steps."""
        run: Any = model if self.compile is None else torch.compile(model, **self.compile)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            parts = []
            for ids in torch.split(batch(step, rows=2 * self.micro_batches), 2):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                    parts.append(next_token_loss(run(ids).float(), ids) / self.micro_batches)
                torch.autograd.backward(parts[-1])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.stack(parts).sum().detach())
            stepped(losses[-1])
        return losses


def saving(*saved: Any) -> Checkpoint:
    """Selective checkpointing: these operators' results are saved, all else is computed again."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda *args: checkpoint(*args, use_reentrant=False, context_fn=contexts)


MODES: dict[str, list[Mode]] = {
    "eager": [Mode()],
    "torch.compile": [Mode(compile={"backend": "aot_eager", "fullgraph": True})],
    "inductor": [Mode(compile={"fullgraph": True})],
    "checkpointing (reentrant)": [Mode(checkpoint=lambda *args: checkpoint(*args, use_reentrant=True))],
    "checkpointing (non-reentrant)": [Mode(checkpoint=lambda *args: checkpoint(*args, use_reentrant=False))],
    "selective checkpointing": [
        Mode(checkpoint=saving(torch.ops.foreshock.attention_forward.default)),
        Mode(checkpoint=saving(torch.ops.aten.mm.default, torch.ops.aten.addmm.default)),
    ],
    "gradient accumulation": [Mode(micro_batches=2)],
    "autocast bf16": [Mode(autocast=True)],
    "pure bf16": [Mode(dtype=torch.bfloat16)],
}


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True, dropout=0.0)


def seeded(make: Callable[[Checkpoint | None], nn.Module]) -> Callable[[Mode], nn.Module]:
    def made(mode: Mode) -> nn.Module:
        torch.manual_seed(3)
        return make(mode.checkpoint).to(mode.dtype)

    return made


def gpt_of(layer: Callable[[], nn.Module]) -> Callable[[Mode], nn.Module]:
    return seeded(lambda kept: tiny_gpt(layer(), layer(), seed=3, checkpoint=kept))


MODELS: dict[str, tuple[Callable[[Mode], nn.Module], int, int]] = {
    # how it is made, query heads in all, rows of a head in a micro-batch
    "nanoGPT": (gpt_of(lambda: CausalSelfAttention(16, 2)), 4, 24),
    "plain attention": (gpt_of(lambda: GroupedQueryAttention(16, 4, 2)), 8, 24),
    "ViT": (seeded(lambda kept: TinyViT(checkpoint=kept)), 4, 2 * 4),
    "torch TransformerEncoder": (gpt_of(encoder_layer), 4, 24),
}

COMPILED = ("plain attention", "ViT", "torch TransformerEncoder")
LONG = {("nanoGPT", "inductor"), *((model, "torch.compile") for model in COMPILED)}
"""Of the full tier; the quick one compiles nanoGPT."""

CASES = [
    pytest.param(
        model,
        mode,
        kind,
        id=f"{model}, {name}{n or ''}",
        marks=[pytest.mark.execution(model, name), *[pytest.mark.full] * ((model, name) in LONG)],
    )
    for model in MODELS
    for name, kinds in MODES.items()
    for n, kind in enumerate(kinds)
    for mode in [name]
    if name != "inductor" or model == "nanoGPT"  # a compiler run for each takes long
]


@pytest.fixture(autouse=True)
def _compiled_code_is_forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@functools.cache
def eager(model: str, dtype: torch.dtype, autocast: bool, micro_batches: int) -> Trained:
    """The counts that every mode must come to."""
    mode = Mode(dtype=dtype, autocast=autocast, micro_batches=micro_batches)
    return watched(MODELS[model][0](mode), mode.loop)


@pytest.mark.full
@pytest.mark.parametrize(("model", "name", "mode"), CASES)
def test_a_mode_of_execution_changes_no_bit_and_no_count(model: str, name: str, mode: Mode) -> None:
    make, heads, rows = MODELS[model]
    expected = alone(make(mode), mode.loop)
    torch._dynamo.reset()
    got = watched(make(mode), mode.loop)
    got.assert_same_bits(expected)
    assert got.rows == [rows * mode.micro_batches * STEPS] * heads
    plain = eager(model, mode.dtype, mode.autocast, mode.micro_batches)
    for mine, theirs in zip(got.words, plain.words, strict=True):
        np.testing.assert_array_equal(mine[:, Slot.ROWS], theirs[:, Slot.ROWS])
    if mode.compile is None:  # a compiler may round what stands round the operator otherwise
        forward = [*COUNT_SLOTS, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ]
        np.testing.assert_array_equal(got.words[0][:, forward], plain.words[0][:, forward])


@pytest.mark.execution("nanoGPT", "torch.compile")
def test_a_compiler_that_has_not_looked_pytorchs_functions_up_before_attach_takes_none_of_ours_for_them() -> None:
    torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()  # as in a process that has compiled nothing yet
    mode = MODES["torch.compile"][0]
    assert watched(MODELS["nanoGPT"][0](mode), mode.loop).rows == [24 * STEPS] * 4
