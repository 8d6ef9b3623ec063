"""Lightning's callback: optimizer steps under accumulation, resume, and an end in every case."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import batch, tiny_gpt
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor.callbacks.lightning import ForeshockCallback

# Lightning's own: what it calls in PyTorch that is on its way out, and its advice
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*treespec, LeafSpec:FutureWarning",
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)


class Sequences(torch.utils.data.Dataset[Tensor]):
    """64 sequences of 12 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return batch(index)[0]


def data() -> "torch.utils.data.DataLoader[Tensor]":
    return torch.utils.data.DataLoader(Sequences(), batch_size=2)


class Model(LightningModule):  # type: ignore[misc]
    """The tiny GPT; keeps the losses of its micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt()
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = F.cross_entropy(self.gpt(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watcher(Callback):  # type: ignore[misc]
    """Listens from the start, switches a head after a step, and may fail after one."""

    def __init__(self, callback: ForeshockCallback, *, switch_at: int = 0, fail_at: int = 0) -> None:
        self.callback, self.switch_at, self.fail_at = callback, switch_at, fail_at
        self.listener = Listener()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.callback.agent is not None
        self.callback.agent.subscribe(self.listener)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        assert self.callback.agent is not None
        if trainer.global_step == self.switch_at:
            self.callback.agent.set_mode([(1, 0)], "exact_delta", "a test")
        if trainer.global_step == self.fail_at > 0:
            raise RuntimeError("the user's own fault")

    def intervals(self) -> list[tuple[int, int]]:
        return [(s.since_step, s.step) for s in self.listener.of(wire.Sample)]

    def endings(self) -> list[str]:
        return [e.status for e in self.listener.of(wire.Finished)]


def trainer_of(steps: int, *callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(max_steps=steps, callbacks=[*callbacks], **quiet, **options)


def fit(
    folder: Path,
    steps: int,
    *,
    resume: Path | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    keep: int = -1,
    **watching: int,
) -> tuple[Model, ForeshockCallback, Watcher]:
    callback = ForeshockCallback(**EVERY_STEP)
    watcher, model = Watcher(callback, **watching), Model()
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=keep, filename="{step}")
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    trainer = trainer_of(steps, callback, watcher, saving, **options)
    try:
        trainer.fit(model, data(), ckpt_path=None if resume is None else str(resume))
    finally:
        assert "_foreshock_layer" not in vars(model.gpt.blocks[0])  # given back, whatever happened
    return model, callback, watcher


def test_accumulated_micro_batches_make_one_step_with_their_mean_loss(tmp_path: Path) -> None:
    model, callback, watcher = fit(tmp_path, 3, accumulate=2)
    samples = watcher.listener.of(wire.Sample)
    assert watcher.intervals() == [(0, 1), (1, 2), (2, 3)]
    means = [sum(model.losses[n : n + 2]) / 2 for n in (0, 2, 4)]
    assert [s.loss for s in samples] == pytest.approx(means, rel=1e-6)
    assert [s.learning_rate for s in samples] == [0.1] * 3
    assert [slot_values(s.words(), Slot.ROWS).tolist() for s in samples] == [[2 * 2 * 12] * 4] * 3
    assert watcher.endings() == ["completed"]
    assert callback.agent is not None
    assert callback.agent.faults == {}


def test_the_gradient_norm_is_the_one_that_lightning_clips_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    original = torch.nn.utils.clip_grad_norm_

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        norms.append(original(*args, **kwargs).item())
        return torch.tensor(norms[-1])

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counting)
    _, _, watcher = fit(tmp_path, 3, accumulate=2, clip=0.1)
    assert [s.grad_norm for s in watcher.listener.of(wire.Sample)] == pytest.approx(norms, rel=1e-6)
    assert len(norms) == 3  # nothing is computed a second time
    assert min(norms) > 0.1
    assert torch.nn.utils.clip_grad_norm_ is counting


def test_a_resumed_training_repeats_no_step_loses_none_and_keeps_its_modes(tmp_path: Path) -> None:
    _, first, before = fit(tmp_path, 6, switch_at=2)
    _, again, after = fit(tmp_path, 9, resume=tmp_path / "step=4.ckpt")
    kept = [i for i in before.intervals() if i[1] <= 4]
    assert [step for since, end in kept + after.intervals() for step in range(since + 1, end + 1)] == [*range(1, 10)]
    assert first.agent is not None
    assert again.agent is not None
    assert again.agent.run == first.agent.run
    assert again.agent.modes()[(1, 0)] == "exact_delta"


def test_a_training_that_fails_is_told_so_and_the_model_is_given_back(tmp_path: Path) -> None:
    callback = ForeshockCallback(**EVERY_STEP)
    watcher = Watcher(callback, fail_at=2)
    trainer, model = trainer_of(5, callback, watcher, enable_checkpointing=False), Model()
    with pytest.raises(RuntimeError, match="the user's own fault"):
        trainer.fit(model, data())
    assert watcher.endings() == ["failed"]
    assert "_foreshock_layer" not in vars(model.gpt.blocks[0])


def test_qk_clip_is_shown_the_optimizers_that_16_bit_weights_need(tmp_path: Path) -> None:
    callback = ForeshockCallback(
        **EVERY_STEP | {"qk_clip": "always", "qk_clip_threshold": 1e-3, "attention": "kernels"}
    )
    trainer_of(3, callback, enable_checkpointing=False).fit(Model().to(torch.bfloat16), data())
    assert callback.agent is not None
    assert "heads were scaled" in callback.agent.report()
    assert "may be copies" not in callback.agent.report()
