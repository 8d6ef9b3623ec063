"""What the training loop has switched on round a call of the agent is off while the agent computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """No gradients, no inference mode and no autocast, on a CPU or on `device`, for what is computed inside.

    A loop may stand under one autocast as a whole: norms of weights would be taken in 16 bits there. A tensor that is
    made in inference mode can never be written to outside of it.
    """
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for kind in {"cpu", device.type}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield
