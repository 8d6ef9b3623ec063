"""Early warning for loss explosions, from inside a BF16 training run.

`foreshock.attach(model, ...)` is all that most programs need. Names of the agent are looked up when they are first used:
the service imports this package too, and runs without PyTorch.
"""

from importlib import import_module
from typing import Any, Final

__version__ = "0.1.0"
_OF_THE_AGENT: Final = ("Agent", "AgentConfig", "attach", "detach")


def __getattr__(name: str) -> Any:
    if name in _OF_THE_AGENT:
        return getattr(import_module("foreshock.monitor"), name)
    raise AttributeError(f"foreshock has no attribute {name!r}; it has {', '.join(_OF_THE_AGENT)}")
