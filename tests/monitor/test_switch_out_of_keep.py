"""A switch of a kept layer is one path in every way to run a step: applied between steps, by what ran, and undone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.monitor import ranks
from tests.monitor.executions import EVERY_STEP
from tests.monitor.probing import counted_rows
from tests.monitor.test_switch import command
from tests.monitor.tiny_models import CausalSelfAttention, batch, tiny_gpt, train_step
from tests.monitor.torchrun import trained
from tests.monitor.transformers_models import DECODER, tiny
from tests.monitor.watching import listening
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE

KEEP: dict[str, Any] = {**EVERY_STEP, "attention": "keep", "probe_rows": 5}
SWITCH, UNDO, STEPS = 2, 4, 6
"""After which steps the orders come."""

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


def order(agent: Agent, **changes: Any) -> wire.Switched | None:
    """A command of the service, as it comes between two steps."""
    return agent._switchboard.obey(command(**changes), step=agent.current_step, unix_seconds=0)


def ordered(model: nn.Module, step_of: Step, head: tuple[int, int] = (1, 0)) -> dict[str, Any]:
    """A training in which a head of the last layer is switched and switched back; what became of it."""
    waited = []
    with listening(model, **KEEP) as (agent, listener):
        for step in range(STEPS):
            agent.step(step_of(model, step))
            if step + 1 == SWITCH:
                waited.append(order(agent, heads=(head,)) is None and set(agent.modes().values()) == {"plain"})
            if step + 1 == UNDO:
                undone = order(agent, id="c2", heads=(head,), mode="plain")
                waited.append(undone is not None and undone.outcome == "applied")
    answers = [(s.command, s.outcome, s.step) for s in listener.of(wire.Switched)]
    modes = [s.modes.numpy().tolist() for s in listener.of(wire.Sample)]
    return {"waited": waited, "answers": answers, "rows": counted_rows(listener), "modes": modes}


def assert_the_switch_ran(told: dict[str, Any], *, sampled: int, every: int) -> None:
    """`sampled` and `every`: rows that a kept and a served head counts in a step."""
    assert told["waited"] == [True, True]
    assert told["answers"] == [("c1", "applied", SWITCH)]
    first = len(told["rows"][0]) // 2
    kept, served = [sampled] * first * 2, [sampled] * first + [every] * first
    between = UNDO - SWITCH
    assert told["rows"] == [kept] * SWITCH + [served] * between + [kept] * (STEPS - UNDO)
    switched = [0] * first + [1] + [0] * (first - 1)
    assert told["modes"] == [[0] * 2 * first] * SWITCH + [switched] * between + [[0] * 2 * first] * (STEPS - UNDO)


@pytest.mark.parametrize(("step_of", "sampled"), [(eager, 5), (compiled, 5), (accumulated, 10)])
def test_a_switch_takes_effect_with_the_next_step_is_answered_when_that_ran_and_is_undone(
    step_of: Step, sampled: int
) -> None:
    assert_the_switch_ran(ordered(tiny_gpt(), step_of), sampled=sampled, every=24)


GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: tiny("Llama", **DECODER),
    "Llama without a cache": lambda: tiny("Llama", **DECODER, use_cache=False),
    "GPT2": lambda: tiny("GPT2", "LMHeadModel", **GPT2),
}


def of_transformers(model: nn.Module, step: int, *, compile: Callable[[nn.Module], Any], **inputs: Any) -> Tensor:
    run = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train_step(lambda ids: run(ids, **inputs).logits, optimizer, step).detach()


COMPILERS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "compiled whole": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compiled by inductor": torch.compile,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("Llama", "eager"),
        ("Llama", "compiled whole"),
        ("GPT2", "compiled whole"),
        ("Llama without a cache", "eager"),
        ("GPT2", "eager"),
        ("Llama", "compiled by inductor"),
    ],
)
def test_a_model_of_transformers_is_switched_and_switched_back_however_it_is_compiled(family: str, way: str) -> None:
    def step_of(model: nn.Module, step: int) -> Tensor:
        return of_transformers(model, step, compile=COMPILERS[way])

    assert_the_switch_ran(ordered(FAMILIES[family](), step_of), sampled=5, every=24)


@pytest.mark.full
def test_a_switch_of_a_compiled_model_that_passes_masks_is_refused_with_the_reason() -> None:
    model = FAMILIES["Llama without a cache"]()
    with listening(model, **KEEP) as (agent, _):
        agent.step(of_transformers(model, 0, compile=COMPILERS["compiled whole"]))
        with pytest.raises(ValueError, match="it passes a mask; a switch would change nothing"):
            agent.set_mode([(0, 0)], "exact_delta", reason="a drift")


def of_a_rank() -> dict[str, dict[str, Any]]:
    """FSDP2 and tensor-parallel heads in one process of two, each ordered to switch."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def own_rows(model: nn.Module, step: int) -> Tensor:
        ids = batch(step, rows=2 * world)[2 * rank : 2 * rank + 2]
        return train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step, ids).detach()

    return {
        "FSDP2": ordered(ranks.sharded(ranks.nano()), own_rows),
        # each rank holds two of the four heads
        "tensor parallel": ordered(ranks.tensor_parallel(ranks.grouped(), world), eager, (1, 2 * rank)),
    }


