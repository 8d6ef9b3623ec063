"""An agent's state as a file beside a trainer's checkpoint."""

import json
import logging
import os
from pathlib import Path
from typing import Any, Final

from foreshock.monitor.agent import Agent

logger: Final = logging.getLogger("foreshock")


def write_state(agent: Agent, path: Path) -> None:
    """Write `agent.state_dict()` whole or not at all. A disk that fails is named and ends no training."""
    state = json.dumps(agent.state_dict())
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(state)
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("foreshock: the agent's state was not saved, training goes on: %s", error)


def read_state(*paths: Path) -> dict[str, Any] | None:
    """The state in the first of these files that is there; None where none is."""
    found = next((path for path in paths if path.is_file()), None)
    saved: dict[str, Any] | None = None if found is None else json.loads(found.read_text())
    return saved
