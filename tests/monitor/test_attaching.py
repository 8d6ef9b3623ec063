"""attach: supported and rejected models and settings, the printed table, step numbers and ranks."""

import json
import logging
import pwd
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.test_switch import half_masked
from tests.monitor.tiny_models import (
    CausalSelfAttention,
    batch,
    tiny_gpt,
)
from tests.monitor.unusual_attention import ManualAttention
from tests.monitor.watched_training import listening, rows_of, train, watch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.outbox import Outbox


@pytest.mark.parametrize(
    ("make", "overrides", "sentence"),
    [
        (lambda: "gpt2", {}, "attach takes a torch.nn.Module, got str"),
        (
            lambda: tiny_gpt().to("meta"),
            {"strict": True},
            "is on the meta device, without numbers; attach when its weights have",
        ),
        (tiny_gpt, {"numerics": "fp8"}, "numerics: Input should be 'auto', 'kernel', 'float32', 'paper' or 'float64'"),
        (tiny_gpt, {"mitigation": "prayer"}, "mode 'prayer' does not exist; allowed are plain, exact_delta"),
        (tiny_gpt, {"mitigation": "plain"}, "changes nothing; to only warn, set policy='observe'"),
        (tiny_gpt, {"rank": 3, "run": "r"}, "rank 3 needs a world_size of at least 4, got 1"),
        (tiny_gpt, {"url": "localhost:80"}, "url must start with http:// or https://"),
        (tiny_gpt, {"run": "two words"}, "is not an identifier"),
        (tiny_gpt, {"world_size": 4}, "4 processes need one name for their run"),
        (tiny_gpt, {"qk_clip_threshold": float("inf")}, "qk_clip_threshold: Input should be a finite number"),
        (tiny_gpt, {"sample_every_steps": 1001}, "sample_every_steps: Input should be less than or equal to 1000"),
        (tiny_gpt, {"config": "my-run"}, "config must be an AgentConfig, got str; pass settings by name"),
        (tiny_gpt, {"heads": {"blocks.0": 0}}, "heads.blocks.0: Input should be greater than 0"),
        (
            tiny_gpt,
            {"heads": {"blocks.O": 2}},
            "heads names 'blocks.O', which is not a module of the model; did you mean",
        ),
        (
            tiny_gpt,
            {"first_layer": {"block.1": 3}},
            "first_layer names 'block.1', which is not a module of the model; did you mean",
        ),
        (
            tiny_gpt,
            {"first_layer": {"blocks": 0, "blocks.1": 0}},
            "blocks.0 and blocks.1 both have the layer number 0; give every",
        ),
        (tiny_gpt, {"layers": {"blocks.0": 1}}, "layers is no longer a setting: first_layer takes the number of the"),
        (tiny_gpt, {"first_layer": 99_999}, "blocks.1 cannot be watched: layer: Input should be less than or equal"),
        (tiny_gpt, {"first_head": 1023}, "blocks.0 cannot be watched: heads.1: Input should be less than 1024"),
    ],
)
def test_invalid_configuration_is_rejected_with_a_clear_message(
    make: Any, overrides: dict[str, Any], sentence: str
) -> None:
    original = F.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r".") as caught:
        attach(make(), **overrides)
    assert sentence in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert F.scaled_dot_product_attention is original


def test_second_agent_on_the_same_model_is_rejected_until_detach() -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    with pytest.raises(ValueError, match=r"watched by another agent; call foreshock\.detach\(model\) first"):
        attach(model, **EVERY_STEP)
    agent.detach()
    attach(model, **EVERY_STEP).close()


