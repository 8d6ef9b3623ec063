"""A long run in a folder records every sample, stops on request, resumes as if never interrupted, and keeps only the
newest complete checkpoints."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.multi_rank_training import TINY

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.texts import Corpus, standard_library
from foreshock.lab.training.long_run import LongRun
from foreshock.lab.training.run import Training
from foreshock.lab.training.variant import CONTROL, find_variant

VARIANT = find_variant("flash-untreated")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


Begin = Callable[..., LongRun]


@pytest.fixture
def begin(corpus: Corpus, tmp_path: Path) -> Begin:
    """Describes a run of the tiny recipe in a folder of this test, with a checkpoint every ten steps."""

    def described(folder: str = "run", **options: Any) -> LongRun:
        settings: dict[str, Any] = {"recipe": TINY, "variant": VARIANT, "seed": 3, "every_steps": 10, "corpus": corpus}
        return LongRun(**settings | {"folder": tmp_path / folder} | options)

    return described


def newest(run: LongRun) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(run.checkpoints[-1], weights_only=True)
    return saved


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints, or parts of them, are equal to the last bit."""
    leaves, others = (torch.utils._pytree.tree_leaves(each) for each in (one, other))
    return len(leaves) == len(others) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(leaves, others, strict=True)
    )


def test_run_without_its_trace_is_not_resumed(begin: Begin) -> None:
    run = begin(steps=10)
    run.train()
    run.trace.unlink()
    with pytest.raises(ValueError, match="put the trace of this run back"):
        begin(steps=20, resume=True).train()


def test_only_the_newest_three_checkpoints_remain(begin: Begin) -> None:
    begin(steps=45).train()
    assert [path.name for path in begin().checkpoints] == [f"step-{step:07d}.pt" for step in (30, 40, 45)]


def test_interrupted_save_leaves_the_previous_checkpoint_intact(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_while_saving(saved: dict[str, Any], path: Path) -> None:
        path.write_bytes(b"the first bytes of a checkpoint")
        raise MemoryError

    begin(steps=10).train()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", fail_while_saving)
        with pytest.raises(MemoryError):
            begin(steps=20, resume=True).train()
    assert newest(begin())["step"] == 10
    assert begin(steps=20, resume=True).train() == 20


def test_run_writes_a_trace_with_every_head_and_sample(begin: Begin) -> None:
    steps: list[int] = []
    run = begin("runs/one", variant=find_variant("exact-delta"), steps=12, on_step=lambda step, _: steps.append(step))
    assert run.train() == 12
    assert steps == list(range(1, 13))
    trace = read_trace(run.trace)
    assert trace.header["recipe"] == "key-bias-small"
    assert trace.heads == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert trace.samples[-1].step == 12
    assert (trace.started.labels["seed"], trace.started.labels["variant"]) == ("3", "exact-delta")
    modes = trace.samples[-1].modes
    assert modes is not None
    assert modes.numpy().tolist() == [1, 1, 1, 1]


COMPARED_PARTS = ("model", "optimizer", "batches", "random")


def append_losses_to(seen: list[float]) -> Callable[[int, Any], None]:
    return lambda step, loss: seen.append(float(loss))


@pytest.mark.full
def test_crashed_run_resumes_bit_for_bit_as_an_uninterrupted_one(begin: Begin) -> None:
    """The resumed run repeats the steps after its last checkpoint, although its trace was truncated."""
    expected: list[float] = []
    seen: list[float] = []

    def crash_at_27(step: int, loss: Any) -> None:
        if step == 27:
            raise KeyboardInterrupt

    whole = begin("whole", steps=44, on_step=append_losses_to(expected))
    assert whole.train() == 44
    with pytest.raises(KeyboardInterrupt):
        begin(steps=44, on_step=crash_at_27).train()
    saved = newest(begin())
    training = Training(TINY, VARIANT, 3, corpus=begin().corpus)
    with training.agent:
        training.restore(saved)
        assert training.agent.state_dict() == saved["agents"][0], "the agent continues with its state"
    trace = begin().trace
    trace.write_bytes(trace.read_bytes()[:-20])
    resumed = begin(steps=44, resume=True, on_step=append_losses_to(seen))
    assert resumed.train() == 44
    assert seen == expected[20:]
    one, other = newest(whole), newest(resumed)
    assert all(same(one[part], other[part]) for part in COMPARED_PARTS)
    traces = [read_trace(run.trace) for run in (whole, resumed)]
    assert [trace.steps.step.tolist() for trace in traces] == [list(range(1, 45))] * 2
    assert traces[0].steps.loss.tolist() == traces[1].steps.loss.tolist()
    before = [[sample.step for sample in trace.samples if sample.step <= 20] for trace in traces]
    assert before[0] == before[1]
    assert [trace.samples[-1].step for trace in traces] == [44, 44]


def test_time_limit_ends_a_run_with_a_checkpoint(begin: Begin) -> None:
    last_step = begin(steps=10**6, minutes=1 / 60).train()
    assert 1 < last_step < 10**6
    assert newest(begin())["step"] == last_step


def test_sigterm_ends_a_run_with_a_checkpoint_and_its_handler_is_restored(begin: Begin) -> None:
    def send_sigterm(step: int, loss: Any) -> None:
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert begin(steps=40, on_step=send_sigterm).train() == 15
    assert newest(begin())["step"] == 15
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "holds a run with step-0000010.pt; give --resume, or another folder"),
        ({"resume": True, "seed": 4}, "is of the seed 3, this run of 4"),
        ({"resume": True, "variant": CONTROL}, "is of the variant flash-untreated, this run of control"),
        ({"resume": True, "steps": 10}, "is of step 10 already; give more --steps"),
        ({"resume": True, "folder": "another"}, "holds no checkpoint to resume from; leave --resume out"),
        ({"resume": True, "corpus": Corpus(torch.ones(99, dtype=torch.uint8), "0" * 64, "ones")}, "is of the text"),
    ],
)
def test_run_that_cannot_start_or_resume_is_rejected_with_advice(
    begin: Begin, options: dict[str, Any], sentence: str
) -> None:
    begin(steps=10).train()
    arguments = dict(options)
    folder = arguments.pop("folder", "run")
    with pytest.raises(ValueError, match=sentence):
        begin(folder, **{"steps": 20} | arguments).train()


