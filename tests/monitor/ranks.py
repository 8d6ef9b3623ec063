"""Distributed models, each trained with foreshock's operator only and with an agent."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.monitor.execution_modes import Loop, train_watched, train_with_operator
from tests.monitor.tiny_models import (
    VOCABULARY,
    CausalSelfAttention,
    GroupedQueryAttention,
    TinyGPT,
    batch,
    next_token_loss,
    tiny_gpt,
    train_step,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers.pytorch_utils import Conv1D

from foreshock.contract import wire

STEPS, ROWS, LENGTH, WIDTH = 3, 2, 12, 16
SETTINGS: dict[str, Any] = {"numerics": "kernel", "norms_every_steps": 1}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain(*, world: int, rank: int | None = None, wrap: Callable[[nn.Module], nn.Module] | None = None) -> Loop:
    """A training loop on the rows of one rank among `world` ranks, or on the rows of all ranks."""

    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        run = model if wrap is None else wrap(model)
        optimizer, losses = sgd(model), []
        for step in range(STEPS):
            ids = batch(step, rows=ROWS * world)
            own_rows = ids if rank is None else ids[rank * ROWS : (rank + 1) * ROWS]
            losses.append(train_step(run, optimizer, step, own_rows).detach())
            stepped(losses[-1])
        return losses

    return loop


def nano() -> TinyGPT:
    """Two layers of nanoGPT's attention, identical on all ranks."""
    torch.manual_seed(3)
    return tiny_gpt(*(CausalSelfAttention(16, 2) for _ in range(2)))


def grouped() -> TinyGPT:
    """Two layers with 4 query heads, 2 key heads and separate projections."""
    torch.manual_seed(3)
    return tiny_gpt(*(GroupedQueryAttention(16, 4, 2) for _ in range(2)))


class Conv1DAttention(CausalSelfAttention):
    """Attention whose projection stores its weight as [in, out], so FSDP2 shards the inputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.c_attn = Conv1D(3 * width, width)


def conv1d() -> TinyGPT:
    """Two layers with transformers' Conv1D, as in GPT-2."""
    torch.manual_seed(3)
    return tiny_gpt(*(Conv1DAttention(16, 2) for _ in range(2)))


def sharded(model: TinyGPT) -> TinyGPT:
    """FSDP2 on each block, then on the whole model."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def tensor_parallel(model: TinyGPT, world: int) -> TinyGPT:
    """Shards heads: queries, keys and values by columns, the output by rows."""
    mesh = init_device_mesh("cpu", (world,))
    plan: Any = {name: ColwiseParallel() for name in ("wq", "wk", "wv")} | {"wo": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


class FirstStage(nn.Module):
    """The embedding and the first layer."""

    def __init__(self, model: TinyGPT) -> None:
        super().__init__()
        self.embedding, self.blocks = model.embedding, nn.ModuleList(list(model.blocks)[:1])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class LastStage(nn.Module):
    """The other layers and the output projection."""

    def __init__(self, model: TinyGPT) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(list(model.blocks)[1:]), model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def pipeline(rank: int) -> Loop:
    """GPipe over two stages with two micro-batches per step; the first stage has no loss."""

    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        hidden = torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)
        logits = torch.zeros(ROWS, LENGTH, VOCABULARY, requires_grad=True)
        # pass the shapes: otherwise PyTorch runs a forward and backward to infer them, whose rows would be counted
        shapes = ((ids,), hidden) if rank == 0 else ((hidden,), logits)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), input_args=shapes[0], output_args=shapes[1])
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=next_token_loss)
        optimizer, losses = sgd(model), []
        for step in range(STEPS):
            ids = batch(step, rows=2 * ROWS)
            parts: list[Tensor] = []
            if rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=ids, losses=parts)
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.stack(parts).mean().detach() if parts else torch.zeros(())
            losses.append(loss)
            stepped(loss)
        return losses

    return loop


def compare(make: Callable[[], nn.Module], loop: Loop, **overrides: Any) -> dict[str, Any]:
    """Trains with the operator only and with an agent; returns what the tests compare."""
    expected, found = train_with_operator(make(), loop, "kernel"), train_watched(make(), loop, **SETTINGS, **overrides)
    started = found.listener.of(wire.Started)[0]
    norms = [s.query_norm for s in found.listener.of(wire.Sample)]
    return {
        "losses": found.losses,
        "same_bits": all(
            torch.equal(a, b)
            for a, b in zip(found.losses + found.weights, expected.losses + expected.weights, strict=True)
        ),
        "words": found.words,
        "layers": [(layer.layer, list(layer.heads), layer.kv_heads) for layer in started.layers],
        "query_norm": None if norms[-1] is None else norms[-1].numpy(),
        "run": found.run,
    }


def training(url: str) -> dict[str, dict[str, Any]]:
    """All kinds of parallelism, in the same order on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = plain(world=world, rank=rank)
    return {
        "DDP": compare(nano, plain(world=world, rank=rank, wrap=DistributedDataParallel), url=url),
        "FSDP2": compare(lambda: sharded(nano()), part),
        "FSDP2, separate": compare(lambda: sharded(grouped()), part),
        "FSDP2, Conv1D": compare(lambda: sharded(conv1d()), part),
        "tensor parallel": compare(lambda: tensor_parallel(grouped(), world), plain(world=1), url=url, run="parts"),
        "pipeline": compare(lambda: (FirstStage, LastStage)[rank](nano()), pipeline(rank), first_layer=rank),
    }
