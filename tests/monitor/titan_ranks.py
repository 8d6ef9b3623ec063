"""One process of several, for tests: torchrun ... titan_ranks.py FOLDER DEVICE trains with torchtitan's own Trainer and
CheckpointManager, without foreshock and with it, in every way. Each training stops, saves, and resumes in another
Trainer. What came of them is saved in FOLDER/RANK.pt. torchtitan trains on GPUs alone: a CPU needs a stand-in for their
module. Written for torchtitan 0.3.0.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
            yield self.row()

    def row(self) -> tuple[dict[str, Tensor], Tensor]:
        seed = torch.Generator().manual_seed(1000 * self.given + self.rank)
        row = torch.randint(VOCABULARY, (self.length + 1,), generator=seed)
        self.given += 1
        return {"input": row[:-1], "positions": torch.arange(self.length)}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def let_a_cpu_train() -> None:
    """What torchtitan asks of torch.cuda, of a CPU; and what only PyTorch's next version has."""
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
    vars(dist).setdefault("set_timeout", lambda *_: None)


def of(name: str) -> Any:
    """A module of torchtitan, which is optional."""
    return importlib.import_module(f"torchtitan.{name}")


def configured(
    folder: Path, device: str, rows: type[Numbers] = Numbers, adapt: Callable[[Any], None] = lambda config: None
) -> Any:
    """A Trainer for a small Llama, before its first step. `adapt` changes its Config."""
    trainer, configs = of("trainer"), of("config.configs")
    # after a training the first process sleeps for two seconds
    trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)

    class Loader(of("components.dataloader").ParallelAwareDataloader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(of("components.dataloader").ParallelAwareDataloader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, **_: Any) -> None:
            super().__init__(rows(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=ROWS)

    class NoWords(of("components.tokenizer").BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(of("components.tokenizer").BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        encode = decode = get_vocab_size = None

    config = trainer.Trainer.Config(
        model_spec=small_llama(WIDTH[device]),
        dump_folder=str(folder),
        loss=of("components.loss").CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoWords.Config(),
        dataloader=Loader.Config(),
        optimizer=of("components.optimizer").default_adamw(lr=0.01, weight_decay=0.0),
        lr_scheduler=of("components.optimizer").LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.0),
        training=configs.TrainingConfig(
            local_batch_size=ROWS,
            seq_len=LENGTH[device],
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=configs.ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=of("components.checkpointer").CheckpointManager.Config(enable=True, interval=STOP),
        debug=configs.DebugConfig(seed=3, deterministic=True, deterministic_warn_only=True),
    )
    adapt(config)
    made = trainer.Trainer(config)
    for module in made.model_parts[0].modules():
        if device == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products
    return made


def small_llama(width: int) -> Any:
    """Two layers with PyTorch's own attention, which torchtitan's tests give a model too."""
    llama, common = of("models.llama3"), of("models.common")
    layers = llama._build_llama3_layers(
        n_layers=2,
        dim=width,
        n_heads=HEADS,
        n_kv_heads=HEADS // 2,
        hidden_dim=2 * width,
        rope=common.ComplexRoPE.Config(dim=width // HEADS, max_seq_len=LENGTH["cuda"], theta=500_000.0),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = of("models.common.attention").ScaledDotProductAttention.Config()
    spec = llama.model_registry("debugmodel")
    spec.state_dict_adapter = None
    spec.model = llama.Llama3Model.Config(
        dim=width,
        vocab_size=VOCABULARY,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=width, param_init=llama._EMBEDDING_INIT
        ),
        norm=common.RMSNorm.Config(normalized_shape=width, param_init=llama._NORM_INIT),
        lm_head=common.Linear.Config(
            in_features=width, out_features=VOCABULARY, param_init=llama._output_linear_init(width)
        ),
        layers=layers,
    )
    return spec


def train(folder: Path, device: str, course: Course) -> None:
    """Train to STOP, save, and resume to STEPS with another Trainer."""
    for last in (STOP, STEPS):
        trainer = configured(folder, device)
        with torch.no_grad():  # as initialised, attention is so even that an error of it hides
            for weight in trainer.model_parts[0].parameters():
                if weight.dim() > 1:
                    weight.mul_(10.0)
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