def test_rerun_notebook_cell_replaces_the_agent_and_repr_shows_its_state(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    model = tiny_gpt()
    first, listener = attach(model, **EVERY_STEP, run="one"), Listener()
    first.subscribe(listener)
    first.step(1.0)
    with attach(model, **{**EVERY_STEP, "url": "http://127.0.0.1:9"}, run="team/two", spool_directory=None) as second:
        assert listener.events[-1].kind == "finished"
        assert "the agent of run one was closed; a new one takes its place" in caplog.text
        assert repr(first) == "<foreshock agent: run one, state closed, watches 2 layers, 4 heads, warnings none>"
        second.step(float("nan"))
        second.step(1.0)
        assert "page http://127.0.0.1:9/?runs=team/two" in repr(second)
        assert "not finite" in repr(second)


def test_new_model_in_a_notebook_closes_the_earlier_agent_of_the_same_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    outputs, kinds = [], []
    for run in ("one", "one", "another"):
        agent, listener = attach(tiny_gpt(), **EVERY_STEP, run=run), Listener()
        agent.subscribe(listener)
        agent.step(1.0)
        outputs.append(agent)
        kinds.append(listener.events)
    assert [bool(events) and events[-1].kind == "finished" for events in kinds] == [True, False, False]
    assert caplog.text.count("a new one takes its place") == 1
    for agent in outputs:
        agent.close()


@pytest.mark.promise("A27")
def test_user_without_a_home_directory_attaches_without_a_spool_and_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def no_such_user(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)  # as for a user id without an entry in the password database
    with attach(tiny_gpt(), quiet=True, url="http://127.0.0.1:9") as agent:
        agent.step(1.0)
        assert agent.config.spool_directory is None
    assert "set FORESHOCK_SPOOL_DIRECTORY" in caplog.text
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "no-folder"))
    with attach(tiny_gpt(), quiet=True, url="http://127.0.0.1:9") as agent:
        agent.step(1.0)
    assert not agent.faults


def test_first_layer_and_first_head_shift_the_reported_numbers() -> None:
    _, listener = watch(tiny_gpt(), steps=1, first_layer=4, first_head=2)
    layers = listener.of(wire.Started)[0].layers
    assert [(layer.layer, layer.heads) for layer in layers] == [(4, (2, 3)), (5, (2, 3))]


@pytest.mark.parametrize(
    ("first", "numbers"),
    [
        ({"blocks": 4}, [4, 5, 6]),
        ({"blocks.0": 8, "blocks.2": 2}, [8, 9, 2]),
        ({"blocks.1": 0, "blocks.2": 1}, [2, 0, 1]),
        ({"head": 7}, [0, 1, 2]),
        ({"blocks": 4, "blocks.1": 9}, [4, 9, 5]),
        ({"": 3, "blocks.1": 0}, [3, 0, 4]),
    ],
)
def test_layer_numbers_count_from_the_innermost_numbered_module(first: dict[str, int], numbers: list[int]) -> None:
    _, listener = watch(tiny_gpt(*(CausalSelfAttention(16, 2) for _ in range(3))), steps=1, first_layer=first)
    assert [layer.layer for layer in listener.of(wire.Started)[0].layers] == numbers


@pytest.mark.parametrize("key", ["text encoder", "größe (1+2)", "a" * 200])
def test_module_with_any_name_is_watched_under_a_valid_wire_name(key: str) -> None:
    model = nn.Sequential(nn.ModuleDict({key: CausalSelfAttention(16, 2)}))
    model.forward = lambda x: model[0][key](x)  # type: ignore[method-assign, index]
    with listening(model) as (agent, listener):
        model(torch.randn(2, 12, 16)).sum().backward()
        agent.step()
        assert f"0.{key}" in agent.report()
    (started,) = listener.of(wire.Started)
    assert wire.Started.model_validate(started.model_dump()).layers[0].name in f"0.{re.sub('[^a-z0-9.]', '_', key)}"
    assert rows_of(listener) == [24] * 2


def sageattn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


