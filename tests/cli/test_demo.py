"""`foreshock demo` from start to end, with a real service and without PyTorch."""

import signal
import subprocess
import sys
import time

import httpx
import pytest
from rich.console import Console
from tests.cli.typed import foreshock
from tests.lab.page_console import PageConsole

from foreshock.cli import demo
from foreshock.lab.shown.story import LEFT_ALONE, NAMES, SWITCHED, recordings

WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "matplotlib", "transformers"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, NoTorch())
from foreshock.cli.main import app
app(sys.argv[1:])
"""


@pytest.mark.full
def test_demo_shows_every_completed_run_and_prints_key_events() -> None:
    terminal = PageConsole("Left alone, the loss of")
    story = demo.play(Console(file=terminal, width=200), port=0, steps_per_second=None)
    text = terminal.getvalue()
    for name in NAMES:
        last = recordings()[name].samples[-1].step
        assert (terminal.seen[name]["last_step"], terminal.seen[name]["status"]) == (last, "completed")
        assert story.records[name].warnings
    assert f"step {story.records[SWITCHED].switches[0].step:>6,}  switched" in text
    assert f"step {story.dangerous[LEFT_ALONE]:>6,}  left-alone     its largest score reaches 512." in text


@pytest.mark.full
def test_demo_runs_without_pytorch_and_prints_a_warning() -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("Recorded failures, played back.")
            assert any("left-alone     warning: Layer " in line for line in process.stdout)
        finally:
            process.send_signal(signal.SIGINT)  # the demo stops its service too


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_demo_stops_its_service(signal_number: signal.Signals) -> None:
    command = [sys.executable, "-P", "-m", "foreshock", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as process:
        assert process.stdout is not None
        page = next(line for line in process.stdout if line.startswith("Live page: ")).split()[-1]
        assert httpx.get(page, trust_env=False).status_code == 200
        process.send_signal(signal_number)
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(page, trust_env=False)
        except httpx.ConnectError:
            return
        except httpx.TransportError:
            pass  # the service ended during the request
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_demo_train_without_pytorch_reports_the_missing_package() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_TORCH, "demo", "--train"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "is not installed" in done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(["--seed", "3"], "add --train"), (["--train", "--steps-per-second", "9"], "leave out --train")],
)
def test_demo_rejects_options_of_the_other_mode(options: list[str], sentence: str) -> None:
    done = foreshock("demo", *options)
    assert (done.exit_code, sentence in done.stderr) == (1, True)
