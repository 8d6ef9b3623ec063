"""Says which module of over 100 lines has no test file of its name, and which file has over 400 lines.

A test file of a module's name stands in tests/PART/, at any depth: test_NAME.py, test_NAME_and_more.py, or
test_triton_NAME.py for what runs in Triton's interpreter too.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PARTS: Final = ("contract", "kernels", "monitor", "server", "dashboards", "lab", "cli", "benchmarks", "scripts")
ALSO: Final = {"monitor": ("faults", "zoo")}
"""Folders of tests/ that hold more tests of a part."""
MODULE_LINES, MOST_LINES = 100, 400
_PASSES: Final = "is one pass of a call or a part of one, which `tests/kernels/test_triton_attention.py` compares whole"
WITHOUT: Final = {
    "contract/incident_form.py": "declares what `tests/contract/test_incident.py` makes and reads",
    **{
        f"contract/metrics/{name}_metrics.py": "is entries of the catalogue, `tests/contract/test_catalog.py` sees them"
        for name in ("head", "run", "service")
    },
    **{
        f"kernels/flash_attention/triton_kernels/{name}.py": _PASSES
        for name in ("blocks", "forward", "grad_key", "grad_query", "places", "rows")
    },
    "kernels/flash_attention/triton_kernels/launcher.py": "needs a GPU: `tests/kernels/test_triton_cuda.py`",
    "server/models.py": "declares answers, which `tests/server/test_fuzz.py` holds every route to",
    "server/testing/service.py": "is what the service's own tests stand on: `tests/server/conftest.py`",
    "benchmarks/page.py": "is measured in a browser by `tests/server/ui/test_fleet.py`",
}
"""Modules that need no test file of their name: why, with the file that tests them in backquotes."""


def modules(root: Path) -> Iterator[Path]:
    """The Python modules of the parts, below root; none that is generated, a migration or somebody else's."""
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            below = path.relative_to(root)
            if path.name != "__init__.py" and not {"node_modules", "migrations", "generated"} & set(below.parts):
                yield below


def named_after(test: str, stems: set[str]) -> str | None:
    """Which of `stems` a test file is named after: test_run_set_twice is run_set's before it is run's."""
    words = test.removeprefix("test_").removeprefix("triton_").split("_")
    beginnings = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((stem for stem in beginnings if stem in stems), None)


def findings(root: Path, without: Mapping[str, str]) -> Iterator[str]:
    """What is wrong, a sentence each."""
    found = list(modules(root))
    for part in PARTS:
        own = [path for path in found if path.parts[0] == part]
        tests = [t for folder in (part, *ALSO.get(part, ())) for t in (root / "tests" / folder).rglob("test_*.py")]
        tested = {named_after(test.stem, {path.stem for path in own}) for test in tests}
        for path in own:
            long, listed = len((root / path).read_text().splitlines()) > MODULE_LINES, path.as_posix() in without
            if long and path.stem not in tested and not listed:
                wanted = f"tests/{part}/test_{path.name}"
                yield f"{path} has over {MODULE_LINES} lines and no test file of its name: {wanted}"
            elif listed and (path.stem in tested or not long):
                yield f"{path} is listed as one that needs no test file of its name, but has one or is short"
    for name, reason in without.items():
        named = re.findall(r"`([^`]+)`", reason)
        if not (root / name).is_file() or not named or not all((root / file).is_file() for file in named):
            yield f"{name}: the module, or the file that is said to test it, is not there: {reason}"
    for path in (*found, *sorted(test.relative_to(root) for test in (root / "tests").rglob("*.py"))):
        if (lines := len((root / path).read_text().splitlines())) > MOST_LINES:
            yield f"{path} has {lines} lines; at most {MOST_LINES}"


def main() -> int:
    """Print the findings; 1 where there are any."""
    wrong = list(findings(ROOT, WITHOUT))
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
