"""What `import foreshock` gives, and what it must not bring."""

import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import foreshock
from foreshock import callbacks, monitor
from foreshock.monitor import AgentConfig
from foreshock.monitor.config import AgentSettings

ROOT = Path(__file__).parents[1]


def test_the_names_that_programs_use_are_those_of_the_agent() -> None:
    for name in ("Agent", "AgentConfig", "Assessment", "assess", "attach", "detach"):
        assert getattr(foreshock, name) is getattr(monitor, name)


@pytest.mark.parametrize("package", [foreshock, monitor])
def test_a_name_that_is_not_there_is_refused_with_those_that_are(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"'watch'.*attach, detach"):
        getattr(package, "wat" + "ch")
    with pytest.raises(AttributeError, match=r"'KerasCallback'; it has TransformersCallback, LightningCallback"):
        getattr(callbacks, "Keras" + "Callback")


def test_no_module_of_the_agent_stands_in_the_place_of_a_name_that_it_hands_on() -> None:
    modules = {module.name for module in iter_modules(monitor.__path__)}
    assert "attaching" in modules
    assert not modules & set(dir(monitor))


def test_the_package_and_its_modules_are_found_without_torch() -> None:
    check = (
        "import sys, foreshock; assert 'foreshock.monitor' not in sys.modules; foreshock.client.Service; "
        "foreshock.callbacks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", check], check=False).returncode == 0


def test_callbacks_are_those_of_the_trainers() -> None:
    from foreshock.monitor.callbacks import accelerate, huggingface, lightning, torchtitan

    assert callbacks.TransformersCallback is huggingface.ForeshockCallback
    assert callbacks.LightningCallback is lightning.ForeshockCallback
    assert callbacks.AccelerateTracker is accelerate.ForeshockTracker
    assert callbacks.watch_torchtitan is torchtitan.watch


def test_names_that_are_looked_up_late_are_listed_all_the_same() -> None:
    """What a notebook completes after `foreshock.` comes from here."""
    names = {"Agent", "AgentConfig", "Assessment", "assess", "attach", "detach", "callbacks", "client", "__version__"}
    assert set(dir(foreshock)) == names
    assert dir(callbacks) == ["AccelerateTracker", "LightningCallback", "TransformersCallback", "watch_torchtitan"]


@pytest.mark.parametrize("name", ["foreshock.attach", "foreshock.callbacks.watch_torchtitan"])
def test_without_pytorch_the_names_of_the_agent_say_what_to_install(name: str) -> None:
    check = f"import sys; sys.modules['torch'] = None; import foreshock; {name}"
    done = subprocess.run([sys.executable, "-P", "-c", check], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: foreshock's agent needs PyTorch")
    assert "pip install '.[agent]' in foreshock's clone" in done.stderr


def test_the_keywords_that_editors_complete_are_the_settings_of_the_agent() -> None:
    assert AgentSettings.__optional_keys__ == frozenset(AgentConfig.model_fields)


def test_windows_is_refused_with_what_to_use_there() -> None:
    program = "import sys; sys.platform = 'win32'; import foreshock"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: foreshock runs on Linux and macOS; on Windows use the Windows Subsystem for Linux"
    )
