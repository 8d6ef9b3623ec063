"""A run in a folder: it records all, ends when asked to, and resumes as if it had not. Its checkpoints are whole ones,
the newest few, and the one before the first warning."""

import json
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
from tests.lab.ranks_of_a_run import TINY
from tests.monitor.doubles import ScriptedDetectors, verdict

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.texts import Corpus, standard_library
from foreshock.lab.training import long_run as module
from foreshock.lab.training.long_run import KEPT, Checkpoints, LongRun
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
    path = run.checkpoints.newest()
    assert path is not None
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    return saved


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints, or parts of them, are equal to the last bit."""
    leaves, others = (torch.utils._pytree.tree_leaves(each) for each in (one, other))
    return len(leaves) == len(others) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(leaves, others, strict=True)
    )


def kept(folder: Path) -> list[int]:
    return [int(torch.load(path, weights_only=True)["step"]) for path in Checkpoints(folder).all()]


@pytest.mark.parametrize(("warned_at", "before"), [(None, []), (1200, [1000]), (1500, [1000])])
def test_the_newest_few_stay_and_the_last_one_before_the_first_warning(
    warned_at: int | None, before: list[int], tmp_path: Path
) -> None:
    assert Checkpoints(tmp_path / "none").newest() is None
    for step in range(500, 4001, 500):
        heard = warned_at if warned_at is not None and step >= warned_at else None
        Checkpoints(tmp_path).write({"step": step}, warned_at=heard)
    assert kept(tmp_path) == before + [2500 + 500 * number for number in range(1, KEPT + 1)]
    assert Checkpoints(tmp_path).newest() == tmp_path / "step-0004000.pt"


class Torn:
    """What a process dies of while it writes it."""

    def __reduce__(self) -> Any:
        raise MemoryError


def test_one_that_is_torn_takes_no_whole_ones_place(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    whole = checkpoints.write({"step": 500, "weights": torch.ones(1000)}, warned_at=None)
    for step in (500, 1000):
        with pytest.raises(MemoryError):
            checkpoints.write({"step": step, "weights": torch.zeros(1000), "torn": Torn()}, warned_at=None)
    assert checkpoints.newest() == whole
    assert torch.load(whole, weights_only=True)["weights"].sum() == 1000
    assert len(list(tmp_path.iterdir())) > 1, "nothing was torn"
    checkpoints.write({"step": 1000}, warned_at=None)
    assert kept(tmp_path) == [500, 1000]


def test_a_run_writes_a_trace_of_every_head_and_sample(begin: Begin) -> None:
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


CARRIED = ("model", "optimizers", "batches", "random")


def losses_into(seen: list[float]) -> Callable[[int, Any], None]:
    return lambda step, loss: seen.append(float(loss))


@pytest.mark.full
def test_a_run_that_died_and_resumes_is_the_one_that_was_never_interrupted(begin: Begin) -> None:
    """What it made after its last checkpoint is made again, and its trace is torn."""
    expected: list[float] = []
    seen: list[float] = []

    def dies(step: int, loss: Any) -> None:
        if step == 27:
            raise KeyboardInterrupt

    whole = begin("whole", steps=44, on_step=losses_into(expected))
    assert whole.train() == 44
    with pytest.raises(KeyboardInterrupt):
        begin(steps=44, on_step=dies).train()
    saved = newest(begin())
    training = Training(TINY, VARIANT, 3, corpus=begin().corpus)
    module._take_up(training, begin().checkpoints.all()[-1], same_variant=True)
    with training.agent:
        assert training.agent.state_dict() == saved["agents"][0], "the agent continues with what it knew"
    trace = begin().trace
    trace.write_bytes(trace.read_bytes()[:-20])
    resumed = begin(steps=44, resume=True, on_step=losses_into(seen))
    assert resumed.train() == 44
    assert seen == expected[20:]
    one, other = newest(whole), newest(resumed)
    assert all(same(one[part], other[part]) for part in CARRIED)
    traces = [read_trace(run.trace) for run in (whole, resumed)]
    assert [trace.steps.step.tolist() for trace in traces] == [list(range(1, 45))] * 2
    assert traces[0].steps.loss.tolist() == traces[1].steps.loss.tolist()
    assert traces[1].samples[-1].step == 44
    lines = (resumed.folder / "progress.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 30, 40, 44]


def test_time_that_is_over_ends_a_run_with_a_checkpoint(begin: Begin) -> None:
    came_to = begin(steps=10**6, minutes=1 / 60).train()
    assert 1 < came_to < 10**6
    assert newest(begin())["step"] == came_to


def test_sigterm_ends_a_run_with_a_checkpoint_and_is_as_before_afterwards(begin: Begin) -> None:
    def told(step: int, loss: Any) -> None:
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert begin(steps=40, on_step=told).train() == 15
    assert newest(begin())["step"] == 15
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.full
def test_another_variant_starts_from_the_checkpoint_before_the_warning(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training.__init__

    def scripted(self: Training, *given: Any, **options: Any) -> None:
        run(self, *given, **options)
        self.agent.detectors = ScriptedDetectors(4, {15: [verdict(1, 0, step=15)]})

    with monkeypatch.context() as patched:
        patched.setattr(Training, "__init__", scripted)
        begin(steps=80).train()
    checkpoints = begin().checkpoints.all()
    assert [path.name for path in checkpoints] == [f"step-{step:07d}.pt" for step in (10, 60, 70, 80)]
    assert newest(begin())["warned"] == [15]
    seen: list[float] = []
    twin = begin("twin", variant=CONTROL, branch_from=checkpoints[0], steps=20, on_step=losses_into(seen))
    assert twin.train() == 20
    assert len(seen) == 10
    assert newest(twin)["warned"] == []
    assert read_trace(twin.trace).steps.step.tolist() == list(range(11, 21))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "holds a run with step-0000010.pt; give --resume, or another folder"),
        ({"resume": True, "seed": 4}, "is of the seed 3, this run of 4"),
        ({"resume": True, "variant": CONTROL}, "is of the variant flash-untreated, this run of control"),
        ({"resume": True, "steps": 10}, "is of step 10 already; give more --steps"),
        ({"resume": True, "branch_from": Path("x.pt")}, "give --branch-from at its first start alone"),
        ({"resume": True, "folder": "another"}, "holds no checkpoint to resume from; leave --resume out"),
        ({"resume": True, "corpus": Corpus(torch.ones(99, dtype=torch.uint8), "0" * 64, "ones")}, "is of the text"),
    ],
)
def test_what_cannot_go_on_is_refused_with_what_to_do(begin: Begin, options: dict[str, Any], sentence: str) -> None:
    begin(steps=10).train()
    asked = dict(options)
    folder = asked.pop("folder", "run")
    with pytest.raises(ValueError, match=sentence):
        begin(folder, **{"steps": 20} | asked).train()


COMMAND = ("lab", "run", "key-bias-small", "--variant", "flash-untreated", "--seed", "5")
TRACE = "key-bias-small_flash-untreated_seed5.jsonl.gz"


def _torchrun(folder: Path, *words: str) -> "subprocess.Popen[str]":
    launch = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, "-P", "-m", *launch, "-m", "foreshock", *COMMAND, "--folder", str(folder), *words]
    alone = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder.parent / "cache")}
    return subprocess.Popen(
        command, env=os.environ | alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _done(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        out, _ = process.communicate()
    finally:
        process.kill()
    return process.returncode, out


@pytest.mark.full
def test_two_processes_that_torchrun_ends_go_on_to_the_same_bits(tmp_path: Path) -> None:
    """The real command under the real torchrun, three times; each process imports PyTorch."""
    folder = tmp_path / "run"
    process = _torchrun(folder)
    trace = folder / TRACE
    while not trace.exists() and process.poll() is None:  # from then on every rank notes a SIGTERM
        time.sleep(0.2)
    process.terminate()
    _, out = _done(process)
    [stopped] = Checkpoints(folder / "checkpoints").all()
    step = int(torch.load(stopped, weights_only=True)["step"])
    assert step < 6500
    assert f"ended at step {step} of 6500; continue with the same command and --resume" in out, out[-3000:]
    status, out = _done(_torchrun(folder, "--resume", "--steps", str(step + 20)))
    assert status == 0, out[-3000:]
    status, out = _done(_torchrun(tmp_path / "whole", "--steps", str(step + 20)))
    assert status == 0, out[-3000:]
    one, other = (
        torch.load(tmp_path / name / "checkpoints" / f"step-{step + 20:07d}.pt", weights_only=True)
        for name in ("run", "whole")
    )
    assert len(one["agents"]) == 2
    assert all(same(one[part], other[part]) for part in CARRIED)
    traces = [read_trace(tmp_path / name / TRACE) for name in ("run", "whole")]
    assert traces[0].steps.loss.tolist() == traces[1].steps.loss.tolist()


def test_a_late_agent_knows_nothing_of_the_steps_before_it(begin: Begin) -> None:
    begin("first", steps=10).train()
    checkpoint = begin("first").checkpoints.newest()
    late = begin("late", branch_from=checkpoint, late_agent=True, steps=20)
    late.train()
    told = begin("told", branch_from=checkpoint, steps=20)
    told.train()
    assert same(newest(late)["model"], newest(told)["model"])
    assert read_trace(late.trace).samples[0].step > 10
    with pytest.raises(ValueError, match="give --late-agent with --resume or --branch-from"):
        begin("alone", late_agent=True).train()
    assert not same(newest(late)["agent"], newest(told)["agent"])
