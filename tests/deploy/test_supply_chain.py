"""Every image is pinned or reported as unpinned, and only the last job of a release may publish."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_pin_check_reports_every_unpinned_compose_image() -> None:
    check = [sys.executable, "-P", str(ROOT / "scripts" / "pin-images"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    reported = set(re.findall(r": (\S+) is not pinned", done.stdout))
    compose = set(re.findall(r"^\s+image: ([^\s@]+)(?!\S*@)", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE))
    pinned = {image for image in compose if f"{image}@sha256:" in (ROOT / "docker-compose.yml").read_text()}
    assert compose - pinned - {"foreshock-service:local"} <= reported
    assert "foreshock-service:local" not in reported


def test_release_check_has_valid_shell_syntax() -> None:
    subprocess.run(["bash", "-n", ROOT / "scripts" / "release-check"], check=True)


def test_only_the_publish_job_has_an_id_token_and_it_runs_after_build_and_try() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    jobs = workflow["jobs"]
    assert (jobs["publish"]["needs"], jobs["try"]["needs"]) == ("try", "build")
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert not any("checkout" in step.get("uses", "") for step in jobs["publish"]["steps"])
    scripts = [
        step["run"].split()[0] for job in jobs.values() for step in job["steps"] if "scripts/" in step.get("run", "")
    ]
    assert scripts == ["scripts/release-check", "checkout/scripts/try-wheel"]
    assert all((ROOT / path.removeprefix("checkout/")).is_file() for path in scripts)
