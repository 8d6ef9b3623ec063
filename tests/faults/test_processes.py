"""Real processes: exiting while the server hangs, stopped, forked, with a full spool."""

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.hostile_server import HostileServer, acknowledge, answer, hang, hostile_server
from tests.faults.sending import BUSY_SECONDS, eventually
from tests.monitor.tiny_models import tiny_gpt

from foreshock.contract import wire
from foreshock.monitor import Agent, AgentConfig, attach

SCRIPT = Path(__file__).parent / "training.py"
QUICK: dict[str, Any] = {
    "run": "a-run",
    "sample_every_steps": 1,
    "quiet": True,
}


@pytest.fixture(autouse=True)
def send_every_20_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "send_every_seconds", 0.02)


@contextmanager
def training(
    url: str, spool: Path, ending: str, *, file_bytes: int = resource.RLIM_INFINITY
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The training script after its tenth step, and its boot. Its files cannot grow beyond `file_bytes`."""
    command = [sys.executable, "-P", str(SCRIPT), url, str(spool), ending]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
    ) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().split()
            assert ready[:1] == ["ready"], process.communicate()[1]
            yield process, ready[1]
        finally:
            process.kill()


@pytest.mark.promise("A9")
@pytest.mark.parametrize(
    ("ending", "codes"),
    [
        ("exit", {3}),
        pytest.param("raise", {1}, marks=pytest.mark.full),
        pytest.param("os._exit", {3}, marks=pytest.mark.full),
        pytest.param("close twice", {0}, marks=pytest.mark.full),
        pytest.param("interrupt", {130, -signal.SIGINT}, marks=pytest.mark.full),
        pytest.param("SIGTERM", {-signal.SIGTERM}, marks=pytest.mark.full),
    ],
)
def test_process_exits_promptly_with_its_own_status_while_the_server_hangs(
    ending: str, codes: set[int], tmp_path: Path
) -> None:
    script_ending = "never" if ending == "SIGTERM" else ending
    with hostile_server(hang) as server, training(server.url, tmp_path, script_ending) as (process, _):
        if ending == "SIGTERM":
            process.terminate()
        if ending == "interrupt":
            # an import in a thread at this moment makes CPython lose the exit status of the interrupt
            eventually("a request", lambda: server.requests_at)
        output, errors = process.communicate("\n", timeout=300)
        assert process.returncode in codes, errors
        log_lines = [line[:24] for line in errors.splitlines() if "foreshock:" in line]
        logs_unsent = ending not in ("os._exit", "SIGTERM")
        assert log_lines == ["foreshock: not sent yet:"] * logs_unsent
        assert ("RuntimeError: an error of the user" in errors) == (ending == "raise")
        assert ("Traceback" in errors) == (ending in ("raise", "interrupt"))
        assert "ignored" not in errors
        if not logs_unsent:
            assert output == ""  # no exit handler ran or delayed the exit
        else:
            assert float(output.removeprefix("left after")) < 2.0 + BUSY_SECONDS


@pytest.mark.promise("A5")
def test_spool_at_the_file_size_limit_loses_no_sample(tmp_path: Path) -> None:
    limit = 2**16
    with (
        hostile_server(answer(503)) as server,
        training(server.url, tmp_path, "never", file_bytes=limit) as (process, _),
    ):
        eventually("a full spool", lambda: sum(p.stat().st_size for p in tmp_path.rglob("*.spool")) > limit - 2**14)
        time.sleep(0.5)
        server.behaviour = acknowledge
        server.batches.clear()
        eventually(
            "more bytes than the spool can store", lambda: sum(len(str(batch)) for batch in server.batches) > 2 * limit
        )
        assert process.poll() is None
        samples = [(event["since_step"], event["step"]) for event in server.events("sample")]
    assert samples == [(step, step + 1) for step in range(len(samples))]


def assert_no_burst(server: HostileServer, since: float, send_every_seconds: float) -> None:
    """After a stall, requests arrive at the usual rate, and the stall causes no verdict."""
    arrived = len([moment for moment in server.requests_at if moment > since])
    assert arrived <= 2 + (time.monotonic() - since) / send_every_seconds
    assert not server.events("verdict")


@pytest.mark.full
@pytest.mark.promise("A10")
@pytest.mark.parametrize("stopped", ["once", "90 % of the time"])
def test_stopped_process_resumes_sending_without_a_burst(stopped: str, tmp_path: Path, sizes: Any) -> None:
    one_long_stop = stopped == "once"
    slices = 1 if one_long_stop else sizes("slow_slices", quick=20, long=300)
    seconds = sizes("stopped_seconds", quick=1, long=30) if one_long_stop else 0.09
    with hostile_server(acknowledge) as server, training(server.url, tmp_path, "never") as (process, _):
        began, before = time.monotonic(), len(server.requests_at)
        for _ in range(slices):
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        if one_long_stop:
            began += seconds  # requests in flight at the stop are not part of a burst
        assert_no_burst(server, began, 0.05)
        eventually("more batches", lambda: len(server.requests_at) >= before + 5)


@pytest.mark.promise("A10")
def test_held_gil_only_delays_the_sender(tmp_path: Path, sizes: Any) -> None:
    milliseconds = sizes("gil_milliseconds", quick=500, long=5000)
    with hostile_server(acknowledge) as server:
        agent = running_agent(server, tmp_path)
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(1000 * milliseconds)  # PyDLL does not release the GIL
        for _ in range(50):
            agent.step(1.0)
            time.sleep(0.002)
        assert_no_burst(server, began, 0.02)
        agent.close()
        assert [event["step"] for event in server.events("sample")] == [*range(1, agent.current_step + 1)]


def running_agent(server: HostileServer, spool: Path) -> Agent:
    agent = attach(tiny_gpt(), **QUICK, url=server.url, spool_directory=spool)
    agent.step(1.0)
    eventually("a batch", lambda: server.batches)
    return agent


@pytest.mark.promise("A6")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_sends_nothing_and_parent_continues(tmp_path: Path, sizes: Any) -> None:
    with hostile_server(acknowledge) as server:
        agent = running_agent(server, tmp_path)
        for _ in range(sizes("forks", quick=3, long=100)):
            agent.step(1.0)  # the sender's thread is active at the fork and may hold locks
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:  # an exception must not leave this branch
                os.dup2(writing, 2)
                signal.alarm(20)
                agent.step(1.0)
                agent.state_dict()
                agent.close()
                agent.detach()
                gc.collect()
                alive = [t for t in threading.enumerate() if t.name.startswith("foreshock")]
                os._exit(len(alive))
            os.close(writing)
            _, status = os.waitpid(child, 0)
            with os.fdopen(reading) as errors:
                assert errors.read() == ""
            assert status == 0
        before = len(server.batches)
        agent.step(2.0)
        eventually("the parent's next batch", lambda: len(server.batches) > before)
        agent.close()
        assert server.events("finished")
        assert server.sequences() == [*range(1, len(server.batches) + 1)]


@pytest.mark.promise("A6")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.full) for method in ("spawn", "forkserver"))]
)
def test_data_loader_workers_run_with_an_attached_agent(method: str, tmp_path: Path, sizes: Any) -> None:
    workers = sizes("loader_workers", quick=1, long=4)
    with hostile_server(acknowledge) as server:
        agent = running_agent(server, tmp_path)
        rows = torch.utils.data.TensorDataset(torch.arange(8))
        loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=workers, multiprocessing_context=method)
        assert torch.cat([row for (row,) in loader]).tolist() == [*range(8)]
        agent.step(2.0)
        agent.close()
        assert server.events("finished")


@pytest.mark.promise("A16")
def test_batches_contain_no_paths_arguments_variables_or_host_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_PRIVATE_VARIABLE", "a-private-value")
    with hostile_server(acknowledge) as server:
        agent = attach(tiny_gpt(), **QUICK, url=server.url, spool_directory=tmp_path, labels={"team": "vision"})
        agent.step(1.0)
        eventually("a batch", lambda: server.batches)
        agent.close()
    (started,) = server.events("started")
    assert set(started) == set(wire.Started.model_fields)
    assert set(started["versions"]) <= {"python", "torch", "foreshock", "transformers", "triton"}
    text = str(server.batches)
    for private in (
        "a-private-value",
        str(tmp_path),
        str(Path.cwd()),
        sys.argv[0],
        os.uname().nodename,
        str(Path.home()),
    ):
        assert private not in text or len(private) < 4