COMMAND = ("lab", "run", "key-bias-small", "--variant", "flash-untreated", "--seed", "5")
TRACE = "key-bias-small_flash-untreated_seed5.jsonl.gz"


def _torchrun(folder: Path, *words: str) -> "subprocess.Popen[str]":
    launch = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, "-P", "-m", *launch, "-m", "foreshock", *COMMAND, "--folder", str(folder), *words]
    variables = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder.parent / "cache")}
    return subprocess.Popen(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _wait(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        out, _ = process.communicate()
    finally:
        process.kill()
    return process.returncode, out


@pytest.mark.full
def test_two_ranks_ended_by_torchrun_resume_bit_for_bit(tmp_path: Path) -> None:
    """Runs the real command under torchrun three times; each process imports PyTorch."""
    folder = tmp_path / "run"
    process = _torchrun(folder)
    trace = folder / TRACE
    while not trace.exists() and process.poll() is None:  # from now on every rank handles SIGTERM
        time.sleep(0.2)
    process.terminate()
    _, out = _wait(process)
    [stopped] = (folder / "checkpoints").iterdir()
    step = int(torch.load(stopped, weights_only=True)["step"])
    assert step < 6500
    assert f"ended at step {step} of 6500; continue with the same command and --resume" in out, out[-3000:]
    status, out = _wait(_torchrun(folder, "--resume", "--steps", str(step + 20)))
    assert status == 0, out[-3000:]
    status, out = _wait(_torchrun(tmp_path / "whole", "--steps", str(step + 20)))
    assert status == 0, out[-3000:]
    one, other = (
        torch.load(tmp_path / name / "checkpoints" / f"step-{step + 20:07d}.pt", weights_only=True)
        for name in ("run", "whole")
    )
    assert len(one["agents"]) == 2
    assert all(same(one[part], other[part]) for part in COMPARED_PARTS)
    traces = [read_trace(tmp_path / name / TRACE) for name in ("run", "whole")]
    assert traces[0].steps.loss.tolist() == traces[1].steps.loss.tolist()