class UnknownAttention(CausalSelfAttention):
    """Calls an attention function that foreshock does not know."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sageattn(query, key, value)


def test_layers_that_share_a_module_are_counted_together() -> None:
    torch.manual_seed(0)
    shared = CausalSelfAttention(16, 2)
    _, listener = watch(tiny_gpt(shared, shared), steps=1)
    assert rows_of(listener) == [2 * 24] * 2


UNSUPPORTED: Any = {
    "without attention": (lambda: tiny_gpt(nn.Identity()), "no attention that foreshock can watch ran"),
    "unknown attention function": (lambda: tiny_gpt(UnknownAttention(16, 2)), "it computes its attention by hand"),
    "compiled": (lambda: torch.compile(tiny_gpt(), backend="aot_eager"), "compiled already; attach first, then"),
    "nn.DataParallel": (lambda: nn.DataParallel(tiny_gpt()), "use DistributedDataParallel"),
}


@pytest.mark.promise("A30")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_model_keeps_training_and_its_nan_loss_raises_a_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = UNSUPPORTED[kind]
    model = make()
    with caplog.at_level(logging.WARNING, "foreshock"), listening(model, strict=False) as (agent, listener):
        train(agent, model, 2)
        for _ in range(2):
            agent.step(float("nan"), grad_norm=1.0)
        agent.load_state_dict(agent.state_dict())
    (line,) = [r.message for r in caplog.records if "no attention is watched, training continues" in r.message]
    assert reason in line
    assert not agent.faults
    assert [sample.step for sample in listener.of(wire.Sample)] == [1, 2, 3, 4]
    assert [(v.step, v.signal) for v in listener.of(wire.Verdict)] == [(3, "nonfinite")]


@pytest.mark.promise("A30")
@pytest.mark.parametrize(
    "settings_given", [{"strict": True}, {"policy": "auto"}, {"policy": "approve"}, {"qk_clip": "warned"}]
)
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_model_is_rejected_if_strict_or_if_the_agent_should_act(
    kind: str, settings_given: dict[str, Any]
) -> None:
    make, reason = UNSUPPORTED[kind]
    original = F.scaled_dot_product_attention

    def first_step() -> None:
        model = make()
        train(attach(model, quiet=True, url=None, **settings_given), model, 1)

    with pytest.raises(ValueError, match=reason):
        first_step()
    assert F.scaled_dot_product_attention is original


@pytest.mark.promise("A18")
@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (5, 8)),
        ({"FORESHOCK_RANK": "1", "FORESHOCK_WORLD_SIZE": "2"}, (5, 8)),  # a Slurm task that spawned several processes
        ({"RANK": "9", "WORLD_SIZE": "16"}, (9, 16)),  # the process group is a part of the run
    ],
)
def test_rank_comes_from_the_process_group_without_launcher_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: tuple[int, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FORESHOCK_RANK", "FORESHOCK_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    with attach(tiny_gpt(), run="r", quiet=True) as agent:
        assert (agent.config.rank, agent.config.world_size) == place
    with attach(tiny_gpt(), run="r", quiet=True, rank=1, world_size=20) as agent:
        assert (agent.config.rank, agent.config.world_size) == (1, 20)


PRINTING = EVERY_STEP | {"quiet": False}


def test_training_another_model_is_reported_once_per_switch(caplog: pytest.LogCaptureFixture) -> None:
    watched, other = tiny_gpt(), tiny_gpt()
    settings = EVERY_STEP | {"sample_every_steps": 2}
    with attach(watched, **settings) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        train(agent, watched, 4)
        train(agent, other, 5)
        assert not [r for r in caplog.records if "no attention was recorded" in r.message]  # too early to report
        train(agent, other, 20)
        messages = [r.message for r in caplog.records if "no attention was recorded" in r.message]
        assert len(messages) == 1
        assert "since step 4" in messages[0]
        assert "a different model" in messages[0]
        train(agent, watched, 4)
        train(agent, other, 20)
        assert len([r for r in caplog.records if "no attention was recorded" in r.message]) == 2


@pytest.mark.parametrize(("given", "expected"), [(torch.tensor(6), 6), (np.int64(6), 6), (6.0, 6)])
def test_begin_at_accepts_tensor_numpy_and_float_step_counts(given: Any, expected: int) -> None:
    model = tiny_gpt()
    with attach(model, **EVERY_STEP) as agent:
        agent.begin_at(given)
        train(agent, model, 2)
        assert json.loads(json.dumps(agent.state_dict()))["step"] == agent.current_step == expected + 2


@pytest.mark.promise("A15")
@pytest.mark.parametrize("given", ["6", None, -6, float("nan"), [6]])
def test_begin_at_logs_an_invalid_step_count_and_training_continues(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt()
    with attach(model, **EVERY_STEP | {"strict": False}) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        agent.begin_at(given)
        train(agent, model, 2)
        assert agent.current_step == 2
        assert agent.faults == {"agent": 1}
    assert "begin_at takes the number of completed steps" in caplog.text


@pytest.mark.parametrize("kind", ["not called", "called", "only evaluated", "failed before its first step"])
def test_close_warns_if_step_was_never_called(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_gpt()
    agent = attach(model, **PRINTING)
    with caplog.at_level(logging.WARNING, "foreshock"), torch.set_grad_enabled(kind != "only evaluated"):
        loss = model(batch(0)).square().mean()
        if loss.requires_grad:
            torch.autograd.backward(loss)
        if kind == "called":
            agent.step(loss)
        agent.close("failed" if "failed" in kind else "completed")
    assert ("agent.step(loss) was never called" in caplog.text) == (kind == "not called")


def test_identical_layers_share_a_line_of_the_table() -> None:
    identical = [CausalSelfAttention(16, 2) for _ in range(9)]

    def reported(*attention: nn.Module) -> list[str]:
        model = tiny_gpt(*attention)
        agent, _ = watch(model)
        return [" ".join(line.split()) for line in agent.report().splitlines()]

    lines = reported(*identical[:3], CausalSelfAttention(16, 4), *identical[3:], ManualAttention(), ManualAttention())
    assert [line.split(" fused")[0] for line in lines if "blocks" in line][:2] == [
        "0, 1, ..., 9 9 x blocks.0, blocks.1, ..., blocks.9 2 2 8",
        "3 blocks.3 4 4 4",
    ]
    by_hand = "2 x not monitored: it computes its attention by hand (blocks.10, blocks.11)"
    assert [line for line in lines if "not monitored" in line] == [by_hand]
    assert any(line.startswith("0 to 8 9 x blocks.0, blocks.1, ..., blocks.8") for line in reported(*identical))


class KeysWithoutProjection(nn.Module):
    """Three query heads share a key head, whose keys come from slicing rather than a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q_proj(x).unflatten(2, (3, 4)).transpose(1, 2)
        keys = x[:, None, :, :4]
        return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True).transpose(1, 2).flatten(2)


