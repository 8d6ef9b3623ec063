"""The systemd unit and the Slurm prolog, checked by systemd, a shell, the service and the agent."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.running import absent
from tests.monitor.torchrun import run_on_ranks
from tests.overrides import set_environment

from foreshock.monitor import AgentConfig
from foreshock.monitor.transport.private_folder import PrivateFolder
from foreshock.server.settings import settings_of

DEPLOY = Path(__file__).parents[2] / "deploy"
LAUNCHED = Path(__file__).parents[1] / "monitor" / "launched.py"
UNIT = DEPLOY / "systemd" / "foreshock.service"


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        absent("systemd-analyze")
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


@pytest.mark.servers
def test_systemd_accepts_the_unit_and_detects_a_misspelt_option(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/foreshock/bin/foreshock", sys.executable))
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (0, []), done.stderr
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHomes=yes"))
    assert "ProtectHomes" in analyze("verify", "--man=no", str(unit)).stderr


@pytest.mark.servers
def test_systemd_rates_the_exposure_of_the_unit_as_low() -> None:
    done = analyze("security", "--offline=true", "--threshold=20", str(UNIT))
    assert done.returncode == 0, done.stdout[-2000:]


def test_service_accepts_the_environment_of_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text('[{"name": "a", "sha256": "%s", "scopes": ["ingest"]}]' % ("0" * 64))
    lines = (DEPLOY / "systemd" / "foreshock.env").read_text().splitlines()
    shipped = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    set_environment(monkeypatch, {**shipped, "FORESHOCK_TOKENS_FILE": str(tokens)})
    settings = settings_of()
    state = re.search(r"^StateDirectory=(\w+)$", UNIT.read_text(), re.MULTILINE)
    assert state is not None
    assert settings.database_url == f"sqlite:////var/lib/{state[1]}/foreshock.db"
    assert settings.trusted_proxies == ("127.0.0.1",)


@pytest.fixture
def var_tmp(tmp_path: Path) -> Path:
    """Replaces /var/tmp, which every user can write to."""
    folder = tmp_path / "var_tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def prolog_output(var_tmp: Path, **environment: str) -> list[str]:
    """The lines that the prolog prints for these variables of the job."""
    script = (DEPLOY / "slurm" / "task_prolog.sh").read_text().replace("spool=/var/tmp/", f"spool={var_tmp}/")
    environment = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        ["sh"], input=script, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def prolog(var_tmp: Path, **environment: str) -> dict[str, str]:
    """The variables that Slurm sets in a task, from these variables of the job."""
    variables = prolog_output(var_tmp, **environment)
    lines = [re.fullmatch(r"export (\w+)=(.*)", line) for line in variables]
    assert all(lines), variables
    return {line[1]: line[2] for line in lines if line}


@pytest.mark.parametrize("rank", [0, 5, 31])
def test_each_slurm_task_is_a_rank_of_the_same_run(monkeypatch: pytest.MonkeyPatch, rank: int, var_tmp: Path) -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_ACCOUNT": "team-a", "SLURM_NTASKS": "32"}
    variables = prolog(var_tmp, **job, SLURM_PROCID=str(rank))
    set_environment(monkeypatch, variables, "SLURM_", "RANK")
    config = AgentConfig()
    assert (config.run, config.rank, config.world_size) == ("team-a/4711", rank, 32)
    assert config.url == "https://foreshock.example.org"
    assert config.spool_directory == var_tmp / f"foreshock-{os.getuid()}"


def test_prolog_does_not_override_variables_of_the_job_or_torchrun(var_tmp: Path) -> None:
    set_by_job = {"FORESHOCK_URL": "https://other", "FORESHOCK_RUN": "mine", "FORESHOCK_SPOOL_DIRECTORY": "/scratch/x"}
    assert prolog(var_tmp, **set_by_job, SLURM_JOB_ID="1", RANK="3", SLURM_PROCID="0") == {}
    assert list(var_tmp.iterdir()) == []


@pytest.mark.full
@pytest.mark.promise("A18")
def test_torchrun_workers_under_slurm_have_their_own_ranks(
    tmp_path: Path, var_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the real torchrun, because its variables must not be guessed. Importing PyTorch twice takes seconds."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    set_environment(
        monkeypatch, {**job, **prolog(var_tmp, **job)}, "SLURM_"
    )  # the environment of `srun torchrun` before torchrun starts
    assert os.environ["FORESHOCK_RANK"] == "0"
    assert run_on_ranks(LAUNCHED, 2, tmp_path) == [("cluster/4711", rank, 2) for rank in range(2)]


@pytest.mark.promise("A17")
def test_spool_folder_is_shared_by_the_node_and_accepted_by_the_agent(var_tmp: Path) -> None:
    first, second = (prolog(var_tmp, SLURM_JOB_ID="1", SLURM_PROCID=rank) for rank in "01")
    assert first["FORESHOCK_SPOOL_DIRECTORY"] == second["FORESHOCK_SPOOL_DIRECTORY"]
    PrivateFolder(Path(first["FORESHOCK_SPOOL_DIRECTORY"]))


@pytest.mark.promise("A17")
@pytest.mark.parametrize("kind", ["another user's", "a link", "a file"])
def test_spool_path_created_by_someone_else_is_not_used(var_tmp: Path, kind: str) -> None:
    place = var_tmp / f"foreshock-{os.getuid()}"
    if kind == "a link":
        place.symlink_to(var_tmp)
    elif kind == "a file":
        place.touch()
    elif os.getuid() == 0:
        place.mkdir()
        os.chown(place, 65534, 65534)
    else:
        pytest.skip("only root can make a folder of another user")
    lines = prolog_output(var_tmp, SLURM_JOB_ID="1")
    assert not [line for line in lines if "SPOOL_DIRECTORY" in line]
    assert f"print foreshock: {place} is no folder of this user; unsent batches wait in the home" in lines


@pytest.mark.parametrize("script", ["slurm/task_prolog.sh", "slurm/train.sbatch"])
def test_slurm_script_has_valid_syntax_and_sets_only_agent_settings_without_the_token(script: str) -> None:
    path = DEPLOY / script
    interpreter = shlex.split(path.read_text().splitlines()[0].removeprefix("#!"))[0]
    subprocess.run([interpreter, "-n", path], check=True)
    assert os.access(path, os.X_OK)
    mentioned = set(re.findall(r"FORESHOCK_(\w+)", (DEPLOY / script).read_text()))
    assert mentioned
    assert mentioned <= {name.upper() for name in AgentConfig.model_fields} - {"TOKEN"}
