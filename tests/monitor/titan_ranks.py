"""One rank of a distributed training with torchtitan: torchrun ... titan_ranks.py FOLDER DEVICE.

Trains with torchtitan's own Trainer and CheckpointManager, with and without foreshock. Each training stops, saves, and
resumes in another Trainer. Results are saved to FOLDER/RANK.pt. torchtitan supports only GPUs, so torch.cpu is patched.
Written for torchtitan 0.3.0.
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
    sys.path.append(str(Path(__file__).parents[2]))  # last: tests/kernels must not shadow another package

from tests.monitor.resumed_training import LENGTH, REFERENCES, ROWS, STEPS, STOP, WATCHED, ResumedTraining
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

from foreshock.monitor.callbacks.torchtitan import watch

HEADS, VOCABULARY = 4, 96
WIDTH = {"cpu": 32, "cuda": 256}


class RandomTokens(IterableDataset):  # type: ignore[type-arg]
    """Rows of random tokens and their successors; the position is saved and restored."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.rows_read = rank, length, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield self.row()

    def row(self) -> tuple[dict[str, Tensor], Tensor]:
        seed = torch.Generator().manual_seed(1000 * self.rows_read + self.rank)
        row = torch.randint(VOCABULARY, (self.length + 1,), generator=seed)
        self.rows_read += 1
        return {"input": row[:-1], "positions": torch.arange(self.length)}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.rows_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows_read = state["given"]


def patch_cpu_device() -> None:
    """Gives torch.cpu the functions that torchtitan uses of torch.cuda, and those of PyTorch's next version."""
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


def titan_module(name: str) -> Any:
    """A module of torchtitan, which is an optional dependency."""
    return importlib.import_module(f"torchtitan.{name}")


def small_trainer(
    folder: Path,
    device: str,
    rows: type[RandomTokens] = RandomTokens,
    adapt: Callable[[Any], None] = lambda config: None,
) -> Any:
    """A Trainer of a small Llama before its first step. `adapt` may change its Config."""
    trainer, configs = titan_module("trainer"), titan_module("config.configs")
    # rank 0 would sleep for two seconds after a training
    trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)

    class Loader(titan_module("components.dataloader").ParallelAwareDataloader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(titan_module("components.dataloader").ParallelAwareDataloader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, **_: Any) -> None:
            super().__init__(rows(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=ROWS)

    class FakeTokenizer(titan_module("components.tokenizer").BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(titan_module("components.tokenizer").BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        encode = decode = get_vocab_size = None

    config = trainer.Trainer.Config(
        model_spec=small_llama(WIDTH[device]),
        dump_folder=str(folder),
        loss=titan_module("components.loss").CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=FakeTokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=titan_module("components.optimizer").default_adamw(lr=0.01, weight_decay=0.0),
        lr_scheduler=titan_module("components.optimizer").LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.0),
        training=configs.TrainingConfig(
            local_batch_size=ROWS,
            seq_len=LENGTH[device],
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=configs.ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=titan_module("components.checkpointer").CheckpointManager.Config(enable=True, interval=STOP),
        debug=configs.DebugConfig(seed=3, deterministic=True, deterministic_warn_only=True),
    )
    adapt(config)
    made = trainer.Trainer(config)
    for module in made.model_parts[0].modules():
        if device == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    return made


def small_llama(width: int) -> Any:
    """Two layers with PyTorch's attention, as in torchtitan's own tests."""
    llama, common = titan_module("models.llama3"), titan_module("models.common")
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
        layer.attention.inner_attention = titan_module("models.common.attention").ScaledDotProductAttention.Config()
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


def train(folder: Path, device: str, course: ResumedTraining) -> None:
    """Train to STOP, save, and resume to STEPS with another Trainer."""
    for last in (STOP, STEPS):
        trainer = small_trainer(folder, device)
        with torch.no_grad():  # default initialisation makes attention almost uniform, which hides errors
            for weight in trainer.model_parts[0].parameters():
                if weight.dim() > 1:
                    weight.mul_(10.0)
        agent = None if course.settings is None else watch(trainer, **course.settings)
        course.begins(agent, trainer.model_parts[0])
        step = trainer.forward_backward_step

        def keep_loss(step: Any = step, **given: Any) -> Tensor:
            loss: Tensor = step(**given)
            course.results["losses"].append(float(loss.detach()))
            return loss

        trainer.forward_backward_step = keep_loss
        trainer.optimizers.register_step_post_hook(lambda *_: course.stepped())
        trainer.should_continue_training = lambda trainer=trainer, last=last: trainer.step < last
        trainer.train()
        trainer.close()
        course.ends(trainer.model_parts[0], trainer.step)


def main(folder: Path, device: str) -> None:
    """All trainings, in the same order on every rank."""
    torch.set_num_threads(1)
    if device == "cpu":
        patch_cpu_device()
        dist.init_process_group("gloo")
    results = {}
    for attention in (*REFERENCES, *WATCHED):
        course = ResumedTraining(attention)
        with course.attention():
            train(folder / attention, device, course)
        results[attention] = course.results
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
