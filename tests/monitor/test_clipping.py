"""QK-Clip: when it is on, which weights it scales, and what it reports."""

import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.doubles import Listener, ScriptedDetectors, verdict
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.layouts import DIM, HEADS, LAYOUTS, WIDTH, projection_of, separate
from tests.monitor.probing import scores_of, tensors, visible
from tests.monitor.test_flex import Flex
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, batch, tiny_gpt, train_step
from tests.monitor.watched_training import listening
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from foreshock.contract import wire
from foreshock.contract.slots import Slot, identity_row, slot_values
from foreshock.contract.wire import Layer
from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.monitor import Agent, AgentConfig, attach
from foreshock.monitor.attention import probe
from foreshock.monitor.attention.probed_rows import Call, raise_largest
from foreshock.monitor.model.layers import Projection
from foreshock.monitor.qk_clip import QKClip

TAU = 0.05
"""A threshold below the scores of a randomly initialised model."""
SETTINGS = EVERY_STEP | {"qk_clip_threshold": TAU}


@pytest.fixture(autouse=True)
def _every_step_may_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "qk_clip_every_steps", 1)


def two_layers(*attentions: nn.Module) -> TinyGPT:
    torch.manual_seed(1)
    return tiny_gpt(*(attentions or (CausalSelfAttention(16, 2) for _ in range(2))))


def query_key_weights(model: nn.Module) -> list[Tensor]:
    return [p.detach()[:32].clone() for name, p in model.named_parameters() if "c_attn" in name]


def weights_change(agent: Agent, model: nn.Module, steps: int = 1) -> bool:
    """Whether QK-Clip changes W_Q or W_K in some steps; the learning rate is 0."""
    before = query_key_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(steps):
        agent.step(train_step(model, optimizer, step).detach())
    return any(not torch.equal(a, b) for a, b in zip(before, query_key_weights(model), strict=True))


def largest(listener: Listener) -> list[float]:
    """The largest score over all heads, per sample."""
    words = [sample.words() for sample in listener.of(wire.Sample)]
    return [float(slot_values(each, Slot.SCORE_MAX).max()) for each in words if each is not None]


def growth_warning(step: int, **changes: Any) -> wire.Verdict:
    return verdict(0, 0, **{"step": step, "cause": "score growth", "signal": "score", **changes})


def test_always_clips_from_step_1_and_reports_what_it_scaled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "foreshock")
    model = two_layers()
    with listening(model, **SETTINGS) as (agent, plain):
        assert not weights_change(agent, model, 3)
        assert "QK-Clip" not in agent.report()
    assert min(largest(plain)) > 2 * TAU
    model = two_layers()
    with listening(model, qk_clip="always", **SETTINGS) as (agent, listener):
        assert weights_change(agent, model, 3)
        saved, report = agent.state_dict(), agent.report()
    assert largest(listener)[0] == largest(plain)[0]  # measured before the first clip
    assert max(largest(listener)[1:]) < min(largest(plain)[1:])
    clipped = listener.of(wire.Clipped)
    assert clipped[0].step == 1
    assert min(clipped[0].factors) == pytest.approx(TAU / largest(plain)[0])
    assert all(each.on and each.heads and max(each.factors) < 1 and min(each.times) >= 1 for each in clipped)
    assert len(clipped) == 2, "the first event at once, the second for all later steps"
    samples = [s for s in listener.of(wire.Sample) if s.clip_factor is not None]
    factors = [s.clip_factor.numpy() for s in samples]
    assert min(each.min() for each in factors) == pytest.approx(min(min(each.factors) for each in clipped), rel=1e-6)
    assert (
        sum(s.clipped_steps.numpy().sum() for s in samples)
        == sum(sum(each.times) for each in clipped)
        == clipped[-1].total
    )
    assert sum("QK-Clip scaled" in record.getMessage() for record in caplog.records) == 1
    assert "QK-Clip is on at 0.05; " in report
    assert [head[:2] for head in saved["qk_clip"]["done"]] == [
        list(head) for each in clipped[:1] for head in each.heads
    ]
    assert agent.faults == {}


