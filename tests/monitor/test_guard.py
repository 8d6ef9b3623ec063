"""The agent's own faults are contained, counted and logged rarely, and slow detectors do not stop training."""

import itertools
import logging
import math
import signal
import threading
import time
from collections import Counter
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.doubles import ScriptedDetectors
from tests.monitor.tiny_models import tiny_gpt, train_step
from tests.monitor.watched_training import listening, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from foreshock.contract import wire
from foreshock.monitor import attach, sampling
from foreshock.monitor.attention import watched_layer
from foreshock.monitor.detect.detectors import Readings
from foreshock.monitor.guard import FAULTS_IN_A_ROW, LOG_EVERY_SECONDS, Guard, default_torch_modes
from foreshock.monitor.sampling import Counted, DetectorResult, DetectorThread

SETTINGS: dict[str, Any] = {"sample_every_steps": 1, "quiet": True, "url": None}


@pytest.mark.promise("A9")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_are_never_suppressed(error: type[BaseException]) -> None:
    with pytest.raises(error), Guard("part", Counter()):
        raise error


@pytest.mark.promise("A15")
def test_component_is_disabled_after_three_consecutive_faults(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = Guard("part", Counter(), clock=lambda: 0.0)
    for outcome in (1, 1, 0, 1, 1):
        with guard:
            if outcome:
                raise RuntimeError("a fault")
    assert guard.on
    for _ in range(FAULTS_IN_A_ROW - 2):
        with guard:
            raise RuntimeError("a fault")
    done: list[str] = []
    guard.run(done.append, "a step")
    guard.finish(done.append, "the end")
    assert done == ["the end"]
    assert [record.message.endswith("; part is off from now on") for record in caplog.records] == [False, True]
    assert not guard.on


@pytest.mark.promise("A15")
@pytest.mark.promise("A12")
def test_fault_of_a_component_is_logged_at_most_every_20_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    guard = Guard("part", Counter(), clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "foreshock"):
        for second in range(100):
            now[0] = float(second)
            with guard:
                if second % 2:
                    raise RuntimeError("a fault")
    assert len(caplog.records) == 100 // int(LOG_EVERY_SECONDS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_torch_modes_disables_autocast_and_inference_mode(device: str) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        with default_torch_modes(torch.device(device)):
            found = weight @ weight
        assert (weight @ weight).dtype == torch.bfloat16
    assert (found.dtype, found.is_inference(), found.requires_grad) == (torch.float32, False, False)


def raise_error(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a bug in foreshock")


BREAKAGES: dict[str, tuple[str, str]] = {
    "note": ("_sampler.collector.note", "loss"),
    "crisis": ("_crisis.look", "crisis"),
    "snapshot": ("_sampler.collector.snapshot", "collector"),
    "landed": ("_sampler.collector.landed", "collector"),
    "norms": ("_sampler.norms.measure", "norms"),
    "detectors": ("detectors.update", "detectors"),
    "sender": ("_outbox.sender.put", "sender"),
    "checkpoints": ("_checkpoints.follow", "checkpoints"),
    "commands": ("_outbox.sender.commands", "switch"),
    "answers": ("_switchboard.settle", "answers"),
}


@pytest.mark.promise("A15")
@pytest.mark.parametrize("where", BREAKAGES)
def test_training_continues_if_any_component_of_the_agent_raises(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, component = BREAKAGES[where]
    model = tiny_gpt()
    sending = {"url": "http://127.0.0.1:9", "spool_directory": None} if "sender" in path else {}
    with attach(model, **{**SETTINGS, **sending, "norms_every_steps": 1}) as agent:
        train(agent, model, 1)
        owner, _, name = path.rpartition(".")
        monkeypatch.setattr(attrgetter(owner)(agent), name, raise_error)
        train(agent, model, range(1, 6))
    assert 1 <= agent.faults[component] <= FAULTS_IN_A_ROW


@pytest.mark.promise("A15")
def test_subscriber_that_raises_affects_neither_training_nor_other_subscribers() -> None:
    model = tiny_gpt()
    with listening(model, strict=False) as (agent, listener):
        agent.subscribe(raise_error)
        train(agent, model, 1)
    assert [e.kind for e in listener.events][:2] == ["started", "sample"]
    assert agent.faults["sinks"] >= 1


@pytest.mark.promise("A15")
def test_attention_falls_back_to_pytorch_if_the_operator_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a kernel that cannot be built")

    expected = train_step(tiny_gpt(), torch.optim.SGD([torch.zeros(1)], lr=0.1), 0)
    model = tiny_gpt()
    with attach(model, **SETTINGS) as agent:
        monkeypatch.setattr(watched_layer, "flash_attention", refuse)
        [got] = train(agent, model, 1)
    torch.testing.assert_close(got, expected)


@pytest.mark.promise("A11")
def test_nonfinite_losses_and_gradient_norms_are_counted_and_serialised() -> None:
    with listening(tiny_gpt(), sample_every_steps=5) as (agent, listener):
        for value in (1.0, float("nan"), torch.tensor(float("inf")), 2.0, 3.0):
            agent.step(value, grad_norm=value)
    samples = listener.of(wire.Sample)
    assert [s.step for s in samples] == [1, 2, 3, 4, 5], "every step is sampled after a nonfinite one"
    assert [s.loss_nonfinite_steps for s in samples] == [0, 1, 1, 0, 0]
    assert [s.grad_norm_nonfinite_steps for s in samples] == [0, 1, 1, 0, 0]
    reattached = [wire.Sample.model_validate_json(s.model_dump_json()).loss for s in samples]
    np.testing.assert_equal(reattached, [1.0, math.nan, math.inf, 2.0, 3.0])


@pytest.mark.promise("A7")
def test_listener_signal_handler_and_log_handler_may_call_the_agent() -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            agent.step(5.0)

    handler = Handler()
    logging.getLogger("foreshock").addHandler(handler)
    with listening(tiny_gpt()) as (agent, listener):
        agent.subscribe(lambda event: agent.step(9.0))
        before = signal.signal(signal.SIGALRM, lambda number, frame: agent.step(7.0))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for _ in range(300):
                agent.step(1.0)  # the first one also logs that no attention was recorded
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            logging.getLogger("foreshock").removeHandler(handler)
    samples = listener.of(wire.Sample)
    assert all(a.step == b.since_step for a, b in itertools.pairwise(samples))
    assert 9.0 not in [sample.loss for sample in samples], "a step within a step is ignored"
    assert len(samples) >= 300
    assert agent.faults == {}


@pytest.mark.promise("A12")
@pytest.mark.parametrize("jump", [-3600.0, 86400.0, 0.0])
def test_durations_do_not_depend_on_the_wall_clock(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [1e9]

    def jumping() -> float:
        wall[0] += jump
        return wall[0]

    monkeypatch.setattr(time, "time", jumping)
    with listening(tiny_gpt(), sample_every_steps=2) as (agent, listener):
        for _ in range(9):
            agent.step(1.0)
    samples = listener.of(wire.Sample)
    assert [s.step for s in samples] == [1, 2, 4, 6, 8, 9]
    for s in samples:
        assert s.step_seconds is not None
        assert 0 <= s.step_seconds < 60
        assert s.agent_seconds is not None
        assert 0 <= s.agent_seconds < 60


def test_sharded_gradient_norm_is_reported_once_and_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        part, whole = (DTensor.from_local(torch.tensor(2.0), mesh, [kind]) for kind in (Partial(), Replicate()))
        with caplog.at_level("WARNING", "foreshock"), listening(tiny_gpt(), run="ranks") as (agent, listener):
            for norm in (part, part, whole):
                agent.step(1.0, grad_norm=norm)
    finally:
        torch.distributed.destroy_process_group()
    assert [s.grad_norm for s in listener.of(wire.Sample)] == [None, None, 2.0]
    assert [s.loss for s in listener.of(wire.Sample)] == [1.0] * 3
    assert caplog.text.count("pass grad_norm.full_tensor()") == 1
    assert agent.faults == {}
    assert (agent.config.rank, agent.config.world_size) == (0, 2)  # taken from torch.distributed


@pytest.mark.parametrize("where", ["a detector", "a listener", "the sender"])
@pytest.mark.parametrize("strict", [True, False])
def test_fault_while_closing_leaves_the_model_detached(where: str, strict: bool, monkeypatch: Any) -> None:
    model = tiny_gpt()
    before = [(name, type(module), module.forward.__qualname__) for name, module in model.named_modules()]
    agent = attach(model, **{**SETTINGS, "sample_every_steps": 1000, "url": "http://127.0.0.1:9"}, strict=strict)
    train(agent, model, 3)  # the last two steps are sampled on close
    if where == "a detector":
        monkeypatch.setattr(agent.detectors, "update", raise_error)
    elif where == "a listener":
        agent.subscribe(raise_error)
    else:
        monkeypatch.setattr("foreshock.monitor.transport.sender.Sender.close", raise_error)
    if strict:
        with pytest.raises(RuntimeError, match="a bug in foreshock"):
            agent.close()
    else:
        agent.close()
    assert sum(agent.faults.values()) >= 1
    assert [(name, type(module), module.forward.__qualname__) for name, module in model.named_modules()] == before
    with attach(model, **SETTINGS) as reattached:  # the first agent left nothing behind
        train(reattached, model, 1)
    agent.close()
    assert agent._undo is None


@pytest.mark.promise("A1")
def test_losses_are_not_collected_after_the_collector_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(tiny_gpt(), **SETTINGS) as agent:

        def out_of_memory(*_: object, **__: object) -> bool:
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(agent._sampler.collector, "snapshot", out_of_memory)
        for _ in range(100):
            agent.step(torch.tensor(1.0), torch.tensor(1.0))
        assert agent.faults == {"collector": FAULTS_IN_A_ROW}
        assert len(agent._sampler.collector._losses) == len(agent._sampler.collector._grad_norms) == FAULTS_IN_A_ROW


def counted(step: int) -> Counted:
    words, modes, none = np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int32), np.empty(0)
    fields: dict[str, Any] = dict.fromkeys(("learning_rate", "step_seconds", "agent_seconds"))
    lists: dict[str, Any] = {"losses": none, "grad_norms": none, "norms": {}}
    return Counted(step=step, since_step=step - 1, words=words, modes=modes, **lists, **fields)


def steps(detected: list[DetectorResult]) -> list[int]:
    return [result.counted.step for result in detected]


@pytest.mark.promise("A10")
def test_stuck_detector_blocks_a_step_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "LONGEST_WAIT_SECONDS", 0.05)
    released = threading.Event()

    def detect_when_free(sample: Counted) -> DetectorResult:
        released.wait()
        return DetectorResult(sample, [], None)

    detectors = DetectorThread(detect_when_free)
    detectors.put(counted(1))
    assert detectors.take() == []
    monkeypatch.setattr(sampling, "LONGEST_WAIT_SECONDS", 3600.0)
    detectors.put(counted(2))
    assert detectors.take() == []  # after a timeout, take does not wait again
    released.set()
    results: list[DetectorResult] = []
    while len(results) < 2:
        time.sleep(0.01)
        results += detectors.take()
    assert steps(results) == [1, 2]
    detectors.put(counted(3))
    assert steps(detectors.take()) == [3]


@pytest.mark.promise("A15")
def test_detector_error_is_raised_in_take_and_the_thread_continues() -> None:
    def detect_first_badly(sample: Counted) -> DetectorResult:
        if sample.step == 1:
            raise ZeroDivisionError
        return DetectorResult(sample, [], None)

    detectors = DetectorThread(detect_first_badly)
    detectors.put(counted(1))
    detectors.put(counted(2))
    with pytest.raises(ZeroDivisionError):
        detectors.take()
    assert steps(detectors.take()) == [2]


class SlowDetectors(ScriptedDetectors):
    """Detectors that block on the second sample and record the names of the threads that use them."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.free, self.threads = threading.Event(), set[str]()

    def update(self, readings: Readings) -> list[wire.Verdict]:
        self.threads.add(threading.current_thread().name)
        if len(self.readings) == 1:
            self.free.wait(20)
        return super().update(readings)

    @property
    def active(self) -> list[wire.Verdict]:
        self.threads.add(threading.current_thread().name)
        return self.standing


@pytest.mark.parametrize("in_time", [True, False])
def test_only_the_detector_thread_uses_the_detectors_also_for_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    monkeypatch.setattr(sampling, "LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(sampling, "LONGEST_LAST_WAIT_SECONDS", 20.0 if in_time else 0.05)
    with attach(tiny_gpt(), sample_every_steps=1, quiet=True, url=None) as agent:
        agent.detectors = slow = SlowDetectors(4)
        for _ in range(4):
            agent.step(1.0)
        if in_time:
            threading.Timer(0.3, slow.free.set).start()
        saved = agent.state_dict()
        assert saved["detectors"] == ({"seen": 4} if in_time else None)  # None instead of a partial update
        slow.free.set()
        monkeypatch.setattr(sampling, "LONGEST_LAST_WAIT_SECONDS", 20.0)
        assert agent.state_dict()["detectors"] == {"seen": 4}
        agent.step(1.0)
    assert [reading.step for reading in slow.readings] == [1, 2, 3, 4, 5]
    assert slow.threads == {"foreshock-detectors"}


@pytest.mark.parametrize(
    "part",
    [
        *("probe.measure", "probe.OutputSums.add"),
        *(f"gradient_rows.{name}" for name in ("saved_by", "chosen_rows", "GradientCheck.compare")),
    ],
)
def test_probe_fault_is_logged_once_and_training_is_bit_identical(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = tiny_gpt(), tiny_gpt()
    monkeypatch.setattr(f"foreshock.monitor.attention.{part}", raise_error)
    with attach(model, **SETTINGS) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        losses = train(agent, model, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert agent.faults == {"probe": 1}
    assert all(map(torch.equal, losses, [train_step(plain, optimizer, step) for step in range(3)]))
    assert sum("the probe is off from now on" in record.message for record in caplog.records) == 1
