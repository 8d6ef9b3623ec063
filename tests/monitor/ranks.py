"""Models that are spread over processes in each way, and their training there: once with our operator alone and once
watched, in the same mode."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.monitor.executions import Loop, alone, watched
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
QUIET: dict[str, Any] = {"numerics": "kernel", "norms_every_steps": 1}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain(*, world: int, rank: int | None = None, around: Callable[[nn.Module], nn.Module] | None = None) -> Loop:
    """Steps on the rows of the rank among `world` ranks' rows, or on all of them."""

    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        run = model if around is None else around(model)
        optimizer, losses = sgd(model), []
        for step in range(STEPS):
            ids = batch(step, rows=ROWS * world)
            mine = ids if rank is None else ids[rank * ROWS : (rank + 1) * ROWS]
            losses.append(train_step(run, optimizer, step, mine).detach())
            stepped(losses[-1])
        return losses

    return loop


def nano() -> TinyGPT:
    """Two layers of nanoGPT's attention, the same on every rank."""
    torch.manual_seed(3)
    return tiny_gpt(*(CausalSelfAttention(16, 2) for _ in range(2)))


def grouped() -> TinyGPT:
    """Two layers of 4 heads over 2 key heads, in separate projections."""
    torch.manual_seed(3)
    return tiny_gpt(*(GroupedQueryAttention(16, 4, 2) for _ in range(2)))


class Conv1DAttention(CausalSelfAttention):
    """With a projection that keeps its weight as [in, out], of which FSDP2 cuts the inputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.c_attn = Conv1D(3 * width, width)


def conv1d() -> TinyGPT:
    """Two layers of attention as in transformers' GPT-2."""
    torch.manual_seed(3)
    return tiny_gpt(*(Conv1DAttention(16, 2) for _ in range(2)))


def sharded(model: TinyGPT) -> TinyGPT:
    """FSDP2, each block by itself and then the rest."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def tensor_parallel(model: TinyGPT, world: int) -> TinyGPT:
    """Heads over ranks: queries, keys and values by columns, the output by rows."""
    mesh = init_device_mesh("cpu", (world,))
    plan: Any = {name: ColwiseParallel() for name in ("wq", "wk", "wv")} | {"wo": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


class FirstStage(nn.Module):
    """The embedding and its layers."""

    def __init__(self, model: TinyGPT) -> None:
        super().__init__()
        self.embedding, self.blocks = model.embedding, nn.ModuleList(list(model.blocks)[:1])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class LastStage(nn.Module):
    """The other layers and the head."""

    def __init__(self, model: TinyGPT) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(list(model.blocks)[1:]), model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def pipeline(rank: int) -> Loop:
    """GPipe over two stages, two micro-batches a step; the first stage knows no loss."""

    def loop(model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        hidden = torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)
        logits = torch.zeros(ROWS, LENGTH, VOCABULARY, requires_grad=True)
        # told the shapes: PyTorch else finds them by a forward and backward of its own, whose rows count as any others
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


def both(make: Callable[[], nn.Module], loop: Loop, **overrides: Any) -> dict[str, Any]:
    """Train alone and watched; what the tests need to know."""
    expected, got = alone(make(), loop, "kernel"), watched(make(), loop, **QUIET, **overrides)
    started = got.listener.of(wire.Started)[0]
    norms = [s.query_norm for s in got.listener.of(wire.Sample)]
    return {
        "losses": got.losses,
        "same_bits": all(
            torch.equal(a, b) for a, b in zip(got.losses + got.weights, expected.losses + expected.weights, strict=True)
        ),
        "words": got.words,
        "layers": [(layer.layer, list(layer.heads), layer.kv_heads) for layer in started.layers],
        "query_norm": None if norms[-1] is None else norms[-1].numpy(),
        "run": got.run,
    }


def training(url: str) -> dict[str, dict[str, Any]]:
    """Each way to spread a model, in the same order on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = plain(world=world, rank=rank)
    return {
        "DDP": both(nano, plain(world=world, rank=rank, around=DistributedDataParallel), url=url),
        "FSDP2": both(lambda: sharded(nano()), part),
        "FSDP2, separate": both(lambda: sharded(grouped()), part),
        "FSDP2, Conv1D": both(lambda: sharded(conv1d()), part),
        "tensor parallel": both(lambda: tensor_parallel(grouped(), world), plain(world=1), url=url, run="parts"),
        "pipeline": both(lambda: (FirstStage, LastStage)[rank](nano()), pipeline(rank), first_layer=rank),
    }
