"""`foreshock demo` from its first line to its last, against a real service, without PyTorch."""

import signal
import subprocess
import sys
import time

import httpx
import pytest
from rich.console import Console
from tests.cli.typed import foreshock
from tests.lab.looking import Looking

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
def test_the_whole_demo_shows_all_runs_on_its_page_and_tells_what_happened() -> None:
    said = Looking("Left alone, the loss of")
    story = demo.play(Console(file=said, width=200), port=0, steps_per_second=None)
    text = said.getvalue()
    for name in NAMES:
        last = recordings()[name].samples[-1].step
        assert (said.seen[name]["last_step"], said.seen[name]["status"]) == (last, "completed")
        assert story.records[name].warnings
    assert f"step {story.records[SWITCHED].switches[0].step:>6,}  switched" in text
    assert f"step {story.dangerous[LEFT_ALONE]:>6,}  left-alone     its largest score reaches 512." in text


@pytest.mark.full
def test_the_demo_needs_no_pytorch_and_warns_of_the_run_that_is_left_alone() -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("Recorded failures, played back.")
            assert any("left-alone     warning: Layer " in line for line in process.stdout)
        finally:
            process.send_signal(signal.SIGINT)  # it ends its service too


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_demo_that_is_killed_leaves_no_service_behind(number: signal.Signals) -> None:
    command = [sys.executable, "-P", "-m", "foreshock", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as process:
        assert process.stdout is not None
        page = next(line for line in process.stdout if line.startswith("Live page: ")).split()[-1]
        assert httpx.get(page, trust_env=False).status_code == 200
        process.send_signal(number)
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(page, trust_env=False)
        except httpx.ConnectError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_training_needs_pytorch_and_says_how_to_get_it() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_TORCH, "demo", "--train"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "is not installed" in done.stderr


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(["--seed", "3"], "add --train"), (["--train", "--steps-per-second", "9"], "leave out --train")],
)
def test_an_option_of_the_other_half_is_refused(given: list[str], sentence: str) -> None:
    done = foreshock("demo", *given)
    assert (done.exit_code, sentence in done.stderr) == (1, True)
