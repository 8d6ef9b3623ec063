"""A saved state resumes a run. An unusable state is rejected as a whole or in part, and training continues."""

import functools
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.monitor import titan_shape
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import tiny_gpt

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.callbacks.shared import read_state, take_up, write_state
from foreshock.monitor.callbacks.torchtitan import watch
from foreshock.monitor.checkpoints import second_name
from foreshock.monitor.detect.run_state import LAYOUT

SETTINGS: dict[str, Any] = {
    "sample_every_steps": 1, "quiet": True, "url": None, "policy": "auto",
}  # fmt: skip


@functools.cache
def _saved_json() -> str:
    with attach(tiny_gpt(), **SETTINGS) as agent:
        for _ in range(5):
            agent.step(1.0)
        agent.set_mode([(0, 1)], "exact_delta", "a person")
        return json.dumps(agent.state_dict())


BLOCK = wire.Array.of(np.zeros((2, 3))).model_dump()
"""A block of three heads."""


def saved_state() -> dict[str, Any]:
    """A fresh copy that the caller may change."""
    saved: dict[str, Any] = json.loads(_saved_json())
    return saved


def with_changes(*path: str, value: Any) -> dict[str, Any]:
    saved = saved_state()
    place = saved
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return saved


def first_sample_after_resume(agent: Agent) -> wire.Sample:
    """The first sample of a training that resumes after step 5."""
    listener = Listener()
    agent.subscribe(listener)
    for step in (6, 7):
        agent.step(1.0, step=step)
    agent.close()
    assert agent.faults == {}
    first: wire.Sample = listener.of(wire.Sample)[0]
    return first


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for record in caplog.records if "the saved state" in (line := record.getMessage())]


WRONG = [
    (("version",), 2, "version 2; this agent reads version 1"),
    (("step",), KeyError, "it is damaged: step"),
    (("step",), -1, "it is damaged: step"),
    (("run",), 7, "it is damaged: run"),
    (("switch",), None, "it is damaged: switch"),
    (("switch", "modes"), KeyError, "modes"),
    (("switch", "modes"), [[0, 1, "no_such_mode"]], "no_such_mode"),
    (("switch", "modes"), [[0, 1, "exact_delta"], 3], "unpack"),
    (("switch", "held"), [[0]], "unpack"),
    (("detectors", "heads"), [[0, 0]], "it has 1 heads, but this process watches 4 or different ones"),
]


