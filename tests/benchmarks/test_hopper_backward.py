"""The measurement of the Hopper backward says what it needs, and finds what is wrong with a backward."""

import time

import pytest
import torch

hopper_backward = pytest.importorskip("foreshock.benchmarks.hopper_backward", reason="needs a Triton that has Gluon")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def test_without_such_a_gpu_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["hopper_backward"])
    with pytest.raises(SystemExit, match="needs an H100 or H200"):
        hopper_backward.main()


def test_a_task_that_fails_is_said_and_the_next_one_carried_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(case: object) -> dict[str, object]:
        if case == hopper_backward.CASES[0]:
            raise ValueError("no such case")
        return {"wrong": []}

    monkeypatch.setattr(hopper_backward, "check", check)
    hopper_backward.carry_out(["check 0", "check 1"])
    assert capsys.readouterr().out.splitlines() == ['{"wrong": ["ValueError: no such case"]}', '{"wrong": []}']


def test_the_error_of_a_gradient_is_relative_to_its_norm() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert hopper_backward.distance(torch.tensor([3.0, 4.5]), exact) == 0.1


def test_every_case_is_in_one_part_and_lengths_that_compile_alike_are_in_the_same() -> None:
    parts = hopper_backward.checks(4)
    assert sorted(task for part in parts for task in part) == sorted(
        f"check {i}" for i in range(len(hopper_backward.CASES))
    )
    cases = [[hopper_backward.CASES[int(task.split()[1])] for task in part] for part in parts]
    assert [{(case.causal, case.length % 16 == 0) for case in part} for part in cases] == [
        {(False, True)},
        {(True, True)},
        {(False, False)},
        {(True, False)},
    ]


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
def test_every_case_is_as_exact_as_the_triton_backward_and_gives_equal_bits_of_dk_and_dv() -> None:
    results = hopper_backward.in_processes(hopper_backward.checks(4), time.monotonic() + 600)
    assert [said for said in results if said["wrong"]] == []
    assert len(results) == len(hopper_backward.CASES)
