"""Every image is pinned or named as not pinned, and only the last job of a release may publish."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_check_names_every_image_of_the_repository() -> None:
    check = [sys.executable, "-P", str(ROOT / "scripts" / "pin-images"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    named = set(re.findall(r": (\S+) is not pinned", done.stdout))
    compose = set(re.findall(r"^\s+image: ([^\s@]+)(?!\S*@)", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE))
    pinned = {image for image in compose if f"{image}@sha256:" in (ROOT / "docker-compose.yml").read_text()}
    assert compose - pinned - {"foreshock-service:local"} <= named
    assert "foreshock-service:local" not in named


def test_the_release_check_is_sound_shell() -> None:
    subprocess.run(["bash", "-n", ROOT / "scripts" / "release-check"], check=True)


def test_only_the_last_job_of_a_release_may_publish_and_only_what_the_jobs_before_built_and_tried() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    jobs = workflow["jobs"]
    assert (jobs["publish"]["needs"], jobs["try"]["needs"]) == ("try", "build")
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert not any("checkout" in step.get("uses", "") for step in jobs["publish"]["steps"])
    ran = [
        step["run"].split()[0] for job in jobs.values() for step in job["steps"] if "scripts/" in step.get("run", "")
    ]
    assert ran == ["scripts/release-check", "checkout/scripts/try-wheel"]
    assert all((ROOT / path.removeprefix("checkout/")).is_file() for path in ran)