@pytest.mark.promise("A15")
@pytest.mark.parametrize(("path", "value", "reason"), WRONG)
def test_damaged_state_or_state_of_another_model_changes_nothing(
    path: tuple[str, ...], value: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = with_changes(*path, value=value)
    agent = attach(tiny_gpt(), **SETTINGS)
    take_up(agent, state, 5)
    assert set(agent.modes().values()) == {"plain"}
    sample = first_sample_after_resume(agent)
    lines = refusals(caplog)
    if path != ("step",):  # a state without the checkpoint's step is skipped silently
        assert [reason in line and "training continues" in line for line in lines] == [True]
    assert (sample.since_step, sample.step) == (5, 6)


@pytest.mark.promise("A15")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("past",), KeyError),
        (("past",), "?"),
        (("past", "open"), {}),
        (("past", "blocks"), [{"values": BLOCK, "end": 1, "moved": 1.0}]),
        (("past", "most"), 9),
        (("past", "block_steps"), 7),
        (("alarms",), [1]),
        (("alarms",), {"9": {}}),
        (("bias", "capital"), None),
        (("warning_ratios",), {}),
        (("layout",), LAYOUT + 1),
    ],
)
def test_unreadable_detectors_restart_while_the_modes_are_restored(
    path: tuple[str, ...], value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = with_changes("detectors", *path, value=value)
    agent = attach(tiny_gpt(), **SETTINGS)
    take_up(agent, state, 5)
    [line] = refusals(caplog)
    assert "the detectors start from zero; the modes of the heads are as saved" in line
    assert "\n" not in line
    assert agent.state_dict()["switch"]["modes"] == [[0, 1, "exact_delta"]]  # applied at the first step
    with attach(tiny_gpt(), **SETTINGS) as fresh:
        assert agent.detectors.state_dict() == fresh.detectors.state_dict()
    assert first_sample_after_resume(agent).since_step == 5


@pytest.mark.promise("A15")
def test_state_of_an_earlier_version_restores_modes_and_restarts_detectors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = json.loads((Path(__file__).parent / "agent_state_layout_1.json").read_text())
    agent = attach(tiny_gpt(), **SETTINGS)
    agent.load_state_dict(state)
    [line] = refusals(caplog)
    assert f"the saved detectors have layout 1, this version reads layout {LAYOUT}" in line
    assert "\n" not in line
    assert (agent.run, agent.current_step) == ("saved-before", 5)
    assert agent.state_dict()["switch"]["modes"] == [[0, 1, "exact_delta"]]
    with attach(tiny_gpt(), **SETTINGS) as fresh:
        assert agent.detectors.state_dict() == fresh.detectors.state_dict()
    assert first_sample_after_resume(agent).since_step == 5
    strict = attach(tiny_gpt(), strict=True, **SETTINGS)
    with pytest.raises(ValueError, match="layout 1"):
        strict.load_state_dict(state)
    strict.close()


@pytest.mark.promise("A15")
def test_load_state_dict_after_a_step_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    state = saved_state()
    agent = attach(tiny_gpt(), **SETTINGS)
    agent.step(1.0)
    agent.load_state_dict(state)
    assert "it came after step 1; call it before the first step" in caplog.text
    assert (agent.current_step, agent.modes()[0, 1]) == (1, "plain")
    agent.close()


@pytest.mark.promise("A15")
@pytest.mark.parametrize("content", [b"", b'{"version": 1,', b"\xff\xfe", b"[1]", b"[" * 100_000, None])
def test_damaged_file_is_logged_and_the_next_one_is_read(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    own_file, first = tmp_path / "foreshock_1.json", tmp_path / "foreshock_0.json"
    if content is not None:
        own_file.write_bytes(content)
    first.write_text('{"version": 1}')
    assert read_state(own_file, first) == {"version": 1}
    assert read_state(own_file) is None
    assert (str(own_file) in caplog.text) == (content not in (None, b"[1]"))


class StepsOnlyCheckpointer(titan_shape.CheckpointManager):
    """A checkpointer of a remote store that remembers only the last saved step."""

    last: ClassVar[int] = 0

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = curr_step % self.interval == 0
        StepsOnlyCheckpointer.last = curr_step if saved else self.last
        return saved

    def load(self, step: int = -1) -> bool:
        self.trainer.step = self.last
        return self.last > 0


@pytest.mark.promise("A15")
def test_state_is_saved_to_and_restored_from_torchtitans_remote_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    def trained(steps: int) -> Agent:
        trainer = titan_shape.Trainer(steps, tmp_path)
        trainer.checkpointer = StepsOnlyCheckpointer(trainer, tmp_path, 4)
        trainer.checkpointer.folder = "memory://bucket/run"
        agent = watch(trainer, **SETTINGS)
        if not StepsOnlyCheckpointer.last:
            agent.set_mode([(0, 1)], "exact_delta", "a person")
        trainer.train()
        trainer.close()
        return agent

    first, second = trained(5), trained(6)
    assert (second.run, second.modes()[0, 1]) == (first.run, "exact_delta")
    assert not list(tmp_path.iterdir())
    saved = wire.Checkpoint(step=4, path="memory://bucket/run/step-4", trainer="torchtitan")
    assert second_name(saved) is None
    assert "exclude memory://bucket/run/step-4 from the rule that deletes old checkpoints" in caplog.text
    write_state(second, "nosuchstore://bucket/state.json")
    assert read_state("nosuchstore://bucket/state.json") is None
    assert "the agent's state was not saved as nosuchstore://bucket/state.json; training continues" in caplog.text


@pytest.mark.promise("A17")
def test_symlink_in_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "checkpoint.pt", tmp_path / "foreshock_0.json"
    target.write_text("unchanged")
    (tmp_path / "foreshock_0.json.unfinished").symlink_to(target)
    with attach(tiny_gpt(), quiet=True) as agent:
        write_state(agent, path)
        saved = read_state(path)
        assert saved is not None
        assert saved["run"] == agent.run
    assert target.read_text() == "unchanged"
    assert not path.is_symlink()
