"""QK-Clip as an act: on, off, told, saved and resumed; in one process."""

import json
import logging
import math
from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener, ScriptedDetectors
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, tiny_gpt, train_step
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.training.model import Linear
from foreshock.monitor import Agent, attach

TAU = 0.05
"""The scores of a model of random weights pass it."""
EVERY: dict[str, Any] = {
    "attention": "kernels", "sample_every_steps": 1, "sample_every_seconds": 0.0, "quiet": True, "url": None,
    "qk_clip_threshold": TAU, "strict": True,
}  # fmt: skip


def two_layers(*attentions: nn.Module) -> TinyGPT:
    torch.manual_seed(1)
    return tiny_gpt(*(attentions or (CausalSelfAttention(16, 2) for _ in range(2))))


def of_queries_and_keys(model: nn.Module) -> list[Tensor]:
    return [p.detach()[:32].clone() for name, p in model.named_parameters() if "c_attn" in name]


def changed(agent: Agent, model: nn.Module, steps: int = 1) -> bool:
    """Whether W_Q or W_K change in steps that no optimizer makes: by the clip alone."""
    before = of_queries_and_keys(model)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(steps):
        agent.step(train_step(model, still, step).detach())
    return any(not torch.equal(a, b) for a, b in zip(before, of_queries_and_keys(model), strict=True))


def largest(listener: Listener) -> list[float]:
    """The largest score of all heads in each sample."""
    words = [sample.words() for sample in listener.of(wire.Sample)]
    return [float(slot_values(each, Slot.SCORE_MAX).max()) for each in words if each is not None]


def growing(step: int, *, state: str = "raised", severity: str = "warning", cause: str = "score growth") -> Any:
    return wire.Verdict(
        id="w", step=step, state=state, severity=severity, layer=0, head=0, cause=cause, signal="score",  # type: ignore[arg-type]
        sentence="Layer 0 head 0: its scores grow.",
    )  # fmt: skip


def test_always_holds_the_scores_from_the_first_step_and_tells_what_it_scaled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "foreshock")
    plain, listener = Listener(), Listener()
    model = two_layers()
    with attach(model, **EVERY) as agent:
        agent.subscribe(plain)
        assert not changed(agent, model, 3)
        assert "QK-Clip" not in agent.report()
    assert min(largest(plain)) > 2 * TAU
    model = two_layers()
    with attach(model, qk_clip="always", **EVERY) as agent:
        agent.subscribe(listener)
        assert changed(agent, model, 3)
        saved, report = agent.state_dict(), agent.report()
    assert largest(listener)[0] == largest(plain)[0]  # counted before the first clip
    assert max(largest(listener)[1:]) < min(largest(plain)[1:])
    told = listener.of(wire.Clipped)
    assert told[0].step == 1
    assert min(told[0].factors) == pytest.approx(TAU / largest(plain)[0])
    assert all(each.on and each.heads and max(each.factors) < 1 and min(each.times) >= 1 for each in told)
    assert len(told) == 2, "the first at once, the others together"
    samples = [s for s in listener.of(wire.Sample) if s.clip_factor is not None]
    factors = [s.clip_factor.numpy() for s in samples]
    assert min(each.min() for each in factors) == pytest.approx(min(min(each.factors) for each in told), rel=1e-6)
    assert (
        sum(s.clipped_steps.numpy().sum() for s in samples) == sum(sum(each.times) for each in told) == told[-1].total
    )
    assert sum("QK-Clip scaled" in record.getMessage() for record in caplog.records) == 1
    assert "QK-Clip is on at 0.05; " in report
    assert [head[:2] for head in saved["qk_clip"]["done"]] == [list(head) for each in told[:1] for head in each.heads]
    assert agent.faults == {}


def test_samples_hold_the_largest_score_of_all_their_steps_while_each_step_is_clipped_by_its_own() -> None:
    every, rare = Listener(), Listener()
    for listener, steps in ((every, 1), (rare, 4)):
        model = two_layers()
        with attach(model, qk_clip="always", **(EVERY | {"sample_every_steps": steps})) as agent:
            agent.subscribe(listener)
            changed(agent, model, 9)
    ours, theirs = largest(rare), largest(every)
    assert ours[:3] == [theirs[0], max(theirs[1:4]), max(theirs[4:8])]


