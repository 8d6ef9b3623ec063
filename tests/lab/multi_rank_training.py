"""Trains a tiny model in one of several processes."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsFloat

import torch.distributed as dist

from foreshock.contract import wire
from foreshock.contract.slots import Slot
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.ranks import Ranks
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Recorder, Training, train
from foreshock.lab.training.variant import find_variant

TINY = replace(
    find_recipe("key-bias-small"),
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    batch=4,
    micro_batch=2,
    steps=40,
    schedule="cosine",
)
"""With two processes each takes one micro-batch; one process takes two."""
STEPS = 24


def _trained(ranks: Ranks, trace: Path | None, ends_at: int | None = None) -> dict[str, Any]:
    """Trains with PyTorch's attention; the second process asks to stop at step `ends_at`."""
    losses: list[float] = []
    rows: list[int] = []
    training = Training(TINY, find_variant("flash-untreated"), 1, ranks=ranks)

    def collect(event: wire.Event) -> None:
        if isinstance(event, wire.Sample) and (words := event.words()) is not None:
            rows.append(int(words[0, Slot.ROWS]))

    def on_step(step: int, loss: SupportsFloat) -> None:
        losses.append(float(loss))
        if recorder is not None:
            recorder.step(loss)
            if step == STEPS:
                recorder.flush()
        training.wants_to_end = ranks.rank == 1 and step == ends_at

    header = TINY.header(training.variant, 1, training.agent.run)
    with TraceWriter(trace, header) if trace is not None else nullcontext() as writer:
        recorder = None if writer is None else Recorder(training, writer)
        training.agent.subscribe(collect)
        train(training, STEPS, on_step)
    config = training.agent.config
    place = (config.rank, config.world_size, training.agent.run)
    return {"losses": losses, "rows": sum(rows), "weights": training.model.state_dict(), "place": place}


def train_on_rank(folder: str) -> dict[str, Any]:
    """The results of this process; the first process writes its trace into the folder."""
    trace = Path(folder) / "trace.jsonl.gz" if dist.get_rank() == 0 else None
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    runs = {"whole": _trained(ranks, trace), "ended": _trained(ranks, None, ends_at=10)}
    return runs | {"gathered": ranks.gather(f"from rank {ranks.rank}")}