def test_unknown_key_heads_are_shown_as_unknown_and_sent_to_the_service() -> None:
    """The `heads` setting gives query heads only."""
    model = nn.Sequential(KeysWithoutProjection(), nn.Linear(12, 2))
    with listening(model, heads={"0": 3}) as (agent, listener):
        for _ in range(2):
            loss = model(torch.randn(2, 5, 12)).square().mean()
            torch.autograd.backward(loss)
            agent.step(float(loss.detach()))
        report = agent.report()
    (line,) = [" ".join(line.split()) for line in report.splitlines() if line.startswith("0 ")]
    assert line.startswith("0 0 3 ? ? norms are not measured: W_Q and W_K were not found")
    assert "watched 1 of 1 attention layers" in report
    (started,) = listener.of(wire.Started)
    assert [layer.kv_heads_known for layer in started.layers] == [False]
    samples = listener.of(wire.Sample)
    assert samples
    assert all(each is None for sample in samples for each in (sample.key_norm, sample.query_key_norm))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_service_is_updated_when_the_implementation_of_a_layer_changes(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrections: list[list[tuple[str, bool]]] = []

    def correct(outbox: Outbox, started: wire.Started) -> None:
        outbox.started = started
        corrections.append([(layer.served_by, layer.sampled) for layer in started.layers])

    monkeypatch.setattr(Outbox, "correct", correct)
    probe, kernels = ("probe", True), ("reference", False)

    def step(model: nn.Module, agent: Agent) -> None:
        running: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        train(agent, running, 1)

    half = half_masked()
    first: Any = half.blocks[0]
    with attach(half, **EVERY_STEP) as agent:
        for masks in (False, True, True):
            first.uses_mask = masks
            step(half, agent)
    assert corrections == [[probe, kernels]]
    corrections.clear()
    model = tiny_gpt()
    with attach(model, **{**EVERY_STEP, "attention": "keep"}) as agent:
        for mode in (None, "row_corrected", None, "plain", None):
            if mode is not None:
                agent.set_mode([(0, 0)], mode, "a test")
            step(model, agent)
    assert corrections == [[kernels, probe], [probe, probe]]


def test_table_after_the_first_steps_shows_the_implementation_of_each_layer(capsys: pytest.CaptureFixture[str]) -> None:
    masked = tiny_gpt(*half_masked().blocks, ManualAttention())
    with attach(masked, **{**EVERY_STEP, "quiet": False}) as agent:
        assert capsys.readouterr().err == "", "the table waits for the first steps"
        train(agent, masked, 2)
        printed = capsys.readouterr().err
        assert "1 x kernels, but native and sampled in calls where it passes a mask (blocks.0)" in printed
        assert "1 x kernels (blocks.1)" in printed
        assert printed.rstrip().endswith("watched 2 of 3 attention layers")
        assert agent.report().count("watched 2 of 3 attention layers") == 1


def test_compiled_code_can_write_to_the_memory_of_every_layer_in_a_cuda_graph() -> None:
    """torch.compile makes no CUDA graph of code that writes to an input that is not aligned to 16 bytes."""
    model = tiny_gpt(*(CausalSelfAttention(15, 3) for _ in range(4)), width=15)
    with attach(model, url=None, spool_directory=None, quiet=True) as agent:
        written = [(each.state, each.sample_counter, each.largest) for each in agent._attached.watched]
        assert [x.data_ptr() % 16 for of_layer in written for x in of_layer if x is not None] == [0] * 12
