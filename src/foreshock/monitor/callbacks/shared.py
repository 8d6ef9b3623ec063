"""What callbacks share: the trainer's gradient norm, the agent's state in a file, checkpoints that warnings ask for.

Trainers that clip, or log the norm, call `torch.nn.utils.clip_grad_norm_`, throw the tensor away or read it much later.
While a callback watches, what that function returns is kept: nothing is computed again, and no device is waited for.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import fsspec
import torch
from torch import Tensor

from foreshock.monitor.agent import Agent
from foreshock.monitor.checkpoints import is_remote
from foreshock.monitor.guard import logger
from foreshock.monitor.model.layers import is_sharded

_NAME: Final = "clip_grad_norm_"


class GradientNorm:
    """Keeps the last norm between `start` and `stop`. `home` is where the trainer looks clip_grad_norm_ up."""

    def __init__(self, home: Any = torch.nn.utils) -> None:
        self._home = home
        self._last: Tensor | None = None
        self._original: Callable[..., Any] | None = None
        self._keeping: Callable[..., Any] | None = None

    def start(self) -> None:
        """Keep what clip_grad_norm_ returns from now on."""
        self.stop()
        original: Callable[..., Any] = getattr(self._home, _NAME)

        @functools.wraps(original)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            # a norm that is spread over ranks is whole only after a collective, and the agent calls none
            if isinstance(norm, Tensor) and not is_sharded(norm):
                self._last = norm.detach()
            return norm

        self._original, self._keeping = original, keeping
        setattr(self._home, _NAME, keeping)

    def take(self) -> Tensor | None:
        """The norm since the last call, before clipping; None where none was computed."""
        norm, self._last = self._last, None
        return norm

    def stop(self) -> None:
        """Put PyTorch's function back, unless somebody rebound it since."""
        if self._keeping is not None and getattr(self._home, _NAME) is self._keeping:
            setattr(self._home, _NAME, self._original)
        self._original = self._keeping = self._last = None


def write_state(agent: Agent, path: str | Path) -> None:
    """Write `agent.state_dict()` whole or not at all, to a file or a URL that fsspec knows. A disk or a store that
    fails is named and ends no training."""
    state = json.dumps(agent.state_dict())
    try:
        if is_remote(path):
            with fsspec.open(str(path), "w") as file:
                file.write(state)
            return
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.unfinished")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        with unfinished.open("x") as file:  # a new file: where a team writes, a link may lie under that name
            file.write(state)
        os.replace(unfinished, path)
    except Exception as error:  # clients of remote stores raise their own
        logger.warning("foreshock: the agent's state was not saved as %s; training continues: %s", path, error)


def read_state(*paths: str | Path) -> dict[str, Any] | None:
    """The state in the first of these files or URLs that holds one; None where none does. A damaged one is named."""
    for path in paths:
        try:
            with fsspec.open(str(path)) if is_remote(path) else Path(path).open("rb") as file:
                if isinstance(saved := json.load(file), dict):
                    return saved
        except FileNotFoundError:
            continue
        except Exception as error:
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
        log_unsaved(error)


def log_unsaved(error: Exception) -> None:
    """Say that the checkpoint that a warning asked for does not exist."""
    kind = type(error).__name__
    logger.warning(
        "foreshock: the checkpoint that a warning asked for was not saved; training continues: %s: %s", kind, error
    )
