"""torchtitan's hook, on a Trainer of its shape."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.monitor import titan_shape as titan
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent
from foreshock.monitor.callbacks.torchtitan import watch


def train(
    trainer: Any, *, after: Callable[[Agent], None] | None = None, **overrides: Any
) -> tuple[Agent, Listener, list[Tensor]]:
    agent, listener = watch(trainer, **{**EVERY_STEP, **overrides}), Listener()
    agent.subscribe(listener)
    losses: list[Tensor] = []
    inner = trainer.forward_backward_step

    def keep(**inputs: Any) -> Tensor:
        losses.append(inner(**inputs).detach())
        return losses[-1]

    trainer.forward_backward_step = keep
    if after is not None:
        trainer.optimizers.register_step_post_hook(lambda *_: after(agent))
    trainer.train()
    trainer.close()
    return agent, listener, losses


def intervals(listener: Listener) -> list[tuple[int, int]]:
    return [(s.since_step, s.step) for s in listener.of(wire.Sample)]


def test_each_step_of_the_optimizers_is_one_with_its_loss_norm_and_rate(tmp_path: Path) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    agent, listener, losses = train(titan.Trainer(3, tmp_path, accumulation=2))
    samples = listener.of(wire.Sample)
    assert intervals(listener) == [(0, 1), (1, 2), (2, 3)]
    sums = [float(losses[n] + losses[n + 1]) for n in (0, 2, 4)]
    assert [s.loss for s in samples] == pytest.approx(sums, rel=1e-6)
    assert [s.learning_rate for s in samples] == [1e-3] * 3
    assert all(s.grad_norm > 0 for s in samples)
    assert [slot_values(s.words(), Slot.ROWS).tolist() for s in samples] == [[2 * 4 * 64] * 8] * 3
    assert samples[0].query_norm is not None  # W_Q was found in qkv_linear
    assert [ended.status for ended in listener.of(wire.Finished)] == ["completed"]
    assert agent.faults == {}
    assert torch.nn.utils.clip_grad_norm_ is clip


def test_a_resumed_training_repeats_no_step_loses_none_and_keeps_its_modes(tmp_path: Path) -> None:
    def switch(agent: Agent) -> None:
        if agent.current_step == 2:
            agent.set_mode([(1, 0)], "exact_delta", "a test")

    straight, _, expected = train(titan.Trainer(9, tmp_path / "straight", interval=4), after=switch)
    first, before, _ = train(titan.Trainer(4, tmp_path / "run", interval=4), after=switch)
    again, after, losses = train(titan.Trainer(9, tmp_path / "run", interval=4))
    assert [step for a, b in intervals(before) + intervals(after) for step in range(a + 1, b + 1)] == [*range(1, 10)]
    assert again.run == first.run
    assert again.modes()[(1, 0)] == "exact_delta"
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected[4:]]
    assert straight.modes() == again.modes()
    assert (tmp_path / "run" / "step-4" / "foreshock_0.json").is_file()


def test_a_training_that_began_without_foreshock_goes_on_with_its_own_step_numbers(tmp_path: Path) -> None:
    titan.Trainer(4, tmp_path, interval=4).train()
    _, listener, _ = train(titan.Trainer(6, tmp_path, interval=4))
    assert intervals(listener) == [(4, 5), (5, 6)]


def test_a_disk_that_takes_no_state_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("foreshock.monitor.callbacks.shared.os.replace", full)
    agent, listener, _ = train(titan.Trainer(4, tmp_path, interval=2))
    assert intervals(listener)[-1] == (3, 4)
    assert agent.faults == {}
    assert not list(tmp_path.rglob("foreshock_0.json"))
    assert "state was not saved; training continues: no space left on device" in caplog.text


def test_a_stage_of_a_pipeline_keeps_torchtitans_layer_numbers(tmp_path: Path) -> None:
    trainer = titan.Trainer(1, tmp_path)
    stages: list[nn.Module] = [
        nn.ModuleDict({"layers": nn.ModuleDict({n: titan.TransformerBlock(64)})}) for n in ("2", "6")
    ]
    trainer.model_parts = stages  # as an interleaved schedule gives one rank
    agent = watch(trainer, **EVERY_STEP)
    assert sorted({layer for layer, _ in agent.modes()}) == [2, 6]
    agent.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # PyTorch's own
@pytest.mark.execution("plain attention", "torch.compile")
def test_blocks_that_torchtitan_compiled_before_are_watched(tmp_path: Path) -> None:
    trainer = titan.Trainer(2, tmp_path)
    for block in trainer.model_parts[0].get_submodule("layers").children():
        block.compile(backend="aot_eager", fullgraph=True)
    _, listener, _ = train(trainer)
    torch._dynamo.reset()
    assert [slot_values(s.words(), Slot.ROWS).tolist() for s in listener.of(wire.Sample)] == [[4 * 64] * 8] * 2


def test_a_trainer_of_another_make_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"SimpleNamespace has no model_parts, .*: it is no Trainer of torchtitan"):
        watch(SimpleNamespace())


def test_qk_clip_is_shown_the_optimizers_that_16_bit_weights_need(tmp_path: Path) -> None:
    trainer = titan.Trainer(3, tmp_path)
    for part in trainer.model_parts:
        part.to(torch.bfloat16)
    agent, _, _ = train(trainer, qk_clip="always", qk_clip_threshold=1e-3, attention="kernels")
    assert "heads were scaled" in agent.report()
    assert "may be copies" not in agent.report()
