"""Switching a layer from native attention to the kernels and back, in all execution modes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.monitor import ranks
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.probing import counted_rows
from tests.monitor.test_switch import command
from tests.monitor.tiny_models import CausalSelfAttention, batch, tiny_gpt, train_step
from tests.monitor.torchrun import run_on_ranks
from tests.monitor.transformers_models import DECODER, tiny
from tests.monitor.watched_training import listening
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE

NATIVE: dict[str, Any] = {**EVERY_STEP, "attention": "keep", "probe_rows": 5}
SWITCH, UNDO, STEPS = 2, 4, 6
"""The steps after which the commands arrive."""

Step = Callable[[nn.Module, int], Tensor]


def eager(model: nn.Module, step: int) -> Tensor:
    return train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step).detach()


def compiled(model: nn.Module, step: int) -> Tensor:
    running: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    return train_step(running, torch.optim.SGD(model.parameters(), lr=0.1), step).detach()


def accumulated(model: nn.Module, step: int) -> Tensor:
    """Two micro-batches of one row."""
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=0.1), batch(step)
    optimizer.zero_grad()
    for part in (ids[:1], ids[1:]):
        loss = F.cross_entropy(model(part).flatten(0, 1), part.flatten()) / 2
        torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach()


def send_command(agent: Agent, **changes: Any) -> wire.Switched | None:
    """Delivers a command of the service between two steps."""
    return agent._switchboard.obey(command(**changes), step=agent.current_step, unix_seconds=0)


def train_with_switch(model: nn.Module, step_of: Step, head: tuple[int, int] = (1, 0)) -> dict[str, Any]:
    """Trains while a head of the last layer is switched and switched back; returns what the agent reported."""
    checks = []
    with listening(model, **NATIVE) as (agent, listener):
        for step in range(STEPS):
            agent.step(step_of(model, step))
            if step + 1 == SWITCH:
                checks.append(send_command(agent, heads=(head,)) is None and set(agent.modes().values()) == {"plain"})
            if step + 1 == UNDO:
                undone = send_command(agent, id="c2", heads=(head,), mode="plain")
                checks.append(undone is not None and undone.outcome == "applied")
    answers = [(s.command, s.outcome, s.step) for s in listener.of(wire.Switched)]
    modes = [s.modes.numpy().tolist() for s in listener.of(wire.Sample)]
    return {"waited": checks, "answers": answers, "rows": counted_rows(listener), "modes": modes}


def assert_switched_and_undone(results: dict[str, Any], *, sampled: int, every: int) -> None:
    """sampled, every: rows per step of a head with native attention and of a head on the kernels."""
    assert results["waited"] == [True, True]
    assert results["answers"] == [("c1", "applied", SWITCH)]
    first = len(results["rows"][0]) // 2
    native, switched_rows = [sampled] * first * 2, [sampled] * first + [every] * first
    between = UNDO - SWITCH
    assert results["rows"] == [native] * SWITCH + [switched_rows] * between + [native] * (STEPS - UNDO)
    switched = [0] * first + [1] + [0] * (first - 1)
    assert results["modes"] == [[0] * 2 * first] * SWITCH + [switched] * between + [[0] * 2 * first] * (STEPS - UNDO)


@pytest.mark.parametrize(("step_of", "sampled"), [(eager, 5), (compiled, 5), (accumulated, 10)])
def test_switch_takes_effect_in_the_next_step_and_can_be_undone(step_of: Step, sampled: int) -> None:
    assert_switched_and_undone(train_with_switch(tiny_gpt(), step_of), sampled=sampled, every=24)


GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: tiny("Llama", **DECODER),
    "Llama without a cache": lambda: tiny("Llama", **DECODER, use_cache=False),
    "GPT2": lambda: tiny("GPT2", "LMHeadModel", **GPT2),
}


def step_of_transformers_model(
    model: nn.Module, step: int, *, compile: Callable[[nn.Module], Any], **inputs: Any
) -> Tensor:
    run = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train_step(lambda ids: run(ids, **inputs).logits, optimizer, step).detach()


COMPILERS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "compiled, full graph": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compiled, inductor": torch.compile,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "compiler"),
    [
        ("Llama", "eager"),
        ("Llama", "compiled, full graph"),
        ("GPT2", "compiled, full graph"),
        ("Llama without a cache", "eager"),
        ("GPT2", "eager"),
        ("Llama", "compiled, inductor"),
    ],
)
def test_transformers_model_is_switched_and_switched_back_for_each_compiler(family: str, compiler: str) -> None:
    def step_of(model: nn.Module, step: int) -> Tensor:
        return step_of_transformers_model(model, step, compile=COMPILERS[compiler])

    assert_switched_and_undone(train_with_switch(FAMILIES[family](), step_of), sampled=5, every=24)


@pytest.mark.full
def test_switch_of_a_compiled_model_with_masks_is_refused_with_the_reason() -> None:
    model = FAMILIES["Llama without a cache"]()
    with listening(model, **NATIVE) as (agent, _):
        agent.step(step_of_transformers_model(model, 0, compile=COMPILERS["compiled, full graph"]))
        with pytest.raises(ValueError, match="it passes a mask; a switch would change nothing"):
            agent.set_mode([(0, 0)], "exact_delta", reason="a drift")


def results_of_this_rank() -> dict[str, dict[str, Any]]:
    """Trainings with a switch under FSDP2 and tensor parallelism, on one of two ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def own_rows(model: nn.Module, step: int) -> Tensor:
        ids = batch(step, rows=2 * world)[2 * rank : 2 * rank + 2]
        return train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step, ids).detach()

    return {
        "FSDP2": train_with_switch(ranks.sharded(ranks.nano()), own_rows),
        # each rank has two of the four heads
        "tensor parallel": train_with_switch(ranks.tensor_parallel(ranks.grouped(), world), eager, (1, 2 * rank)),
    }


