"""The gradient norm that a trainer computes for itself, without computing it again and without waiting for the device.

Trainers that clip, or log the norm, call `torch.nn.utils.clip_grad_norm_`, throw the tensor away or read it much later.
While a callback watches, what that function returns is kept.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from foreshock.monitor.model.weights import is_sharded

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
