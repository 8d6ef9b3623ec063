"""The measurement of the Hopper forward says what it needs, and finds what is wrong with a forward."""

import pytest

hopper_forward = pytest.importorskip("foreshock.benchmarks.hopper_forward", reason="needs a Triton that has Gluon")


def test_without_such_a_gpu_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["hopper_forward"])
    with pytest.raises(SystemExit, match="needs an H100 or H200"):
        hopper_forward.main()


def test_a_task_that_fails_is_said_and_the_next_one_carried_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(case: object) -> dict[str, object]:
        if case == hopper_forward.CASES[0]:
            raise ValueError("no such case")
        return {"wrong": []}

    monkeypatch.setattr(hopper_forward, "check", check)
    hopper_forward.carry_out(["check 0", "check 1"])
    assert capsys.readouterr().out.splitlines() == ['{"wrong": ["ValueError: no such case"]}', '{"wrong": []}']


def test_a_process_whose_gpu_is_lost_ends_so_that_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: object) -> dict[str, object]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(hopper_forward, "check", check)
    with pytest.raises(SystemExit) as end:
        hopper_forward.carry_out(["check 0", "check 1"])
    assert end.value.code == hopper_forward.BROKEN
