"""A real service on a free port, a fake agent that sends data to it, and a real Chromium that shows its page."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from selenium.webdriver import Chrome
from tests.e2e.running import absent, free_port

from foreshock.benchmarks.page import WINDOW, headless
from foreshock.contract.decision import because_of
from foreshock.contract.modes import DEFAULT_MITIGATION, mode_name, parse_mode
from foreshock.contract.slots import SLOT_COUNT, Slot
from foreshock.contract.wire import Ack, Array, Event, Policy, Sample, Switched
from foreshock.server.child import ServiceProcess
from foreshock.server.testing import FakeRank, post

ROWS = 4096


class Feeder(FakeRank):
    """A fake agent of one rank. Head 2 of layer 0 drifts; every value is a function of the step."""

    def __init__(self, client: httpx.Client, run: str, *, layers: int = 2, heads: int = 4, drift: float = 1.0) -> None:
        super().__init__(run, layers=layers, heads=range(heads))
        self.client, self.drift = client, drift
        self.shape = (layers, heads)
        self.step = 0
        self.modes = np.zeros((layers, heads), dtype=np.int32)
        self.recorded = frozenset({"states", "risk", "scalars", "norms"})

    def send(self, *events: Event) -> Ack:
        """Send one batch and return the acknowledgement with its commands."""
        response = post(self.client, self.batch(*events))
        assert response.status_code == 200, response.text
        return Ack.model_validate_json(response.content)

    def start(
        self, labels: dict[str, str] | None = None, policy: Policy = "observe", qk_clip: str | None = None
    ) -> None:
        """Send the start event."""
        started = self.started(policy=policy, mitigation=DEFAULT_MITIGATION, qk_clip=qk_clip)
        self.send(started.model_copy(update={"labels": labels or {}}))

    def train(self, samples: int, every: int = 10) -> None:
        """Send this many samples in batches of 100."""
        events: list[Event] = []
        for _ in range(samples):
            events.append(self._sample(every))
            if len(events) == 100:
                self.send(*events)
                events = []
        if events:
            self.send(*events)

    def _sample(self, every: int) -> Sample:
        since, self.step = self.step, self.step + every
        layers, heads = self.shape
        noise = np.random.default_rng(self.step)
        size = np.full(self.shape, 1.0) + 0.1 * np.arange(layers)[:, None] + noise.normal(0, 0.03, self.shape)
        if self.modes[0, 2 % heads] == 0:
            self.grown = self.drift * self.step / 100
        size[0, 2 % heads] += self.grown
        words = np.zeros((layers, heads, SLOT_COUNT), dtype=np.int64)
        floats = words.view(np.float64)
        words[..., Slot.ROWS] = ROWS
        words[..., Slot.TIED_ROWS_BF16] = np.minimum(ROWS, 10 * size).astype(np.int64)
        floats[..., Slot.SCORE_MAX] = floats[..., Slot.ROW_MAX_ABS] = 12 * size
        floats[..., Slot.SCORE_OFFSET_SUM] = -size * ROWS
        floats[..., Slot.SCORE_OFFSET_SUMSQ] = size**2 * ROWS
        floats[..., Slot.DELTA_BIAS_SUM] = noise.normal(0, 0.05, self.shape)
        floats[..., Slot.DELTA_BIAS_ABS] = 1
        floats[..., Slot.DELTA_BIAS_SUMSQ] = 1e-4
        count = layers * heads
        risk = Array.of(np.clip(size.reshape(count) / 10, 0, 1).astype(np.float32))
        norms = Array.of((7 + size.reshape(count)).astype(np.float32))
        scalars = {
            "loss": float(2.5 + 2 * np.exp(-self.step / 400) + noise.normal(0, 0.02)),
            "grad_norm": float(0.4 + abs(noise.normal(0, 0.05))),
            "learning_rate": 2e-3,
            "step_seconds": 0.02,
            "agent_seconds": 1e-4,
        }
        sample = Sample(
            step=self.step,
            since_step=since,
            unix_seconds=time.time(),
            states=Array.of(words.reshape(count, SLOT_COUNT)),
            modes=Array.of(self.modes.reshape(count)),
            risk=risk if "risk" in self.recorded else None,
            query_norm=norms if "norms" in self.recorded and self.step % (10 * every) == 0 else None,
        )
        return sample.model_copy(update=scalars if "scalars" in self.recorded else {})

    def warn(self, sentence: str = "Layer 0 head 2 drifts: its score offset left its peers and keeps growing.") -> None:
        """Raise the warning about head 2 of layer 0."""
        self.warning = self.verdict(
            self.step,
            name="offset-0-2",
            evidence={"offset": -6.25, "growth_per_1000_steps": 2.5, "delta_bias_z": 5.5},
            forecast_steps=2130.0,
            forecast_low_steps=1420.0,
            sentence=sentence,
        )
        self.send(self.warning)

    def propose(self) -> None:
        """Propose to switch head 2 of layer 0, as an agent does under policy approve."""
        self.send(
            Switched(
                id="proposal-0-2",
                step=self.step,
                verdict="offset-0-2",
                outcome="proposed",
                heads=((0, 2),),
                before=("plain",),
                after=("exact_delta",),
                reason=because_of(self.warning, "policy approve"),
            )
        )

    def obey(self) -> list[str]:
        """Receive the open commands, apply and answer them, and return their modes."""
        ack = self.send(self._sample(10))
        for command in ack.commands:
            heads = command.heads or tuple((i, j) for i in range(self.shape[0]) for j in range(self.shape[1]))
            before = tuple(mode_name(int(self.modes[layer, head])) for layer, head in heads)
            for layer, head in heads:
                self.modes[layer, head] = int(parse_mode(command.mode))
            self.send(self.answer(command, self.step).model_copy(update={"before": before}))
        return [command.mode for command in ack.commands]


class Service(ServiceProcess):
    """`foreshock serve` in its own process; it can be restarted on the same port and store."""

    def __init__(self, directory: Path, **settings: str) -> None:
        given = {f"FORESHOCK_{name.upper()}": value for name, value in settings.items()}
        super().__init__(directory, {"FORESHOCK_PORT": str(free_port()), **given})
        self.start(120)
        headers = {"Authorization": f"Bearer {settings['token']}"} if "token" in settings else {}
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False, headers=headers)

    def close(self) -> None:
        """Stop the service and close its client."""
        self.stop(60)
        self.client.close()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests; each test uses its own run names."""
    running = Service(tmp_path_factory.mktemp("service"), verify_steps="300")
    yield running
    running.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Service]:
    """A service that requires a token."""
    running = Service(tmp_path, token="correct-horse-battery")
    yield running
    running.close()


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        absent("chromium or chromedriver")
    chrome = headless(binary, driver, tmp_path_factory.mktemp("chromium"))
    yield chrome
    chrome.quit()


def console(chromium: Chrome) -> list[str]:
    """Errors and warnings of the page since the last call, without interventions of the browser."""
    entries = chromium.get_log("browser")  # type: ignore[no-untyped-call]
    messages = [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
    return [message for message in messages if "[Intervention]" not in message]


@pytest.fixture
def complaints(_chromium: Chrome) -> Callable[[], list[str]]:
    """A function that returns the errors and warnings of the page since its last call."""
    return lambda: console(_chromium)


@pytest.fixture
def chromium(_chromium: Chrome) -> Iterator[Chrome]:
    """A Chromium whose window shows the whole page; a test fails if the page writes an error to the console."""
    _chromium.set_window_size(*WINDOW)
    console(_chromium)
    yield _chromium
    complaints = console(_chromium)
    _chromium.get("about:blank")
    assert not complaints, complaints


@pytest.fixture
def feeder(service: Service, request: pytest.FixtureRequest) -> Feeder:
    """A fake agent whose run has the name of the test."""
    name = request.node.name.removeprefix("test_").replace("[", ":").replace("]", "")
    return Feeder(service.client, name[:100])