def test_sample_contains_the_largest_score_of_its_steps_although_each_is_clipped() -> None:
    maxima = []
    for steps in (1, 4):
        model = two_layers()
        with listening(model, qk_clip="always", **SETTINGS | {"sample_every_steps": steps}) as (agent, listener):
            weights_change(agent, model, 9)
        maxima.append(largest(listener))
    per_step, per_sample = maxima
    assert per_sample[:3] == [per_step[0], max(per_step[1:4]), max(per_step[4:8])]


def test_set_qk_clip_switches_between_steps_with_an_event_and_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "foreshock")
    model = two_layers()
    with listening(model, **SETTINGS) as (agent, listener):
        wrong: Any
        for wrong in ("never", "always", "warned", 1, None):
            with pytest.raises(ValueError, match="takes True or False, not"):
                agent.set_qk_clip(wrong, "the scores grow")
        assert not weights_change(agent, model)
        agent.set_qk_clip(True, "the scores grow")
        assert weights_change(agent, model)
        agent.set_qk_clip(False, "enough")
        assert not weights_change(agent, model, 2)
    events = listener.of(wire.Clipped)
    assert [(each.on, each.reason) for each in events if not each.heads] == [
        (True, "the scores grow"),
        (False, "enough; scaled weights are not restored, because training continued from them"),
    ]
    [done] = [each for each in events if each.heads]
    assert set(done.heads) <= {(layer, head) for layer in range(2) for head in range(2)}
    lines = [record.getMessage() for record in caplog.records if "QK-Clip is" in record.getMessage()]
    assert [line.split(": ")[1] for line in lines] == ["QK-Clip is on", "QK-Clip is off"]


@pytest.mark.parametrize(
    ("given", "on"),
    [
        (growth_warning(1), True),
        (growth_warning(1, state="updated", severity="critical"), True),
        (growth_warning(1, severity="info"), False),
        (growth_warning(1, cause="rounding"), False),
        (growth_warning(1, cause="other"), False),
        (growth_warning(1, state="cleared"), False),
    ],
)
def test_warned_starts_only_on_an_active_warning_of_score_growth(given: wire.Verdict, on: bool) -> None:
    model = two_layers()
    with attach(model, qk_clip="warned", policy="auto", **SETTINGS) as agent:
        agent.detectors = ScriptedDetectors(4, {1: [given]})
        assert not weights_change(agent, model)
        agent.state_dict()  # waits for the verdict of step 1
        assert weights_change(agent, model) == on
        assert ("QK-Clip is on" in agent.report()) == on


def test_only_a_new_warning_overrides_a_manual_switch_off() -> None:
    model = two_layers()
    with attach(model, qk_clip="warned", policy="auto", **SETTINGS) as agent:
        agent.set_qk_clip(True, "to look")
        agent.set_qk_clip(False, "stop")
        script = {1: [growth_warning(1, state="updated")], 2: [growth_warning(2, state="raised")]}
        agent.detectors = ScriptedDetectors(4, script)
        for expected in ("off", "on"):
            weights_change(agent, model)
            agent.state_dict()
            assert f"QK-Clip is {expected}" in agent.report()


@pytest.mark.parametrize("attention", ["kernels", "keep"])
def test_resumed_run_continues_clipping_and_its_totals(attention: str) -> None:
    model = two_layers()
    with attach(model, **SETTINGS) as agent:
        agent.set_qk_clip(True, "the scores grow")
        weights_change(agent, model)
        saved = json.loads(json.dumps(agent.state_dict()))
    model = two_layers()
    with attach(model, **(SETTINGS | {"attention": attention})) as agent:
        agent.load_state_dict(saved)
        assert weights_change(agent, model, 2)
        again = agent.state_dict()["qk_clip"]
    assert [done[:2] for done in again["done"]] == [done[:2] for done in saved["qk_clip"]["done"]]
    assert sum(done[2] for done in again["done"]) > sum(done[2] for done in saved["qk_clip"]["done"])