def test_by_hand_it_is_switched_on_and_off_between_steps_with_an_event_and_a_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "foreshock")
    listener, model = Listener(), two_layers()
    with attach(model, **EVERY) as agent:
        agent.subscribe(listener)
        assert not changed(agent, model)
        agent.set_qk_clip(True, "the scores grow")
        assert changed(agent, model)
        agent.set_qk_clip(False, "enough")
        assert not changed(agent, model, 2)
    events = listener.of(wire.Clipped)
    assert [(each.on, each.reason) for each in events if not each.heads] == [
        (True, "the scores grow"),
        (False, "enough; weights that were scaled stay so: training has gone on from them"),
    ]
    [done] = [each for each in events if each.heads]
    assert set(done.heads) <= {(layer, head) for layer in range(2) for head in range(2)}
    lines = [record.getMessage() for record in caplog.records if "QK-Clip is" in record.getMessage()]
    assert [line.split(": ")[1] for line in lines] == ["QK-Clip is on", "QK-Clip is off"]


@pytest.mark.parametrize("wrong", ["never", "always", "warned", 1, None])
def test_by_hand_it_takes_true_or_false_and_no_word_of_the_setting_switches_it_on(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    listener, model = Listener(), two_layers()
    no_reason: Any = None
    with attach(model, **EVERY) as agent:
        agent.subscribe(listener)
        with pytest.raises(ValueError, match="takes True or False, got"):
            agent.set_qk_clip(wrong, "the scores grow")
        assert not changed(agent, model)
        assert agent.set_qk_clip(True, no_reason).on
    assert "QK-Clip is off" not in caplog.text
    assert [each.on for each in listener.of(wire.Clipped) if not each.heads] == [True]


def test_switched_on_by_hand_it_goes_by_the_steps_that_follow() -> None:
    model = two_layers()
    with attach(model, **(EVERY | {"sample_every_steps": 100, "qk_clip_threshold": 20.0})) as agent:
        assert not changed(agent, model)
        with torch.no_grad():
            model.embedding.weight.mul_(30)
        assert not changed(agent, model)
        with torch.no_grad():
            model.embedding.weight.div_(30)
        agent.set_qk_clip(True, "the scores grew")
        assert not changed(agent, model)
        with torch.no_grad():
            model.embedding.weight.mul_(30)
        assert changed(agent, model)


@pytest.mark.parametrize(
    ("verdict", "on"),
    [
        (growing(1), True),
        (growing(1, state="updated", severity="critical"), True),
        (growing(1, severity="info"), False),
        (growing(1, cause="rounding"), False),
        (growing(1, cause="other"), False),
        (growing(1, state="cleared"), False),
    ],
)
def test_warned_begins_at_a_standing_warning_of_scores_that_grow_and_at_no_other(
    verdict: wire.Verdict, on: bool
) -> None:
    model = two_layers()
    with attach(model, qk_clip="warned", policy="auto", **EVERY) as agent:
        agent.detectors = ScriptedDetectors(4, {1: [verdict]})
        assert not changed(agent, model)
        agent.state_dict()  # the verdict of step 1 has come
        assert changed(agent, model) == on
        assert ("QK-Clip is on" in agent.report()) == on


def test_while_it_waits_the_report_says_for_what_and_leaves_out_no_layer_that_it_can_scale() -> None:
    model = two_layers()
    with attach(model, qk_clip="warned", **EVERY) as agent:
        assert not changed(agent, model, 2)
        assert agent.report().splitlines()[-1] == "QK-Clip is off until scores grow at 0.05"
        agent.set_qk_clip(True, "to look")
        assert changed(agent, model)
        assert "left out" not in agent.report()


def test_after_a_persons_no_a_warning_that_stands_does_not_switch_it_on_and_a_new_one_does() -> None:
    model = two_layers()
    with attach(model, qk_clip="warned", policy="auto", **EVERY) as agent:
        agent.set_qk_clip(True, "to look")
        agent.set_qk_clip(False, "no")
        script = {1: [growing(1, state="updated")], 2: [growing(2, state="raised")]}
        agent.detectors = ScriptedDetectors(4, script)
        for expected in ("off", "on"):
            changed(agent, model)
            agent.state_dict()
            assert f"QK-Clip is {expected}" in agent.report()


def test_a_resumed_run_goes_on_clipping_and_remembers_what_was_scaled() -> None:
    model = two_layers()
    with attach(model, **EVERY) as agent:
        agent.set_qk_clip(True, "the scores grow")
        changed(agent, model)
        saved = json.loads(json.dumps(agent.state_dict()))
    model = two_layers()
    with attach(model, **EVERY) as agent:
        agent.load_state_dict(saved)
        assert changed(agent, model)
        again = agent.state_dict()["qk_clip"]
    assert [done[:2] for done in again["done"]] == [done[:2] for done in saved["qk_clip"]["done"]]
    assert sum(done[2] for done in again["done"]) > sum(done[2] for done in saved["qk_clip"]["done"])


def test_a_resumed_run_whose_attention_is_kept_goes_on_clipping() -> None:
    model = two_layers()
    with attach(model, **EVERY) as agent:
        agent.set_qk_clip(True, "the scores grow")
        saved = agent.state_dict()
    with attach(model, **(EVERY | {"attention": "keep", "qk_clip_every_steps": 1})) as agent:
        agent.load_state_dict(saved)
        assert changed(agent, model, 2)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"qk_clip_every_steps": 0}, "qk_clip_every_steps: Input should be greater than or equal to 1"),
        ({"qk_clip": "sometimes"}, "qk_clip: Input should be 'never', 'warned' or 'always'"),
        ({"qk_clip_threshold": 0.0}, "qk_clip_threshold: Input should be greater than 0"),
        ({"qk_clip_threshold": math.inf}, "qk_clip_threshold: Input should be a finite number"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_with_a_sentence(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        attach(two_layers(), **(EVERY | settings))


class Rounding(nn.Linear):
    """Its weight is rounded in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (8 * self.weight).round() / 8, self.bias)


def test_a_projection_with_a_forward_of_its_own_is_scaled_where_its_outputs_follow_from_its_weights() -> None:
    for kind, scaled in ((Linear, True), (Rounding, False)):
        model = two_layers()
        for block in model.blocks:
            other = Linear(16, 48, torch.float32, bias=True) if kind is Linear else Rounding(16, 48)
            nn.init.normal_(other.weight, std=0.3)
            block.c_attn = other
        with attach(model, qk_clip="always", **EVERY) as agent:
            assert changed(agent, model, 2) == scaled
            told = "norms of the weights only: Rounding has a forward of its own" in agent.report()
            assert told != scaled


def test_16_bit_weights_are_scaled_only_where_the_optimizer_trains_them_themselves() -> None:
    def run(own: bool | None, master: bool = False) -> bool:
        model = two_layers().to(torch.bfloat16)
        with attach(model, qk_clip="always", **EVERY) as agent:
            trained = model if own else two_layers()
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
            if master:
                for parameter in model.parameters():
                    optimizer.state[parameter]["master_param"] = parameter.detach().float()
            if own is not None:
                agent.qk_clip_with(optimizer=optimizer)
            did = changed(agent, model)
            reason = {None: "are bfloat16 and may be copies", False: "trains a copy of its weights"}
            assert did or reason[False if master else own] in agent.report()
            return did

    assert run(True)
    assert not run(True, master=True)
    assert not run(False)
    assert not run(None)


def test_several_optimizers_may_own_the_weights_and_what_is_no_optimizer_is_refused_with_a_sentence() -> None:
    model = two_layers().to(torch.bfloat16)
    each = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model.children()]
    with attach(model, qk_clip="always", **EVERY) as agent:
        for wrong in (model, [], [None]):
            with pytest.raises(ValueError, match="give the optimizer of the training, or a list of several"):
                agent.qk_clip_with(optimizer=wrong)  # type: ignore[arg-type]
        agent.qk_clip_with(optimizer=each)
        assert changed(agent, model)


def test_a_fault_ends_it_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "foreshock")
    model = two_layers()
    with attach(model, qk_clip="always", **(EVERY | {"strict": False})) as agent:
        assert changed(agent, model)

        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("no weights today")

        monkeypatch.setattr("foreshock.monitor.qk_clip._Parts.scale", fails)
        assert not changed(agent, model)
        monkeypatch.undo()
        assert not changed(agent, model, 3)
        assert agent.faults == {"qk_clip": 1}
        assert "QK-Clip is off at 0.05, a fault in scaling" in agent.report()
        with pytest.raises(ValueError, match="QK-Clip stays off: a fault in scaling"):
            agent.set_qk_clip(True, "again")
    assert "QK-Clip is off from now on: a fault in scaling" in caplog.text
