"""Policies, switches and commands: what changes a head's mode and when, refusals, and one answer per command."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener, ScriptedDetectors, verdict
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, tiny_gpt
from tests.monitor.watched_training import listening, train
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.modes import DEFAULT_MITIGATION, Mode, parse_mode
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import reference
from foreshock.kernels.flash_attention.known_modes import Known, known_modes
from foreshock.monitor import Agent, AgentConfig, attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE
from foreshock.monitor.console import ConsoleReporter
from foreshock.monitor.switching import AT_ONCE, MAX_ANSWERED, MAX_WAITING, Switchboard

SETTINGS: dict[str, Any] = {"sample_every_steps": 1, "strict": True, "quiet": True}
HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


HEAD_SCOPE: dict[str, Any] = {"switch_scope": "head", "mitigation": "exact_delta"}


def new_switchboard() -> tuple[Switchboard, torch.Tensor]:
    modes = torch.zeros(4, dtype=torch.int32)
    ids = iter(range(10**6))
    return Switchboard(HEADS, modes, lambda: f"id-{next(ids)}"), modes


def command(**changes: Any) -> wire.Command:
    fields: dict[str, Any] = {"id": "c1", "heads": ((1, 0),), "mode": "exact_delta", "reason": "a person asked"}
    return wire.Command(issued_by="ada", **{**fields, **changes})


def orders(numbers: range) -> list[wire.Command]:
    return [command(id=f"c{number}", heads=None) for number in numbers]


def run(
    model: TinyGPT,
    script: dict[int, list[wire.Verdict]],
    steps: int,
    saved: dict[str, Any] | None = None,
    standing: Sequence[wire.Verdict] = (),
    **settings: Any,
) -> tuple[Agent, Listener]:
    """Trains under an agent with scripted detectors, after loading the saved state if given."""
    agent = attach(model, **{**SETTINGS, **settings})
    listener = Listener()
    agent.subscribe(listener)
    detectors = agent.detectors = ScriptedDetectors(4, script)
    detectors.standing = [*standing]
    if saved is not None:
        agent.load_state_dict(saved)
    train(agent, model, steps)
    return agent, listener


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_manual_switches_are_logged_with_person_reason_and_step(
    attention: str, quiet: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_gpt()
    agent = attach(model, **{**SETTINGS, "attention": attention, "quiet": quiet})
    waiting: list[wire.Command] = []
    monkeypatch.setattr(agent._outbox, "commands", lambda: [waiting.pop()] if waiting else [])
    commands_by_step = {
        2: command(), 4: command(id="c2", mode="plain", reason="bad data"),
        6: command(id="c3", mode="exact_delta", expires_step=1), 7: command(id="c4", dry_run=True),
    }  # fmt: skip
    for step in range(1, 10):
        waiting += [commands_by_step[step]] if step in commands_by_step else []
        train(agent, model, [step])
    agent.set_mode([(0, 0), (0, 1)], "plain", "after a look at the loss")
    agent.close()
    messages = [
        record.message for record in caplog.records if record.name == "foreshock" and "switch" in record.message
    ]
    assert [line.partition(": ")[2].partition(": ")[2] for line in messages] == [
        "1 head switched to exact_delta: ada: a person asked",
        "1 head switched to plain: ada: bad data",
        "the order to switch 1 head was expired: expired at step 1; this run is at step 6",
        "2 heads switched to plain: after a look at the loss",
    ]
    assert [line.partition(": ")[2].partition(": ")[0] for line in messages] == ["step 2", "step 4", "step 6", "step 9"]


def test_log_counts_each_proposed_head_once() -> None:
    console = ConsoleReporter(AgentConfig(url=None, policy="approve"), [])
    proposed: dict[str, Any] = {"id": "s", "step": 9, "verdict": "v", "before": ("plain",), "reason": "r"}
    proposed["after"] = ("row_corrected",)
    many = [wire.Switched(outcome="proposed", heads=((0, head),), **proposed) for head in (0, 1, 2, 0, 1, 2) * 3]
    [line] = [line for event in many for line in console.switched([event])]
    assert line == "foreshock: step 9: 1 head is proposed to be switched to row_corrected."
    refused = wire.Switched(outcome="refused", heads=((0, 5),), **proposed)
    assert console.switched([refused]) == []
    tenth = [wire.Switched(outcome="proposed", heads=((1, head),), **proposed) for head in range(7)]
    assert console.switched(tenth)[0].startswith("foreshock: step 9: 10 heads are proposed")


def test_auto_switches_the_warned_head_after_the_next_step() -> None:
    model = tiny_gpt()
    agent, listener = run(model, {2: [verdict(1, 0)]}, 4, policy="auto", **HEAD_SCOPE)
    (switched,) = listener.of(wire.Switched)
    assert (switched.step, switched.outcome, switched.heads) == (3, "applied", ((1, 0),))
    assert agent.modes() == {(0, 0): "plain", (0, 1): "plain", (1, 0): "exact_delta", (1, 1): "plain"}
    layer = model.blocks[1].__dict__[LAYER_ATTRIBUTE]
    assert layer.modes.tolist() == [Mode.EXACT_DELTA, Mode.PLAIN]
    agent.close()
    modes = [s.modes.numpy().tolist() for s in listener.of(wire.Sample) if s.modes is not None]
    assert modes == [[0] * 4, [0] * 4, [0] * 4, [0, 0, 1, 0]]


def test_policy_switches_a_head_that_was_switched_back_only_after_a_new_warning() -> None:
    first, _ = run(tiny_gpt(), {}, 1)
    saved = first.state_dict()
    first.close()
    saved["switch"]["held"] = [[1, 0]]
    script = {3: [verdict(1, 0, state="updated"), verdict(0, 1, state="updated")], 5: [verdict(1, 0)]}
    agent, listener = run(tiny_gpt(), script, 6, saved, policy="auto", switch_scope="head")
    agent.close()
    switched = listener.of(wire.Switched)
    assert [each.heads for each in switched] == [((0, 1),), ((1, 0),)]
    assert switched[1].step > switched[0].step


def test_every_step_is_sampled_while_a_drift_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "close_watch_steps", 3)
    model = tiny_gpt()
    agent, listener = run(model, {}, 0, sample_every_steps=4)
    agent.detectors.undecided_until = 6  # type: ignore[attr-defined]
    train(agent, model, 16)
    agent.close()
    samples = listener.of(wire.Sample)
    assert [s.step for s in samples] == [1, *range(3, 11), 12, 16]
    assert all(slot_values(s.words(), Slot.ROWS).min() > 0 for s in samples), "each sample contains rows"


def test_auto_switches_all_heads_once_by_default() -> None:
    warned = {2: [verdict(1, 0), verdict(0, 1)], 3: [verdict(0, 0)]}
    agent, listener = run(tiny_gpt(), warned, 5, policy="auto", attention="kernels")
    agent.close()
    (switched,) = listener.of(wire.Switched)
    assert switched.heads == tuple(HEADS)
    assert set(agent.modes().values()) == {DEFAULT_MITIGATION}


def test_command_is_applied_once_if_delivered_twice() -> None:
    switchboard, modes = new_switchboard()
    first = switchboard.obey(command(), step=5, unix_seconds=0)
    assert first is not None
    assert (first.outcome, first.command, first.reason) == ("applied", "c1", "ada: a person asked")
    switchboard.switch([(1, 0)], "plain", step=6, reason="undone")
    assert switchboard.obey(command(), step=7, unix_seconds=0) is None
    assert modes.tolist() == [0, 0, 0, 0]


def test_head_switched_back_by_command_is_held_until_the_next_command() -> None:
    switchboard, _ = new_switchboard()
    switchboard.switch([(1, 0), (1, 1)], "exact_delta", step=4, reason="policy auto")
    assert switchboard.held == set()
    switchboard.obey(command(id="try", mode="plain", dry_run=True), step=5, unix_seconds=0)
    assert switchboard.held == set()
    switchboard.obey(command(id="undo", mode="plain"), step=5, unix_seconds=0)
    assert switchboard.held == {(1, 0)}
    saved = json.loads(json.dumps(switchboard.state_dict()))
    resumed, _ = new_switchboard()
    resumed.load_state_dict(saved)
    assert resumed.held == {(1, 0)}
    resumed.load_state_dict({"modes": [], "answered": []})  # a state without held heads, from an earlier version
    switchboard.obey(command(id="again"), step=6, unix_seconds=0)
    switchboard.obey(command(id="more", mode="exact_delta+paper_softmax"), step=7, unix_seconds=0)
    assert switchboard.held == set(), "the head was switched again"


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"expires_step": 5}, "expired", "expired at step 5; this run is at step 5"),
        ({"expires_unix_seconds": 99.0}, "expired", "expired by the clock"),
        ({"heads": ((7, 0),)}, "refused", "none of the named heads"),
        ({"mode": "faster_rows"}, "refused", "mode 'faster_rows' does not exist"),
        ({"mode": "centred_keys"}, "refused", "mode 'centred_keys' does not exist"),
        ({"expect": "faster_rows"}, "refused", "mode 'faster_rows' does not exist"),
        ({"action": "rewind"}, "refused", "does not carry out 'rewind' orders"),
        ({"expect": "exact_delta"}, "refused", "expected exact_delta, but layer 1 head 0 has plain"),
        ({"dry_run": True}, "dry_run", "dry run: a person asked"),
    ],
)
def test_invalid_expired_or_dry_run_command_is_answered_and_changes_nothing(
    changes: dict[str, Any], outcome: str, reason: str
) -> None:
    switchboard, modes = new_switchboard()
    answer = switchboard.obey(command(**changes), step=5, unix_seconds=100.0)
    assert answer is not None
    assert answer.outcome == outcome
    assert reason in answer.reason
    assert modes.tolist() == [0, 0, 0, 0]


def test_registered_action_runs_once_per_command_and_changes_no_mode() -> None:
    switchboard, modes = new_switchboard()
    saved: list[int] = []

    def save(order: wire.Command, step: int) -> None:
        if order.reason == "disk full":
            raise ValueError("no room for a checkpoint")
        saved.append(step)

    switchboard.actions["save"] = save
    wanted: dict[str, Any] = {"action": "save", "mode": "save", "heads": None}
    outcomes = []
    for changes in (
        {},
        {"id": "try", "dry_run": True},
        {"id": "late", "expires_step": 5},
        {"reason": "disk full", "id": "c3"},
    ):
        for _ in range(2):
            answer = switchboard.obey(command(**wanted, **changes), step=5, unix_seconds=0)
            outcomes += [] if answer is None else [(answer.outcome, answer.heads, answer.reason)]
    assert outcomes == [
        ("applied", (), "ada: a person asked"),
        ("dry_run", (), "dry run: a person asked"),
        ("expired", (), "expired at step 5; this run is at step 5"),
        ("refused", (), "no room for a checkpoint"),
    ]
    assert (saved, modes.tolist()) == ([5], [0] * 4)


def test_command_with_heads_of_other_ranks_applies_to_local_heads() -> None:
    switchboard, modes = new_switchboard()
    answer = switchboard.obey(command(heads=((1, 0), (1, 9))), step=5, unix_seconds=0)
    assert answer is not None
    assert answer.heads == ((1, 0),)
    assert modes.tolist() == [0, 0, 1, 0]


def test_command_waits_until_its_heads_run_on_kernels_and_is_answered_once() -> None:
    switchboard, _ = new_switchboard()
    rows_on_kernels = {2}
    switchboard.runs_on_kernels = lambda row: row in rows_on_kernels
    assert switchboard.obey(command(heads=((0, 1), (1, 0), (1, 1))), step=1, unix_seconds=0) is None
    switchboard.why_refused = lambda row, mode: "it passes a mask" if row == 1 else None
    [first] = switchboard.settle(1, 2, 0)
    assert (first.command, first.heads, "it passes a mask" in first.reason) == ("c1", ((1, 0),), True)
    rows_on_kernels.add(3)
    assert [(each.command, each.heads) for each in switchboard.settle(2, 3, 0)] == [(None, ((1, 1),))]


def test_waiting_command_keeps_heads_that_later_commands_do_not_name() -> None:
    switchboard, modes = new_switchboard()
    on_kernels = False
    switchboard.runs_on_kernels = lambda row: on_kernels
    assert switchboard.obey(command(heads=((1, 0), (1, 1))), step=1, unix_seconds=0) is None
    assert switchboard.obey(command(id="c2", mode="row_corrected"), step=1, unix_seconds=0) is None
    on_kernels = True
    answers = {each.command: (each.outcome, each.heads) for each in switchboard.settle(1, 2, 0)}
    assert answers == {"c1": ("applied", ((1, 1),)), "c2": ("applied", ((1, 0),))}
    assert modes.tolist() == [0, 0, int(Mode.ROW_CORRECTED), int(Mode.EXACT_DELTA)]


def test_head_switched_before_load_state_dict_keeps_its_mode() -> None:
    switchboard, modes = new_switchboard()
    switchboard.switch([(1, 0)], "row_corrected", step=0, reason="a person")
    switchboard.load_state_dict({"modes": [[1, 0, "exact_delta"], [0, 0, "exact_delta"]], "answered": []})
    assert modes.tolist() == [int(Mode.EXACT_DELTA), 0, int(Mode.ROW_CORRECTED), 0]


def test_number_of_remembered_commands_is_bounded() -> None:
    switchboard, _ = new_switchboard()
    for number in range(MAX_ANSWERED + 10):
        switchboard.obey(command(id=f"c{number}"), step=1, unix_seconds=0)
    assert len(switchboard.state_dict()["answered"]) == MAX_ANSWERED
    assert f"c{MAX_ANSWERED + 9}" in switchboard.state_dict()["answered"]
    assert "c0" not in switchboard.state_dict()["answered"]


@pytest.mark.parametrize(
    ("heads", "mode", "sentence"),
    [
        ([(1, 0)], "fast", "mode 'fast' does not exist; allowed are plain"),
        ([(1, 0)], "row_corrected+centred_keys", "does not exist; allowed are plain, exact_delta"),
        ([(5, 5)], "plain", r"\(layer, head\) \[\(5, 5\)\] is not monitored here"),
        ([], "row_corrected", r"no heads were given; give \(layer, head\) pairs"),
    ],
)
def test_unknown_mode_or_head_is_rejected_with_a_clear_message(
    heads: Any, mode: str, sentence: str, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=sentence):
        agent.set_mode(heads, mode, "a test")
    if "exist" in sentence:
        with pytest.raises(ValueError, match=sentence):
            agent._switchboard.load_state_dict({"modes": [[0, 0, mode]], "answered": []})
    assert set(agent.modes().values()) == {"plain"}
    assert "0 heads" not in caplog.text


@pytest.mark.parametrize("attention", ["kernels", "keep"])
def test_resumed_run_restores_modes_and_detector_state(attention: Any) -> None:
    agent, _ = run(tiny_gpt(), {}, 5, sample_every_steps=3, attention=attention)
    agent.set_mode([(0, 1)], "exact_delta+paper_softmax", "a person")
    saved = json.loads(json.dumps(agent.state_dict()))
    agent.close()
    model = tiny_gpt()
    resumed = attach(model, **SETTINGS, attention=attention)
    listener = Listener()
    resumed.subscribe(listener)
    detectors = resumed.detectors = ScriptedDetectors(4)
    resumed.load_state_dict(saved)
    both = "exact_delta+paper_softmax"
    assert resumed.modes()[(0, 1)] == (both if attention == "kernels" else "plain")  # applied once a step has run
    assert model.blocks[0].__dict__[LAYER_ATTRIBUTE].modes.tolist() == [0, int(parse_mode(both))]
    assert detectors.loaded == {"seen": 3}  # the samples at steps 1 and 4, and one for the checkpoint at step 5
    train(resumed, model, [5])
    assert resumed.modes()[(0, 1)] == both
    assert [s.modes.numpy().tolist() for s in listener.of(wire.Sample) if s.modes is not None][:1] != [[0] * 4]
    resumed.close()
    assert resumed.run == agent.run
    assert [(s.since_step, s.step) for s in listener.of(wire.Sample)] == [(5, 6)]
    with pytest.raises(ValueError, match="call it before the first step"):
        resumed.load_state_dict(saved)


EMPTY_SWITCH: dict[str, Any] = {"modes": [], "answered": []}


@pytest.mark.parametrize(
    ("policy", "switch", "outcomes", "mode"),
    [
        ("observe", EMPTY_SWITCH, [], "plain"),
        ("approve", EMPTY_SWITCH, ["proposed"], "plain"),
        ("auto", EMPTY_SWITCH, ["applied"], "exact_delta"),
        ("auto", EMPTY_SWITCH | {"modes": [[1, 0, "exact_delta"]]}, [], "exact_delta"),  # already switched
        ("auto", EMPTY_SWITCH | {"held": [[1, 0]]}, [], "plain"),  # held by a person
    ],
)
def test_resumed_run_acts_on_active_warnings_except_for_heads_switched_or_switched_back(
    policy: str, switch: dict[str, Any], outcomes: list[str], mode: str
) -> None:
    first, _ = run(tiny_gpt(), {2: [verdict(1, 0)]}, 3, policy="observe")
    saved = json.loads(json.dumps(first.state_dict() | {"switch": switch}))
    first.close()
    agent, listener = run(tiny_gpt(), {}, 2, saved, [verdict(1, 0)], policy=policy, **HEAD_SCOPE)
    agent.close()
    assert agent.modes() == dict.fromkeys(HEADS, "plain") | {(1, 0): mode}
    by_policy = [each for each in listener.of(wire.Switched) if each.verdict is not None]
    assert [(each.outcome, each.heads, each.verdict) for each in by_policy] == [
        (outcome, ((1, 0),), "verdict-1-0") for outcome in outcomes
    ]
    assert isinstance(listener.events[0], wire.Started)


@pytest.fixture
def agent() -> Iterator[Agent]:
    with attach(tiny_gpt(), attention="kernels", **SETTINGS) as attached:
        yield attached


def switches_per_step(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, *answers: list[wire.Command]
) -> list[list[wire.Switched]]:
    """The switches of each step. The service sends one item of `answers` per step, until all are carried out."""
    listener = Listener()
    agent.subscribe(listener)
    steps: list[list[wire.Switched]] = []
    waiting = list(answers)
    while waiting or len(steps) < len(answers) or steps[-1]:
        arrived = waiting.pop(0) if waiting else []
        monkeypatch.setattr(agent._outbox, "commands", lambda arrived=arrived: arrived)
        listener.events.clear()
        agent.step(1.0)
        steps.append(listener.of(wire.Switched))
    return steps


def test_commands_are_carried_out_in_order_with_a_limit_per_step(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = orders(range(256))
    steps = switches_per_step(
        agent, monkeypatch, commands, commands, commands
    )  # the service resends commands until they are answered
    assert max(map(len, steps)) == AT_ONCE
    assert [done.command for step in steps for done in step] == [command.id for command in commands]
    assert len(steps) == 256 // AT_ONCE + 1


def test_command_that_expires_while_waiting_is_not_carried_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    late = [command(id="a", expires_step=1), command(id="b", expires_unix_seconds=time.time() - 1), command(id="c")]
    steps = switches_per_step(agent, monkeypatch, orders(range(AT_ONCE)) + late)
    assert [done.outcome for done in steps[1]] == ["expired", "expired", "applied"]


def test_command_queue_is_bounded_and_keeps_the_oldest() -> None:
    switchboard, _ = new_switchboard()
    switchboard.obey(command(id="c3"), step=1, unix_seconds=0)
    first = switchboard.due(orders(range(2 * MAX_WAITING)))
    assert [command.id for command in first] == ["c0", "c1", "c2", "c4"]
    rest = [command.id for _ in range(MAX_WAITING) for command in switchboard.due([])]
    assert (len(rest), rest[-1]) == (MAX_WAITING - AT_ONCE, f"c{MAX_WAITING}")


class PassesMask(CausalSelfAttention):
    """Causal attention that passes an ALiBi-like mask while `uses_mask` is true."""

    uses_mask = True

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.uses_mask:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        length = query.shape[2]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = (-0.1 * distance).masked_fill(distance < 0, float("-inf")).to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def half_masked() -> TinyGPT:
    return tiny_gpt(PassesMask(16, 2), CausalSelfAttention(16, 2))


def attach_and_step(model: TinyGPT, **settings: Any) -> Agent:
    agent = attach(model, **{**EVERY_STEP, **settings})
    train(agent, model, 1)
    return agent


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_layer_with_a_mask_in_every_call_cannot_be_switched(attention: str) -> None:
    with attach_and_step(half_masked(), attention=attention) as agent:
        with pytest.raises(ValueError, match=r"layer 0 head 1: .*it passes a mask.*a switch would change nothing"):
            agent.set_mode([(0, 1)], "row_corrected", "a test")
        agent.set_mode([(0, 1)], "plain", "plain needs no kernels")
        done = agent.set_mode([(1, 0)], "row_corrected", "a test")
        assert (done is None) == (attention == "keep")  # waits until the kernels compute the layer
        row_corrected = "row_corrected" if attention == "kernels" else "plain"
        assert agent.modes() == {(0, 0): "plain", (0, 1): "plain", (1, 0): row_corrected, (1, 1): "plain"}
        answer = agent._switchboard.obey(command(heads=((0, 0),), mode="exact_delta"), step=2, unix_seconds=0)
        assert answer is not None
        assert (answer.outcome, "it passes a mask" in answer.reason) == ("refused", True)


def test_command_for_all_heads_leaves_out_heads_that_it_cannot_change() -> None:
    with attach_and_step(half_masked()) as agent:
        done = agent.set_mode(agent.modes(), "row_corrected", "a test")
        assert done is not None
        assert done.heads == ((1, 0), (1, 1))
        assert done.reason.startswith("a test (2 heads are left out: layer 0 head 0: its own attention stays")
        answer = agent._switchboard.obey(command(heads=None, mode="plain"), step=2, unix_seconds=0)
        assert answer is not None
        assert (answer.outcome, len(answer.heads)) == ("applied", 4)
        answer = agent._switchboard.obey(command(id="c2", heads=None, mode="exact_delta"), step=3, unix_seconds=0)
        assert answer is not None
        assert (answer.outcome, answer.heads) == ("applied", ((1, 0), (1, 1)))
    with attach_and_step(tiny_gpt(PassesMask(16, 2))) as agent, pytest.raises(ValueError, match=r"change nothing"):
        agent.set_mode(agent.modes(), "row_corrected", "all heads are left out")


def test_layer_with_a_mask_in_some_training_calls_can_be_switched() -> None:
    model = half_masked()
    first: Any = model.blocks[0]
    with attach(model, **EVERY_STEP) as agent:
        first.uses_mask = False
        with torch.no_grad():
            model(torch.arange(12)[None])
        first.uses_mask = True
        train(agent, model, 1)
        with pytest.raises(ValueError, match=r"a switch would change nothing"):
            agent.set_mode([(0, 1)], "row_corrected", "only an evaluation had no mask")
        for first.uses_mask in (False, True):
            train(agent, model, 1)
        agent.set_mode([(0, 1)], "row_corrected", "some calls have no mask")


def test_policy_switches_supported_heads_and_refuses_others_with_the_reason() -> None:
    agent, listener = run(half_masked(), {2: [verdict(1, 0)]}, 4, policy="auto", mitigation="row_corrected")
    agent.close()
    by_outcome = {switched.outcome: switched for switched in listener.of(wire.Switched)}
    assert by_outcome["applied"].heads == ((1, 0), (1, 1))
    assert by_outcome["refused"].heads == ((0, 0), (0, 1))
    assert "its own attention stays in every call" in by_outcome["refused"].reason
    assert not agent.faults
    assert "mitigation row_corrected will be refused in 1 of 2 layers: its own attention stays" in agent.report()


class UntakenBranch(CausalSelfAttention):
    """Like x-transformers by default: PyTorch's attention is in a branch that the configuration does not take."""

    flash = False

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.flash:
            return F.scaled_dot_product_attention(query, key, value)
        out: Tensor = (query @ key.mT).softmax(-1) @ value
        return out