def test_16_bit_weights_are_scaled_only_if_the_optimizer_updates_them_directly() -> None:
    def run(owner: bool | None, master: bool = False, several: bool = False) -> bool:
        model = two_layers().to(torch.bfloat16)
        with attach(model, qk_clip="always", **SETTINGS) as agent:
            trained = model if owner else two_layers()
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
            if master:
                for parameter in model.parameters():
                    optimizer.state[parameter]["master_param"] = parameter.detach().float()
            if owner is not None:
                for wrong in (model, [], [None]):
                    with pytest.raises(ValueError, match="pass the training's optimizer, or a list of optimizers"):
                        agent.qk_clip_with(optimizer=wrong)  # type: ignore[arg-type]
                agent.qk_clip_with(optimizer=[optimizer] if several else optimizer)
            did = weights_change(agent, model)
            reason = {None: "are bfloat16 and may be copies", False: "trains a copy of its weights"}
            assert did or reason[False if master else owner] in agent.report()
            return did

    assert run(True)
    assert run(True, several=True)
    assert not run(True, master=True)
    assert not run(False)
    assert not run(None)


def test_fault_turns_clipping_off_and_training_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "foreshock")
    model = two_layers()
    with attach(model, qk_clip="always", **(SETTINGS | {"strict": False})) as agent:
        assert weights_change(agent, model)

        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("weights are unavailable")

        monkeypatch.setattr("foreshock.monitor.qk_clip.QKClip.after_step", fails)
        assert not weights_change(agent, model)
        monkeypatch.undo()
        assert not weights_change(agent, model, 3)
        assert agent.faults == {"qk_clip": 1}
        assert "QK-Clip is off at 0.05, an error occurred while scaling" in agent.report()
        with pytest.raises(ValueError, match="QK-Clip stays off: an error occurred while scaling"):
            agent.set_qk_clip(True, "again")
    assert "QK-Clip is off from now on: an error occurred while scaling" in caplog.text


@pytest.mark.promise("A26")
@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
def test_clipping_stays_off_by_default_under_every_policy(policy: Any) -> None:
    model = two_layers()
    with listening(model, policy=policy, **SETTINGS) as (agent, listener):
        agent.detectors = ScriptedDetectors(4, {1: [growth_warning(1)], 2: [growth_warning(2, state="updated")]})
        assert not weights_change(agent, model, 5)
    assert listener.of(wire.Switched) == []


@pytest.mark.promise("A26")
def test_qk_clip_order_of_an_older_service_is_refused() -> None:
    order = wire.Command(id="c", action="qk_clip", mode="qk_clip_always", reason="scores grow", issued_by="ada")
    model = two_layers()
    with attach(model, **SETTINGS) as agent:
        weights_change(agent, model)
        answer = agent._switchboard.obey(order, step=agent.current_step, unix_seconds=time.time())
        assert answer is not None
        assert (answer.outcome, answer.heads) == ("refused", ())
        assert answer.reason == "this agent does not carry out 'qk_clip' orders"
        assert not weights_change(agent, model)


def test_service_receives_every_change_of_the_clipping_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str | None] = []
    model = two_layers()
    with attach(model, **SETTINGS) as agent:
        monkeypatch.setattr(agent._outbox, "_send", lambda event: states.append(getattr(event, "qk_clip", "other")))
        weights_change(agent, model, 2)
        agent.set_qk_clip(True, "scores grow")
        weights_change(agent, model, 2)
        agent.set_qk_clip(False, "enough")
        weights_change(agent, model, 2)
    assert [each for each in states if each != "other"] == ["never", "on", "never"]


NATIVE: dict[str, Any] = SETTINGS | {
    "attention": "keep", "qk_clip": "always", "probe_rows": 1, "numerics": "float32",
}  # fmt: skip


SPECS = [
    AttentionSpec(0.25),
    AttentionSpec(0.25, "top_left"),
    AttentionSpec(0.25, "bottom_right", window_left=3),
    AttentionSpec(0.25, window_left=2, window_right=1, softcap=5.0),
]


@pytest.mark.parametrize("at_once", [2**24, 2**8])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_max_score_of_all_rows_equals_a_float64_reference_for_any_chunk_size(
    spec: AttentionSpec, masked: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.HELD_BYTES", at_once)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.LEAST_ROWS", 3)
    query, key, value, grad = tensors(torch.bfloat16, length=11)
    mask = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None
    if mask is not None:
        mask[1, :, 4] = False  # a row without visible keys
    largest = torch.full((4,), -math.inf)
    raise_largest(largest, Call(grad, grad, query, key, value, mask), spec)
    shown = visible(11, 11, spec.causal, (spec.window_left, spec.right))
    scores = scores_of(query, key, shown if mask is None else shown & mask, scale=spec.scale, softcap=spec.softcap)
    assert largest.tolist() == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-6)


