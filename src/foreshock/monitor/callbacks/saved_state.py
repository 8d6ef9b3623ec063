"""An agent's state as a file beside a trainer's checkpoint, and checkpoints that a warning asks for."""

import json
import logging
import os
from collections.abc import Callable
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
        unfinished.unlink(missing_ok=True)
        with unfinished.open("x") as file:  # a new file: where a team writes, a link may lie under that name
            file.write(state)
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("foreshock: the agent's state was not saved; training continues: %s", error)


def read_state(*paths: Path) -> dict[str, Any] | None:
    """The state in the first of these files that holds one; None where none does. A damaged file is named."""
    for path in paths:
        try:
            if path.is_file() and isinstance(saved := json.loads(path.read_text()), dict):
                return saved
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("foreshock: %s cannot be read; training continues without it: %s", path, error)
    return None


def take_up(agent: Agent, saved: object, step: int) -> None:
    """Go on from a state that was saved at this step; any other numbers the steps alone."""
    agent.begin_at(step)
    if isinstance(saved, dict) and saved.get("step") == step:
        agent.load_state_dict(saved)


def save_if_asked(agent: Agent, save: Callable[[], object]) -> None:
    """Let the trainer write a checkpoint where a warning asks for one. A save that fails ends no training: the program
    did not order it."""
    if not agent.should_save:
        return
    try:
        save()
    except Exception as error:
        kind = type(error).__name__
        logger.warning(
            "foreshock: the checkpoint that a warning asked for was not saved; training continues: %s: %s", kind, error
        )