@pytest.mark.promise("A24")
@pytest.mark.parametrize(
    "heads", [{}, {"blocks.0": 2}], ids=["heads found in the first step", "heads given by the user"]
)
@pytest.mark.parametrize("others", [[CausalSelfAttention(16, 2)], []])
def test_switch_of_an_unwatched_layer_is_refused_within_one_sample_and_not_saved(
    others: list[nn.Module], heads: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt(UntakenBranch(16, 2), *others)
    with listening(model, attention="keep", strict=False, heads=heads) as (agent, listener):
        requested = [head for head in agent.modes() if head[0] == 0]
        agent.set_mode(requested, "row_corrected", "before the first step")
        train(agent, model, 4)
        assert not agent._switchboard._orders
        assert {tuple(head) for *head, _ in agent.state_dict()["switch"]["modes"]}.isdisjoint(requested)
        if heads:
            with pytest.raises(ValueError, match="none of its calls is met"):
                agent.set_mode(requested, "row_corrected", "after")
    assert heads or "the switch of heads of blocks.0 is refused" in caplog.text
    assert [(switched.outcome, switched.heads) for switched in listener.of(wire.Switched)] == (
        [("refused", tuple(requested))] if heads else []
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_each_kernel_call_gets_the_modes_of_its_layer(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Known]] = []
    for name in ("attention_forward", "attention_backward"):
        real = getattr(reference, name)

        def recorded_call(*given: Any, real: Any = real, name: str = name) -> Any:
            seen.append((name, known_modes(given[3].modes)))
            return real(*given)

        monkeypatch.setattr(reference, name, recorded_call)
    model = tiny_gpt(CausalSelfAttention(16, 2), CausalSelfAttention(16, 2))
    running: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    plain, some_heads, all_heads = (
        Known(*flags) for flags in ((False, False, False), (False, True, False), (True, True, False))
    )
    with attach(model, **{**EVERY_STEP, "attention": "kernels"}) as agent:
        train(agent, running, 1)  # this step also compares the kernels with PyTorch's attention
        for heads, mode, expected in (
            ([], "plain", [plain, plain]),
            ([(0, 0), (0, 1), (1, 1)], "row_corrected", [all_heads, some_heads]),
            ([(0, 1), (1, 1)], "plain", [some_heads, plain]),
        ):
            if heads:
                agent.set_mode(heads, mode, "a test")
            seen.clear()
            train(agent, running, 1)
            forwards = [("attention_forward", one) for one in expected]
            assert seen == [*forwards, *(("attention_backward", one) for _, one in reversed(forwards))]


def test_switch_between_a_compiled_forward_and_backward_is_safe() -> None:
    model = tiny_gpt(CausalSelfAttention(16, 2), CausalSelfAttention(16, 2))
    running: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with attach(model, **{**EVERY_STEP, "attention": "kernels"}) as agent:
        train(agent, running, 1)
        loss = running(torch.arange(24).view(2, 12)).square().mean()
        agent.set_mode([(1, 0)], "row_corrected", "a test")
        agent.step()
        loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