def test_native_attention_is_clipped_like_the_kernels_with_one_sampled_row() -> None:
    weights = []
    for attention in ("kernels", "keep"):
        model = two_layers()
        with attach(model, **(NATIVE | {"attention": attention})) as agent:
            assert weights_change(agent, model, 3)
            assert agent.faults == {}
        weights.append(query_key_weights(model))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=0)


def test_native_attention_is_clipped_only_every_qk_clip_every_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "qk_clip_every_steps", 3)
    model = two_layers()
    with listening(model, **NATIVE | {"probe_rows": 10**6}) as (agent, listener):
        assert [weights_change(agent, model) for _ in range(7)] == [False, False, True, False, False, True, False]
    sampled = [sample.words() for sample in listener.of(wire.Sample)]
    assert len(sampled) == 7
    assert all(slot_values(words, Slot.SCORE_MAX).max() > TAU for words in sampled if words is not None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_unsupported_native_layers_are_not_clipped_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        flex_attention, "_validate_device", lambda *operands: None
    )  # PyTorch refuses to train FlexAttention on a CPU
    model = two_layers(Flex(), CausalSelfAttention(16, 4))
    with attach(model, **NATIVE) as agent:
        assert weights_change(agent, model, 2)
        assert "not scaled: 1 layers (blocks.0): a function changes its scores" in agent.report()
    model = two_layers()
    with attach(model, **NATIVE) as agent:
        assert weights_change(agent, model, 2)
        monkeypatch.setattr(probe, "_capturing", lambda query: True)
        assert not weights_change(agent, model, 2)
        assert "not scaled: 2 layers (blocks.0, blocks.1): its step was captured in a CUDA graph" in agent.report()


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_shared_module_is_scaled_once_by_its_larger_score(attention: Any) -> None:
    shared = CausalSelfAttention(16, 2)
    model, inputs = two_layers(shared, shared), []
    hook = shared.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach().double()))
    before = shared.c_attn.weight.detach().double()
    bias = shared.c_attn.bias.detach().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = SETTINGS | {"attention": attention, "qk_clip": "always", "numerics": "float32"}
    with attach(model, **settings) as agent:
        agent.step(train_step(model, optimizer, 0, batch(0)).detach())
    hook.remove()
    largest = [-math.inf] * 2
    for x in inputs:
        query, key, _ = (x @ before.T + bias).chunk(3, dim=2)
        for head, rows in enumerate((slice(0, 8), slice(8, 16))):
            scores = (query[..., rows] @ key[..., rows].mT / math.sqrt(8)).tril()
            hidden = torch.ones_like(scores).triu(1).bool()
            largest[head] = max(largest[head], float(scores.masked_fill(hidden, -math.inf).max()))
    assert len(inputs) == 2
    assert max(largest) > TAU
    root = [min(1.0, TAU / score) ** 0.5 for score in largest]
    expected = before.clone()
    for side in (0, 16):
        for head, factor in enumerate(root):
            expected[side + 8 * head : side + 8 * head + 8] *= factor
    torch.testing.assert_close(shared.c_attn.weight.detach().double(), expected, rtol=1e-5, atol=0)


THRESHOLD = 100.0


def layer(number: int, kv_heads: int) -> Layer:
    return Layer(
        layer=number, name=f"l{number}", heads=tuple(range(HEADS)), kv_heads=kv_heads, head_dim=DIM, served_by="kernel"
    )


def fresh_state(layers: int = 1) -> Tensor:
    return torch.from_numpy(identity_row()).repeat(layers * HEADS, 1)


def set_scores(state: Tensor, scores: list[float]) -> None:
    state.view(torch.float64)[:, Slot.SCORE_MAX] = torch.tensor(scores, dtype=torch.float64)


def totals(clip: QKClip) -> tuple[float, int, int]:
    """The smallest gamma, the number of scaled heads and the number of scalings."""
    least, counts = clip.done
    return float(least.min()), int((counts > 0).sum()), int(counts.sum())