@pytest.mark.full
def test_ranks_that_share_weights_or_heads_switch_alike(tmp_path: Path) -> None:
    for rank in trained(of_a_rank, 2, tmp_path, seconds=240):
        assert_the_switch_ran(rank["FSDP2"], sampled=5, every=24)
        assert_the_switch_ran(rank["tensor parallel"], sampled=5, every=24)


def replayed(model: nn.Module, agent: Agent) -> None:
    """Stands in for the replay of a captured step: no Python of the model runs, and nothing in it can change."""
    layers = [vars(module)[LAYER_ATTRIBUTE] for module in model.modules() if LAYER_ATTRIBUTE in vars(module)]
    assert layers
    agent._attached.sampling.captured = True
    agent.step(1.0)


def test_what_a_captured_step_hides_waits_with_a_word_of_what_to_do_and_takes_effect_when_captured_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    with listening(model, **KEEP) as (agent, listener):
        agent.step(eager(model, 0))
        assert order(agent) is None
        for _ in range(4):
            replayed(model, agent)
        assert listener.of(wire.Switched) == []
        assert caplog.text.count("Run one step without the graph, then capture it again") == 1
        assert "c1" not in agent.state_dict()["switch"]["answered"]  # the service orders it again after a restart
        agent.step(eager(model, 1))
        [switched] = listener.of(wire.Switched)
        assert (switched.command, switched.outcome, switched.step) == ("c1", "applied", 5)
        assert agent.modes()[(1, 0)] == "exact_delta"
        assert "c1" in agent.state_dict()["switch"]["answered"]


def test_an_order_that_waits_expires_and_gives_way_to_a_later_one() -> None:
    model = tiny_gpt()
    with listening(model, **KEEP) as (agent, listener):
        agent.step(eager(model, 0))
        assert order(agent, expires_step=3) is None
        for _ in range(3):
            replayed(model, agent)
        assert order(agent, id="c2", mode="row_corrected") is None
        assert order(agent, id="c3", mode="paper_softmax") is None
        replayed(model, agent)
        agent.step(eager(model, 1))
        told = [(s.command, s.outcome) for s in listener.of(wire.Switched)]
        assert told == [("c1", "expired"), ("c2", "refused"), ("c3", "applied")]
        assert agent.modes()[(1, 0)] == "paper_softmax"


