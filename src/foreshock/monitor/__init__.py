"""The agent: watches the attention of a model while it trains, warns, and switches heads to a safe kernel.

Names are imported when they are first used, so that the detectors, which also judge recorded runs, work without
PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foreshock.monitor.agent import Agent as Agent
    from foreshock.monitor.assessment import Assessment as Assessment
    from foreshock.monitor.assessment import assess as assess
    from foreshock.monitor.attaching import attach as attach
    from foreshock.monitor.attaching import detach as detach
    from foreshock.monitor.config import AgentConfig as AgentConfig

# Do not give a module one of these names: after its import, it would hide the name.
_HOMES: Final = {
    "Agent": "agent",
    "AgentConfig": "config",
    "Assessment": "assessment",
    "assess": "assessment",
    "attach": "attaching",
    "detach": "attaching",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"foreshock.monitor has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(f"foreshock.monitor.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(_HOMES)
