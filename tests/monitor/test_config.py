"""The agent's settings: their sources and precedence, and error messages that never contain the value."""

import re
from pathlib import Path
from typing import Any

import pytest

from foreshock.contract.environment import token_in
from foreshock.monitor.config import AgentConfig, make_config, new_run_name

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK",
             "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "FORESHOCK_RANK", "FORESHOCK_WORLD_SIZE", "FORESHOCK_RUN",
             "FORESHOCK_TOKEN")  # fmt: skip
IDENTIFIER = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "nightly 7"}, "torchrun-nightly-7"),
        ({"SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"TORCHELASTIC_RUN_ID": "a" * 300}, "torchrun-" + "a" * 100),
        ({"TORCHELASTIC_RUN_ID": "../etc/passwd"}, "torchrun-..-etc-passwd"),
    ],
)
def test_launched_ranks_use_the_launchers_job_name_as_run(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert new_run_name(8) == new_run_name(8) == name
    assert IDENTIFIER.fullmatch(name)
    assert AgentConfig(world_size=8, rank=7).rank == 7
    assert new_run_name(1) != name  # a single process of a job gets a run name of its own


def test_arguments_override_the_environment_and_foreshock_variables_the_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("FORESHOCK_RUN", "from-the-environment")
    assert (AgentConfig().run, AgentConfig().rank, AgentConfig().world_size) == ("from-the-environment", 1, 8)
    monkeypatch.setenv("FORESHOCK_RANK", "2")
    assert AgentConfig().rank == 2
    assert make_config(AgentConfig(run="given", rank=3), {"rank": 4}).model_dump(include={"run", "rank"}) == {
        "run": "given",
        "rank": 4,
    }
    monkeypatch.setenv("FORESHOCK_RUN", "")  # an empty variable counts as unset
    assert AgentConfig(rank=0, world_size=1).run == ""


WORKER = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
"""The variables of a worker of torchrun, DeepSpeed or Accelerate."""
PROLOG = {"FORESHOCK_RANK": "2", "FORESHOCK_WORLD_SIZE": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "9"}


@pytest.mark.promise("A18")
@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (PROLOG, (2, 4)),
        (WORKER, (5, 8)),
        (PROLOG | WORKER, (5, 8)),
        (PROLOG | OPEN_MPI, (6, 9)),
        (PROLOG | {"PMI_RANK": "3", "PMI_SIZE": "5"}, (3, 5)),
        (PROLOG | OPEN_MPI | WORKER, (5, 8)),
        (OPEN_MPI, (0, 1)),  # without PROLOG, mpirun may have started independent runs
        (PROLOG | {"RANK": "5", "WORLD_SIZE": "8"}, (2, 4)),  # set by hand, so ambiguous
        (PROLOG | {"LOCAL_RANK": "1"}, (2, 4)),
        ({"RANK": "gold", "WORLD_SIZE": "all"}, (0, 1)),  # variables of another program
        (
            {"RANK": "-1", "WORLD_SIZE": "-1", "LOCAL_RANK": "-1"},
            (0, 1),
        ),  # some programs mark "not distributed" like this
        (PROLOG | {"RANK": "gold", "WORLD_SIZE": "", "LOCAL_RANK": "x"}, (2, 4)),
    ],
)
def test_rank_comes_from_the_innermost_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: tuple[int, int]
) -> None:
    for variable, value in {"FORESHOCK_RUN": "r", **variables}.items():
        monkeypatch.setenv(variable, value)
    config = AgentConfig()
    assert (config.rank, config.world_size) == place
    assert make_config(None, {"rank": 1, "world_size": 2}).world_size == 2
    assert make_config(AgentConfig(rank=1, world_size=2), {}).rank == 1


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read: FileNotFoundError"), (b"", "is empty"), (b"\n \n", "is empty")]
)
def test_token_file_without_a_token_is_rejected(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        make_config(None, {"token_file": file})
    assert make_config(None, {"token_file": file, "token": "given"}).token_file == file  # the file is not read then


def test_token_is_stripped_and_a_binary_token_file_is_rejected(
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret-token\n")
    assert token_in(file).get_secret_value() == "s3cret-token"
    given = make_config(None, {"token": "s3cret-token\n"}).token  # Kubernetes secrets often end like this
    assert given is not None
    assert given.get_secret_value() == "s3cret-token"
    file.write_bytes(b"\xff\xfe\x00s3cret")
    with pytest.raises(ValueError, match="cannot be read: UnicodeDecodeError") as caught:
        token_in(file)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "sentences"),
    [
        (
            {"token": 7, "url": "http://ann:s3cret@host"},
            ["token: ", "url: url must not contain a user name or password"],
        ),
        ({"sample_every_step": 3}, ["sample_every_step is not a setting of the agent; settings are run, labels, url"]),
        (
            {"detectors": {"horizon": 3}},
            ["detectors.horizon is not a setting of the detectors; settings"],
        ),
        ({"labels": {"two words": "x"}, "probe_rows": 0}, ["labels.two words.", "probe_rows: "]),
        ({"mirror": "no-such-tracker"}, ["mirror: "]),
        ({"url": "http://"}, ["url: url must name a host"]),
        ({"url": "http://ann:s3cret"}, ["url: url must name a host, and a port as a number"]),
        ({"url": "https://[::1"}, ["url: url must name a host"]),
        ({"token": "s3cret on\ntwo lines"}, ["token: a token must be printable ASCII on one line"]),
        ({"token": "s3crét"}, ["token: a token must be printable ASCII on one line"]),
        ({"url": "http://:8765"}, ["url: url must name a host"]),
        ({"url": "http://host:port"}, ["url: url must name a host"]),
        *(
            ({"first_layer": wrong}, ["first_layer: first_layer must be an integer of at least 0, or one for each"])
            for wrong in (True, 1.0, "s3cret", -1, None, {"a": -1}, {"a": True}, {"a": "s3cret"}, {1: 0}, [0])
        ),
    ],
)
def test_each_invalid_setting_gives_one_message_without_its_value(wrong: dict[str, Any], sentences: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make_config(None, wrong)
    messages = str(caught.value).split("; ") if len(sentences) > 1 else [str(caught.value)]
    assert all(any(message.startswith(sentence) for message in messages) for sentence in sentences), messages
    assert "s3cret" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_first_layer_variable_accepts_an_integer_or_a_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, first in (("4", 4), ('{"a": 4, "b": 0}', {"a": 4, "b": 0})):
        monkeypatch.setenv("FORESHOCK_FIRST_LAYER", given)
        assert AgentConfig().first_layer == first
    for given in ("true", "1.0", "-1", "x", '{"a": 4'):
        monkeypatch.setenv("FORESHOCK_FIRST_LAYER", given)
        with pytest.raises(ValueError, match=r"^first_layer: first_layer must be an integer of at least 0") as caught:
            make_config(None, {})
        assert ";" not in str(caught.value)


@pytest.mark.parametrize("name", ["LABELS", "HEADS", "DETECTORS"])
def test_variable_that_is_not_json_is_rejected_with_an_example(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"FORESHOCK_{name}", "team=s3cret")
    with pytest.raises(
        ValueError, match=rf'"{name.lower()}".*: such a variable contains JSON, as FORESHOCK_'
    ) as caught:
        make_config(None, {})
    assert "s3cret" not in str(caught.value)
