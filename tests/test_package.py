"""What `import foreshock` gives, and what it must not bring."""

import subprocess
import sys

import pytest

import foreshock
from foreshock import monitor


def test_the_names_that_programs_use_are_those_of_the_agent() -> None:
    for name in ("Agent", "AgentConfig", "attach", "detach"):
        assert getattr(foreshock, name) is getattr(monitor, name)


def test_importing_the_package_imports_no_torch() -> None:
    check = "import sys, foreshock; sys.exit('torch' in sys.modules or 'foreshock.monitor' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", check], check=False).returncode == 0


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"'watch'.*attach, detach"):
        getattr(foreshock, "wat" + "ch")
