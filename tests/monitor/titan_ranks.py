"""One process of several, for tests: torchrun ... titan_ranks.py FOLDER DEVICE trains with torchtitan's own Trainer and
CheckpointManager, without foreshock and with it, in every way. Each training stops, saves, and resumes in another
Trainer. What came of them is saved in FOLDER/RANK.pt. torchtitan trains on GPUs alone: a CPU needs a stand-in for their
module.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not stand before another package's

from tests.monitor.resumed_courses import LENGTH, OURS, REFERENCES, ROWS, STEPS, STOP, Course
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

from foreshock.monitor.callbacks.torchtitan import watch

HEADS, VOCABULARY = 4, 96
WIDTH = {"cpu": 32, "cuda": 256}


class Numbers(IterableDataset):  # type: ignore[type-arg]
    """Rows of random tokens and their successors, which go on where they were when it was saved."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.given = rank, length, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            seed = torch.Generator().manual_seed(1000 * self.given + self.rank)
            row = torch.randint(VOCABULARY, (self.length + 1,), generator=seed)
            self.given += 1
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def let_a_cpu_train() -> None:
    """What torchtitan asks of torch.cuda, of a CPU."""
    answers: dict[str, Any] = {
        "get_device_name": lambda *_: "a CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda *_: {},
        "current_device": lambda: 0,
        **dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache"), lambda *_: None),
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    torch._utils._get_available_device_type = lambda: "cpu"


def configured(folder: Path, device: str, adapt: Callable[[Any, Any], None] = lambda spec, config: None) -> Any:
    """A Trainer of torchtitan for a small Llama, before its first step. `adapt` changes its TrainSpec and JobConfig."""
    dataloader, loss, schedule, optimizer, config_of, llama3, spec, train = (
        importlib.import_module(f"torchtitan.{name}")  # which is optional
        for name in (
            "components.dataloader",
            "components.loss",
            "components.lr_scheduler",
            "components.optimizer",
            "config",
            "models.llama3",
            "protocols.train_spec",
            "train",
        )
    )

    # after a training the first process sleeps for two seconds
    vars(train)["time"] = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)

    def loader(*, dp_world_size: int, dp_rank: int, **_: Any) -> Any:
        numbers = Numbers(dp_rank, config.training.seq_len)
        return dataloader.ParallelAwareDataloader(numbers, dp_rank, dp_world_size, batch_size=ROWS)

    sizes = llama3.TransformerModelArgs(
        dim=WIDTH[device], n_layers=2, n_heads=HEADS, n_kv_heads=2, vocab_size=VOCABULARY, multiple_of=32
    )
    small = spec.TrainSpec(
        model_cls=llama3.Transformer,
        model_args={"llama": sizes},
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        build_optimizers_fn=optimizer.build_optimizers,
        build_lr_schedulers_fn=schedule.build_lr_schedulers,
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
        build_loss_fn=loss.build_cross_entropy_loss,
    )
    spec._extra_train_specs["small"] = small
    config = config_of.JobConfig()
    config.job.dump_folder = str(folder)
    config.model.name, config.model.flavor = "small", "llama"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = ROWS, LENGTH[device], STEPS
    config.optimizer.lr, config.lr_scheduler.warmup_steps = 0.01, 1
    config.optimizer.implementation = "foreach"
    config.checkpoint.enable, config.checkpoint.interval = True, STOP
    config.debug.seed, config.debug.deterministic, config.debug.deterministic_warn_only = 3, True, True
    adapt(small, config)
    trainer = train.Trainer(config)
    for module in trainer.model_parts[0].modules():
        if device == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products
    with torch.no_grad():  # as initialised, attention is so even that an error of it hides
        for weight in trainer.model_parts[0].parameters():
            if weight.dim() > 1:
                weight.mul_(10.0)
    return trainer


def train(folder: Path, device: str, course: Course) -> None:
    """Train to STOP, save, and resume to STEPS with another Trainer."""
    for last in (STOP, STEPS):
        trainer = configured(folder, device)
        agent = None if course.settings is None else watch(trainer, **course.settings)
        course.begins(agent, trainer.model_parts[0])
        step = trainer.forward_backward_step

        def keep_loss(step: Any = step, **given: Any) -> Tensor:
            loss: Tensor = step(**given)
            course.told["losses"].append(float(loss.detach()))
            return loss

        trainer.forward_backward_step = keep_loss
        trainer.optimizers.register_step_post_hook(lambda *_: course.stepped())
        trainer.should_continue_training = lambda trainer=trainer, last=last: trainer.step < last
        trainer.train()
        trainer.close()
        course.ends(trainer.model_parts[0], trainer.step)


def main(folder: Path, device: str) -> None:
    """Every training, in the same order on every rank."""
    torch.set_num_threads(1)
    if device == "cpu":
        let_a_cpu_train()
        dist.init_process_group("gloo")
    told = {}
    for way in (*REFERENCES, *OURS):
        course = Course(way)
        with course.attention():
            train(folder / way, device, course)
        told[way] = course.told
    torch.save(told, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end