@pytest.mark.full
def test_ranks_switch_alike_under_fsdp2_and_tensor_parallelism(tmp_path: Path) -> None:
    for rank in run_on_ranks(results_of_this_rank, 2, tmp_path, seconds=240):
        assert_switched_and_undone(rank["FSDP2"], sampled=5, every=24)
        assert_switched_and_undone(rank["tensor parallel"], sampled=5, every=24)


def replay(model: nn.Module, agent: Agent) -> None:
    """Simulates the replay of a captured step, in which no Python code of the model runs."""
    layers = [vars(module)[LAYER_ATTRIBUTE] for module in model.modules() if LAYER_ATTRIBUTE in vars(module)]
    assert layers
    agent._attached.sampling.captured = True
    agent.step(1.0)


def test_switch_waits_with_advice_while_replays_hide_the_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    with listening(model, **NATIVE) as (agent, listener):
        agent.step(eager(model, 0))
        assert send_command(agent) is None
        for _ in range(4):
            replay(model, agent)
        assert listener.of(wire.Switched) == []
        assert caplog.text.count("Run one step without the graph, then capture it again") == 1
        assert "c1" not in agent.state_dict()["switch"]["answered"]  # the service sends it again after a restart
        agent.step(eager(model, 1))
        [switched] = listener.of(wire.Switched)
        assert (switched.command, switched.outcome, switched.step) == ("c1", "applied", 5)
        assert agent.modes()[(1, 0)] == "exact_delta"
        assert "c1" in agent.state_dict()["switch"]["answered"]


def test_waiting_command_may_expire_or_be_replaced_by_a_later_one() -> None:
    model = tiny_gpt()
    with listening(model, **NATIVE) as (agent, listener):
        agent.step(eager(model, 0))
        assert send_command(agent, expires_step=3) is None
        for _ in range(3):
            replay(model, agent)
        assert send_command(agent, id="c2", mode="row_corrected") is None
        assert send_command(agent, id="c3", mode="paper_softmax") is None
        replay(model, agent)
        agent.step(eager(model, 1))
        answers = [(s.command, s.outcome) for s in listener.of(wire.Switched)]
        assert answers == [("c1", "expired"), ("c2", "refused"), ("c3", "applied")]
        assert agent.modes()[(1, 0)] == "paper_softmax"