def largest_scores(projection: Projection, tokens: Tensor) -> Tensor:
    """The largest score of every query head over all pairs of tokens [T, WIDTH], in float64, without biases."""
    query, key = (side.read().weights.double() for side in (projection.query, projection.key))
    key = key.repeat_interleave(len(query) // len(key), 0)
    rows = torch.einsum("hde,te->htd", query, tokens.double())
    columns = torch.einsum("hde,te->htd", key, tokens.double())
    return (rows @ columns.mT / math.sqrt(DIM)).flatten(1).max(1).values


@pytest.mark.promise("A26")
@pytest.mark.parametrize(("layout", "kv_heads"), LAYOUTS)
def test_only_heads_above_the_threshold_are_scaled_in_every_weight_layout(
    layout: Callable[[Tensor, Tensor], nn.Module], kv_heads: int
) -> None:
    torch.manual_seed(kv_heads)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(kv_heads, DIM, WIDTH)
    query *= torch.tensor([400.0, 1.0, 30.0, 90.0]).repeat(HEADS)[:HEADS].view(-1, 1, 1)
    module = layout(query, key)
    projection = projection_of(module, kv_heads)
    tokens = torch.randn(9, WIDTH) / 4
    before = largest_scores(projection, tokens)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    state = fresh_state()
    clip = QKClip([layer(0, kv_heads)], [projection], state, threshold=THRESHOLD)
    assert clip.refused == {}
    set_scores(state, before.tolist())
    clip.after_step()
    after = largest_scores(projection, tokens)
    assert bool((before > THRESHOLD).any())
    torch.testing.assert_close(after, before.clamp(max=THRESHOLD), rtol=1e-5, atol=0)
    untouched = before <= THRESHOLD
    assert torch.equal(after[untouched], before[untouched])
    # reference: each head's rows times its gamma, other rows unchanged
    gamma = (THRESHOLD / before).clamp(max=1.0)
    grouped = kv_heads < HEADS
    expected = [
        (projection.query, query, gamma if grouped else gamma.sqrt()),
        (projection.key, key, torch.ones(kv_heads) if grouped else gamma.sqrt()),
    ]
    for side, true, factors in expected:
        for head, factor in enumerate(factors.tolist()):
            torch.testing.assert_close(
                side.read().weights[head].double(), true[head].double() * factor, rtol=1e-6, atol=0
            )
    touched = sum(int((parameter != weights[name]).sum()) for name, parameter in module.named_parameters())
    sides = 1 if grouped else 2
    assert touched <= sides * int((before > THRESHOLD).sum()) * DIM * (WIDTH + 1)  # rows and biases of the scaled heads
    least, heads, scalings = totals(clip)
    assert least == pytest.approx(float(gamma.min()))
    assert heads == scalings == int((before > THRESHOLD).sum())


@given(
    st.lists(st.sampled_from([-math.inf, -500.0, 0.0, THRESHOLD, math.inf, math.nan]), min_size=HEADS, max_size=HEADS)
)
def test_scores_up_to_the_threshold_and_nonfinite_scores_scale_nothing(scores: list[float]) -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    state = fresh_state()
    clip = QKClip([layer(0, HEADS)], [projection_of(module)], state, threshold=THRESHOLD)
    set_scores(state, scores)
    clip.after_step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), weights, strict=True))
    assert totals(clip) == (1.0, 0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graph_replay_clips_by_the_scores_of_each_replay() -> None:
    module = separate(torch.ones(HEADS, DIM, WIDTH), torch.ones(HEADS, DIM, WIDTH)).cuda()
    state = fresh_state().cuda()
    clip = QKClip([layer(0, HEADS)], [projection_of(module)], state, threshold=THRESHOLD)
    clip.after_step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clip.after_step()
    for score, expected in ((4 * THRESHOLD, 0.5), (THRESHOLD, 0.5), (16 * THRESHOLD, 0.125)):
        set_scores(state, [score] + [1.0] * (HEADS - 1))
        graph.replay()
        for name in ("q_proj", "k_proj"):
            weight = module.get_parameter(f"{name}.weight")
            assert torch.equal(weight[:DIM], torch.full_like(weight[:DIM], expected))
            assert torch.equal(weight[DIM:], torch.ones_like(weight[DIM:]))