@pytest.mark.parametrize(("switched", "undone"), [(1, 4), (8, 9)])
def test_a_switch_taken_back_before_the_next_sample_makes_no_peer_look_as_if_it_had_stopped(
    switched: int, undone: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Our kernels count every step of the switched layer; its peer is measured in one of ten, and in none of these."""
    model = tiny_gpt()
    with attach(model, **{**KEEP, "sample_every_steps": 10}) as agent:
        for step in range(12):
            if step in (switched, undone):
                agent.set_mode([(0, 0)], "row_corrected" if step == switched else "plain", reason="tried")
            agent.step(eager(model, step))
    assert "counted nothing" not in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("step_of", [eager, compiled])
@pytest.mark.parametrize("saved_after", [SWITCH, SWITCH + 1])
def test_a_switched_run_that_resumes_goes_on_to_the_last_bit(saved_after: int, step_of: Step) -> None:
    def train(model: nn.Module, agent: Agent, steps: range) -> None:
        for step in steps:
            agent.step(step_of(model, step))
            if step + 1 == SWITCH:
                assert agent.set_mode([(1, 0)], "row_corrected", "a test") is None
            if step + 1 == saved_after:
                saved.update(agent=agent.state_dict(), model={n: w.clone() for n, w in model.state_dict().items()})

    saved: dict[str, Any] = {}
    whole, again = tiny_gpt(), tiny_gpt(seed=5)
    with attach(whole, **KEEP) as agent:
        train(whole, agent, range(STEPS))
        assert agent.modes()[(1, 0)] == "row_corrected"
    torch._dynamo.reset()
    again.load_state_dict(saved["model"])
    with attach(again, **KEEP) as agent:
        agent.load_state_dict(saved["agent"])
        saved_after = 0
        train(again, agent, range(agent.current_step, STEPS))
        assert agent.modes()[(1, 0)] == "row_corrected"
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.full
@pytest.mark.promise("A14")
@pytest.mark.parametrize("step_of", [eager, compiled, accumulated])
@pytest.mark.parametrize("drops", [False, True])
def test_by_default_a_training_is_the_same_to_the_last_bit_in_every_way_to_run_it(step_of: Step, drops: bool) -> None:
    """Nothing that is decided here looks at the device: so it is on a GPU."""
    results = []
    for watched in (False, True):
        torch.manual_seed(2)
        model = tiny_gpt(*((Dropping if drops else CausalSelfAttention)(16, 2) for _ in range(2)))
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


class Dropping(CausalSelfAttention):
    """Drops a fifth of its weights while it trains, as GPT-2 of transformers drops a tenth."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2 * self.training, is_causal=True)


CHECKPOINTING: dict[str, Any] = {
    "none": None,
    "non-reentrant": lambda *call: torch.utils.checkpoint.checkpoint(*call, use_reentrant=False),
    "reentrant": lambda *call: torch.utils.checkpoint.checkpoint(*call, use_reentrant=True),
}


@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_a_switched_layer_draws_its_own_dropout_and_a_recompute_draws_it_again(kind: str, attention: str) -> None:
    """Gradients with checkpointing are those without it only where the recomputed masks are those of the forward."""
    trained_weights = []
    for checkpoint in (CHECKPOINTING["none"], CHECKPOINTING[kind]):
        torch.manual_seed(1)
        model = tiny_gpt(Dropping(16, 2), Dropping(16, 2), checkpoint=checkpoint)
        with attach(model, **KEEP | {"attention": attention}) as agent:
            agent.step(eager(model, 0))
            agent.set_mode(agent.modes(), "row_corrected", "a test")
            torch.manual_seed(7)
            for step in range(1, 4):
                agent.step(eager(model, step))
            assert set(agent.modes().values()) == {"row_corrected"}
        trained_weights.append([weight.detach().clone() for weight in model.parameters()])
    for a, b in zip(*trained_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_layer_that_did_not_run_waits_while_its_peer_is_switched() -> None:
    model = tiny_gpt()
    with listening(model, **KEEP) as (agent, listener):
        agent.step(eager(model, 0))
        assert order(agent, heads=None) is None
        last = model.blocks[1]
        model.blocks[1] = nn.Identity()
        agent.step(eager(model, 1))
        model.blocks[1] = last
        agent.step(eager(model, 2))
        told = [(s.command, s.outcome, s.heads, s.step) for s in listener.of(wire.Switched)]
        assert told == [("c1", "applied", ((0, 0), (0, 1)), 1), (None, "applied", ((1, 0), (1, 1)), 2)]