@pytest.mark.parametrize(("switched", "undone"), [(1, 4), (8, 9)])
def test_switch_undone_before_the_next_sample_reports_no_layer_as_stopped(
    switched: int, undone: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels count every step of the switched layer; the other layer is sampled every ten steps, not in these."""
    model = tiny_gpt()
    with attach(model, **{**NATIVE, "sample_every_steps": 10}) as agent:
        for step in range(12):
            if step in (switched, undone):
                agent.set_mode([(0, 0)], "row_corrected" if step == switched else "plain", reason="tried")
            agent.step(eager(model, step))
    assert "counted nothing" not in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("step_of", [eager, compiled])
@pytest.mark.parametrize("saved_after", [SWITCH, SWITCH + 1])
def test_resumed_switched_run_is_bit_identical(saved_after: int, step_of: Step) -> None:
    def train(model: nn.Module, agent: Agent, steps: range) -> None:
        for step in steps:
            agent.step(step_of(model, step))
            if step + 1 == SWITCH:
                assert agent.set_mode([(1, 0)], "row_corrected", "a test") is None
            if step + 1 == saved_after:
                saved.update(agent=agent.state_dict(), model={n: w.clone() for n, w in model.state_dict().items()})

    saved: dict[str, Any] = {}
    uninterrupted, resumed = tiny_gpt(), tiny_gpt(seed=5)
    with attach(uninterrupted, **NATIVE) as agent:
        train(uninterrupted, agent, range(STEPS))
        assert agent.modes()[(1, 0)] == "row_corrected"
    torch._dynamo.reset()
    resumed.load_state_dict(saved["model"])
    with attach(resumed, **NATIVE) as agent:
        agent.load_state_dict(saved["agent"])
        saved_after = 0
        train(resumed, agent, range(agent.current_step, STEPS))
        assert agent.modes()[(1, 0)] == "row_corrected"
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted.parameters(), resumed.parameters(), strict=True))


@pytest.mark.full
@pytest.mark.promise("A14")
@pytest.mark.parametrize("step_of", [eager, compiled, accumulated])
@pytest.mark.parametrize("dropout", [False, True])
def test_training_is_bit_identical_by_default_in_all_execution_modes(step_of: Step, dropout: bool) -> None:
    """The decisions under test do not depend on the device, so the result also holds on a GPU."""
    results = []
    for watched in (False, True):
        torch.manual_seed(2)
        model = tiny_gpt(*((WithDropout if dropout else CausalSelfAttention)(16, 2) for _ in range(2)))
        agent = attach(model, strict=True, quiet=True) if watched else None
        torch.manual_seed(8)
        losses = []
        for step in range(STEPS):
            losses.append(step_of(model, step))
            if agent is not None:
                agent.step(losses[-1])
        if agent is not None:
            assert agent.config.policy == "observe"
            agent.close()
        torch._dynamo.reset()
        results.append([*losses, *(weight.detach().clone() for weight in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class WithDropout(CausalSelfAttention):
    """Causal attention with dropout of 0.2 in training."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2 * self.training, is_causal=True)


CHECKPOINTING: dict[str, Any] = {
    "none": None,
    "non-reentrant": lambda *call: torch.utils.checkpoint.checkpoint(*call, use_reentrant=False),
    "reentrant": lambda *call: torch.utils.checkpoint.checkpoint(*call, use_reentrant=True),
}


@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_recompute_of_a_switched_layer_draws_the_same_dropout(kind: str, attention: str) -> None:
    """Gradients equal those without checkpointing only if the recompute draws the masks of the forward again."""
    trained_weights = []
    for checkpoint in (CHECKPOINTING["none"], CHECKPOINTING[kind]):
        torch.manual_seed(1)
        model = tiny_gpt(WithDropout(16, 2), WithDropout(16, 2), checkpoint=checkpoint)
        with attach(model, **NATIVE | {"attention": attention}) as agent:
            agent.step(eager(model, 0))
            agent.set_mode(agent.modes(), "row_corrected", "a test")
            torch.manual_seed(7)
            for step in range(1, 4):
                agent.step(eager(model, step))
            assert set(agent.modes().values()) == {"row_corrected"}
        trained_weights.append([weight.detach().clone() for weight in model.parameters()])
    for a, b in zip(*trained_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_layer_that_did_not_run_is_switched_once_it_runs() -> None:
    model = tiny_gpt()
    with listening(model, **NATIVE) as (agent, listener):
        agent.step(eager(model, 0))
        assert send_command(agent, heads=None) is None
        last = model.blocks[1]
        model.blocks[1] = nn.Identity()
        agent.step(eager(model, 1))
        model.blocks[1] = last
        agent.step(eager(model, 2))
        answers = [(s.command, s.outcome, s.heads, s.step) for s in listener.of(wire.Switched)]
        assert answers == [("c1", "applied", ((0, 0), (0, 1)), 1), (None, "applied", ((1, 0), (1, 1)), 2)]
