"""What an audit says and what it leaves open: `scripts/audit_report.py REPORT`, a report of `pip-audit --format json`.

Exit status 0 where every package was looked up and none has a known hole, 1 where one has, 2 where some (or all, when
there is no report) could not be looked up: nothing is known of them.
"""

import json
import sys
from pathlib import Path
from typing import Final

NOT_AUDITED: Final = (
    "pip-audit asks the vulnerability database of pypi.org, which a mirror does not have; run scripts/release-check "
    "where pypi.org itself can be reached."
)


def main(report: Path) -> int:
    """Tell it; the exit status."""
    try:
        packages = json.loads(report.read_text())["dependencies"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"NOT AUDITED: pip-audit gave no report ({type(error).__name__}). {NOT_AUDITED}", file=sys.stderr)
        return 2
    holes = [(package, hole) for package in packages for hole in package.get("vulns", ())]
    for package, hole in holes:
        mended = ", ".join(hole.get("fix_versions", ())) or "no version yet"
        print(f"KNOWN HOLE: {package['name']} {package['version']}: {hole['id']}; mended in {mended}", file=sys.stderr)
    audited = [package for package in packages if "vulns" in package]
    print(f"{len(audited)} of {len(packages)} packages audited, {len(holes)} known holes")
    if missed := [package["name"] for package in packages if "vulns" not in package]:
        print(f"NOT AUDITED: {', '.join(missed)}. {NOT_AUDITED}", file=sys.stderr)
    elif not packages:
        print(f"NOT AUDITED: the report names no package. {NOT_AUDITED}", file=sys.stderr)
    return 1 if holes else 2 if missed or not packages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
