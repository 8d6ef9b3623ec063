"""scripts/gpu-check records the result of each part, even without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/gpu-check"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_summary_has_the_exit_status_and_last_lines_of_each_part(tmp_path: Path) -> None:
    program = tmp_path / "also.py"
    program.write_text("import sys\nprint('asked with', *sys.argv[1:4])\nsys.exit('1' in sys.argv[2])\n")
    result = check(str(tmp_path / "out"), "--parts", "also", "--also", str(program), "--minutes", "3")
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert {name: part["status"] for name, part in summary.items()} == {
        "also_seed_0": 0,
        "also_seed_1": 1,
        "also_seed_2": 0,
    }
    assert result.returncode == 1
    assert summary["also_seed_2"]["end"] == ["asked with --seed 2 --budget"]


def test_part_over_its_time_limit_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "also.py"
    program.write_text("import time\ntime.sleep(600)\n")
    result = check(str(tmp_path / "out"), "--parts", "also", "--also", str(program), "--minutes", "0.05")
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert [part["status"] for part in summary.values()] == [None, None, None]
    assert result.returncode == 1


def test_unknown_part_is_rejected(tmp_path: Path) -> None:
    result = check(str(tmp_path), "--parts", "bench,kernels")
    assert "parts kernels do not exist; there are machine, bench, tests, also" in result.stderr
