"""One process of several, for tests: torchrun ... muon_ranks.py FOLDER DEVICE TRAINER trains with Muon at too high a
rate, under transformers' Trainer with FSDP2 or with DDP, or under torchtitan's. It does so with QK-Clip, which is one
argument of the callback, and without it. What came of both is saved in FOLDER/RANK.pt.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not stand before another package's

from tests.monitor import titan_ranks, trainer_ranks
from tests.monitor.doubles import Listener
from tests.monitor.resumed_courses import ROWS, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon
from transformers import Trainer, TrainerCallback

from foreshock.callbacks import TransformersCallback, watch_torchtitan
from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent

STEPS, MUONS_RATE, ADAMS_RATE = 60, 0.2, 0.01
LENGTH = {"cpu": 48, "cuda": 200}
"""Of so many tokens the largest score differs little from batch to batch."""
WAYS: dict[str, dict[str, Any]] = {"clipped": {"qk_clip": "always"}, "free": {"attention": "kernels"}}
"""The one argument, whose default is then foreshock's own kernels; and the same without it."""
WATCHED: dict[str, Any] = {
    "run": "muon", "sample_every_steps": 1, "sample_every_seconds": 0.0, "strict": True, "quiet": True, "url": None,
}  # fmt: skip


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for all else."""
    named = list(model.named_parameters())
    inside = {name for name, parameter in named if "layers." in name and parameter.dim() == 2}
    matrices = [parameter for name, parameter in named if name in inside]
    others = [parameter for name, parameter in named if name not in inside]
    return [torch.optim.Muon(matrices, lr=MUONS_RATE, weight_decay=0.0), torch.optim.AdamW(others, lr=ADAMS_RATE)]


def orthogonalise_whole_matrices() -> None:
    """Gather a matrix once for all iterations of Muon, in place of three times for each.

    What gloo gathers is freed in a thread of its own, in a race with Python (PyTorch's issue 75529): of 160 trainings
    one ended in malloc within that thread.
    """
    orthogonalise = _muon._zeropower_via_newtonschulz

    def of_the_whole(update: Tensor, *how: Any) -> Tensor:
        if not isinstance(update, DTensor):
            return orthogonalise(update, *how)
        whole = orthogonalise(update.full_tensor(), *how)
        return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)

    _muon._zeropower_via_newtonschulz = of_the_whole  # type: ignore[assignment]


class MuonAndAdamW(torch.optim.Optimizer):
    """Both as one optimizer, for a trainer that takes one."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = muon_and_adamw(model)
        super().__init__(self._groups(), {})

    def _groups(self) -> list[dict[str, Any]]:
        """Those of the parts themselves, so that a change of a rate or of parameters reaches them."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups()


class Training:
    """One training: what it must know of its agent, and what came of it."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"losses": []}
        self._listener = Listener()
        self._agent: Agent | None = None

    def begins(self, agent: Agent) -> None:
        self._agent = agent
        agent.subscribe(self._listener)

    def ends(self, trained: nn.Module) -> None:
        """Its agent is closed."""
        assert self._agent is not None
        words = [sample.words() for sample in self._listener.of(wire.Sample)]
        self.told |= {
            "scores": [float(slot_values(each, Slot.SCORE_MAX).max()) for each in words],
            "events": self._listener.of(wire.Clipped),
            "report": self._agent.report(),
            "faults": dict(self._agent.faults),
            "weights": whole(trained),
            "sharded": any(isinstance(parameter, DTensor) for parameter in trained.parameters()),
        }


class _Follow(TrainerCallback):  # type: ignore[misc]
    """Shows a training its agent, once there is one."""

    def __init__(self, watcher: Any, training: Training) -> None:
        self.watcher, self.training = watcher, training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.begins(self.watcher.agent)


class _TrainerWithMuon(Trainer):  # type: ignore[misc]
    """Trainer takes no optimizer that was made before where it shards the model: it asks for this."""

    optimizer: Any

    def create_optimizer(self, *models: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = MuonAndAdamW(models[0] if models else self.model)
        return self.optimizer  # type: ignore[no-any-return]


def with_trainer(folder: Path, training: Training, way: dict[str, Any]) -> None:
    watcher = TransformersCallback(**WATCHED, **way)
    model = trainer_ranks.model().to(trainer_ranks.DEVICE)
    count = STEPS * ROWS * dist.get_world_size()
    tokens = torch.randint(3, 90, (count, LENGTH[trainer_ranks.DEVICE]), generator=torch.Generator().manual_seed(3))
    given: dict[str, Any] = {
        "model": model,
        "args": trainer_ranks.arguments(folder, max_steps=STEPS, save_strategy="no"),
        "train_dataset": [{"input_ids": x, "labels": x} for x in tokens],
        "callbacks": [watcher, _Follow(watcher, training)],
    }
    if trainer_ranks.SHARDED:
        trainer = _TrainerWithMuon(**given)
    else:
        trainer = Trainer(**given, optimizers=(MuonAndAdamW(model), None))
    trainer.train()
    training.ends(trainer.model)
    training.told["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_torchtitan(folder: Path, training: Training, way: dict[str, Any]) -> None:
    container: Any = importlib.import_module("torchtitan.components.optimizer").OptimizersContainer  # which is optional

    class Container(container):  # type: ignore[misc]
        """The class that torchtitan asks people to write who want another optimizer than AdamW."""

        def __init__(self, parts: list[nn.Module], *_: Any, **__: Any) -> None:
            self.model_parts = parts
            self.optimizers = [one for part in parts for one in muon_and_adamw(part)]
            self._post_init([parameter for part in parts for parameter in part.parameters()], {})

    def adapt(spec: Any, config: Any) -> None:
        spec.build_optimizers_fn = Container
        config.training.seq_len = LENGTH[trainer_ranks.DEVICE]
        config.training.steps, config.lr_scheduler.decay_ratio = STEPS, 0.0
        config.checkpoint.enable = False

    trainer = titan_ranks.configured(folder, trainer_ranks.DEVICE, adapt)
    agent = watch_torchtitan(trainer, **WATCHED, **way)
    training.begins(agent)
    step = trainer.forward_backward_step

    def keep_loss(**given: Any) -> Tensor:
        loss: Tensor = step(**given)
        training.told["losses"].append(float(loss.detach()))
        return loss

    trainer.forward_backward_step = keep_loss
    trainer.train()
    trainer.close()
    training.ends(trainer.model_parts[0])


def main(folder: Path, device: str, trainer: str) -> None:
    """Both trainings, in the same order on every rank."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif trainer == "torchtitan":
        titan_ranks.let_a_cpu_train()
    if device == "cpu" or trainer != "torchtitan":
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    trainer_ranks.DEVICE, trainer_ranks.SHARDED = device, not trainer.endswith("DDP")
    if device == "cpu":
        orthogonalise_whole_matrices()
    if device == "cpu" and trainer == "Trainer":
        trainer_ranks.let_a_cpu_shard()
    told = {}
    for name, way in WAYS.items():
        training = Training()
        (with_torchtitan if trainer == "torchtitan" else with_trainer)(folder / name, training, way)
        told[name] = training.told
    torch.save(told, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end
