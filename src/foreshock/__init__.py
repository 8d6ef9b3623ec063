"""Early warning for loss explosions, from inside a BF16 training run.

`foreshock.attach(model, ...)` is all that most programs need; `foreshock.callbacks` serves the trainers, and
`foreshock.client` talks to the service. Names are looked up when they are first used: the service imports this package
too, and runs without PyTorch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

__version__ = "0.1.0.dev0"
_OF_THE_AGENT: Final = ("Agent", "AgentConfig", "Assessment", "assess", "attach", "detach")
_MODULES: Final = ("callbacks", "client")

if sys.platform == "win32":
    raise ImportError("foreshock runs on Linux and macOS; on Windows use the Windows Subsystem for Linux")


def _ask_for_torch() -> None:
    if find_spec("torch") is None:
        raise ModuleNotFoundError(
            "foreshock's agent needs PyTorch, which is not installed: pip install '.[agent]' in foreshock's clone",
            name="torch",
        )


def __getattr__(name: str) -> Any:
    if name in _OF_THE_AGENT:
        _ask_for_torch()
        return getattr(import_module("foreshock.monitor"), name)
    if name in _MODULES:
        return import_module(f"foreshock.{name}")
    raise AttributeError(f"foreshock has no attribute {name!r}; it has {', '.join(_OF_THE_AGENT + _MODULES)}")


def __dir__() -> list[str]:
    return [*_OF_THE_AGENT, *_MODULES, "__version__"]
