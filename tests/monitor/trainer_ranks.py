"""One process of several, for tests: python -P trainer_ranks.py WORLD RANK FOLDER trains with FSDP2 under transformers'
Trainer and under Accelerate, stops, resumes, and saves in FOLDER/RANK.pt what came: with foreshock and without.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not stand before another package's

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from tests.monitor.doubles import Listener
from tests.monitor.test_foreign_models import DECODER, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from foreshock.contract import wire
from foreshock.monitor.callbacks.accelerate import ForeshockTracker
from foreshock.monitor.callbacks.huggingface import ForeshockCallback

STOP, STEPS, ROWS, LENGTH = 3, 5, 2, 12
SETTINGS: dict[str, Any] = {
    "run": "sharded",
    "attention": "keep",
    "probe_rows": 5,
    "probe_every_steps": 1,
    "sample_every_steps": 1,
    "sample_every_seconds": 0.0,
    "norms_every_steps": 1,
    "strict": True,
    "quiet": True,
    "url": None,
}


def sharding() -> FullyShardedDataParallelPlugin:
    """FSDP2, each decoder layer by itself."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )


def let_a_cpu_shard() -> None:
    """Accelerate shards on accelerators alone; here a CPU stands in for one."""
    prepare: Callable[..., None] = AcceleratorState.__init__
    plugin = sharding()

    def with_sharding(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = with_sharding


def model() -> Any:
    return tiny("Llama", **DECODER).train()


def rows(step: int, rank: int) -> Tensor:
    """What a rank reads in a step, [ROWS, LENGTH]."""
    return torch.randint(3, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank))


def whole(trained: nn.Module) -> list[Tensor]:
    """Every weight of all ranks together."""
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in trained.parameters()]


class _Stop(TrainerCallback):  # type: ignore[misc]
    """Ends a training early; keeps the loss of each micro-batch and subscribes to the agent, where there is one."""

    def __init__(self, at: int, watcher: ForeshockCallback | None) -> None:
        self.at, self.watcher, self.listener, self.sharded = at, watcher, Listener(), False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.sharded = any(isinstance(p, DTensor) for p in kwargs["model"].parameters())
        if self.watcher is not None and self.watcher.agent is not None:
            self.watcher.agent.subscribe(self.listener)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.at


def with_trainer(folder: Path, *, watched: bool) -> dict[str, Any]:
    """Train to STOP, save, and resume to STEPS with another Trainer."""
    told: dict[str, Any] = {"words": [], "losses": [], "rows": []}
    for last in (STOP, STEPS):
        watcher = ForeshockCallback(**SETTINGS) if watched else None
        stop = _Stop(last, watcher)
        trainer = Trainer(
            model(),
            TrainingArguments(
                str(folder), max_steps=STEPS, save_steps=STOP, per_device_train_batch_size=ROWS, use_cpu=True,
                lr_scheduler_type="constant", learning_rate=0.01, optim="adamw_torch", logging_steps=1,
                report_to=[], disable_tqdm=True, seed=3,
            ),
            train_dataset=[{"input_ids": x, "labels": x} for step in range(8) for x in rows(step, 0)],
            callbacks=[*([watcher] if watcher else []), stop],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STOP}") if last == STEPS else None)
        told["sharded"] = stop.sharded
        told["words"] += [sample.words() for sample in stop.listener.of(wire.Sample)]
        told["steps"] = trainer.state.global_step
        told["losses"] += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told["weights"] = whole(trainer.model)
    return told


def with_accelerate(folder: Path, rank: int, *, watched: bool) -> dict[str, Any]:
    """The same with a loop of one's own."""
    told: dict[str, Any] = {"words": [], "losses": []}
    for first, last in ((0, STOP), (STOP, STEPS)):
        trained = model()
        tracker = ForeshockTracker(trained, **SETTINGS) if watched else None
        accelerator = Accelerator(cpu=True, log_with=tracker, fsdp_plugin=sharding())
        trained, optimizer = accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), lr=0.01))
        if tracker is not None:
            tracker.checkpoint_with(accelerator)
            accelerator.init_trackers("test")
            assert tracker.agent is not None
            tracker.agent.subscribe(listener := Listener())
        if first:
            accelerator.load_state(str(folder))
        for step in range(first, last):
            x = rows(step, rank)
            loss = trained(input_ids=x, labels=x).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.detach()}, step=step + 1)
            told["losses"].append(loss.detach())
        if not first:
            accelerator.save_state(str(folder))
        told["sharded"] = any(isinstance(p, DTensor) for p in trained.parameters())
        told["weights"] = whole(trained)
        if tracker is not None:
            tracker.finish()  # as end_training does, which ends the process group too
            told["words"] += [sample.words() for sample in listener.of(wire.Sample)]
    told["steps"] = STEPS
    return told


def main(world: int, rank: int, folder: Path) -> None:
    """Every training, in the same order on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    let_a_cpu_shard()
    told = {}
    for watched in (False, True):
        told["Trainer", watched] = with_trainer(folder / f"trainer {watched}", watched=watched)
        told["Accelerate", watched] = with_accelerate(folder / f"accelerate {watched}", rank, watched=watched)
    torch.save(told, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end
