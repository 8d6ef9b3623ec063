"""Shared by callbacks: the trainer's gradient norm, the agent's state in a file, checkpoints requested by warnings.

Trainers that clip gradients or log their norm call `torch.nn.utils.clip_grad_norm_`, and discard the result or read it
much later. While a callback is active, the result is stored, so that it does not have to be computed again and no
device has to be waited for.
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
    """Stores the last norm between `start` and `stop`. home: the module whose clip_grad_norm_ the trainer calls."""

    def __init__(self, home: Any = torch.nn.utils) -> None:
        self._home = home
        self._last: Tensor | None = None
        self._original: Callable[..., Any] | None = None
        self._keeping: Callable[..., Any] | None = None

    def start(self) -> None:
        """Store the results of clip_grad_norm_ from now on."""
        self.stop()
        original: Callable[..., Any] = getattr(self._home, _NAME)

        @functools.wraps(original)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            # a sharded norm is complete only after a collective, which the agent does not call
            if isinstance(norm, Tensor) and not is_sharded(norm):
                self._last = norm.detach()
            return norm

        self._original, self._keeping = original, keeping
        setattr(self._home, _NAME, keeping)

    def take(self) -> Tensor | None:
        """Return the norm before clipping since the last call; None if none was computed."""
        norm, self._last = self._last, None
        return norm

    def stop(self) -> None:
        """Restore PyTorch's function, unless other code has replaced it since."""
        if self._keeping is not None and getattr(self._home, _NAME) is self._keeping:
            setattr(self._home, _NAME, self._original)
        self._original = self._keeping = self._last = None


def write_state(agent: Agent, path: str | Path) -> None:
    """Write `agent.state_dict()` atomically to a file, or to a URL that fsspec supports. An error of the disk or the
    store is logged, and training continues."""
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
        with unfinished.open("x") as file:  # "x": in a shared folder, a link may have that name
            file.write(state)
        os.replace(unfinished, path)
    except Exception as error:  # clients of remote stores raise their own
        logger.warning("foreshock: the agent's state was not saved as %s; training continues: %s", path, error)


def read_state(*paths: str | Path) -> dict[str, Any] | None:
    """Return the state in the first of these files or URLs that contains one, or None. A damaged file is logged."""
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
    """Restore a state that was saved at this step; with any other state, only continue the step numbers."""
    agent.begin_at(step)
    if isinstance(saved, dict) and saved.get("step") == step:
        agent.load_state_dict(saved)


def save_if_asked(agent: Agent, save: Callable[[], object]) -> None:
    """Let the trainer write a checkpoint if a warning requested one. After an error, training continues, because the
    program did not request this checkpoint."""
    if not agent.should_save:
        return
    try:
        save()
    except Exception as error:
        log_unsaved(error)


def log_unsaved(error: Exception) -> None:
    """Log that the checkpoint requested by a warning could not be saved."""
    kind = type(error).__name__
    logger.warning(
        "foreshock: the checkpoint that a warning asked for was not saved; training continues: %s: %s", kind, error
    )
