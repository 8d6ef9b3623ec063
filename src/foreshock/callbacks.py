"""The callbacks for trainers. Each is imported on first use, so only the library of that trainer must be installed.

from foreshock.callbacks import TransformersCallback   # Trainer(..., callbacks=[TransformersCallback(run="my-run")])
from foreshock.callbacks import LightningCallback      # Trainer(callbacks=[LightningCallback(run="my-run")])
from foreshock.callbacks import AccelerateTracker      # Accelerator(log_with=AccelerateTracker(model, run="my-run"))
from foreshock.callbacks import watch_torchtitan       # watch_torchtitan(trainer, run="my-run")
"""

from importlib import import_module
from typing import Any, Final

from foreshock import _ask_for_torch

_HOMES: Final = {
    "TransformersCallback": ("huggingface", "ForeshockCallback"),
    "LightningCallback": ("lightning", "ForeshockCallback"),
    "AccelerateTracker": ("accelerate", "ForeshockTracker"),
    "watch_torchtitan": ("torchtitan", "watch"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"foreshock.callbacks has no attribute {name!r}; it has {', '.join(_HOMES)}")
    _ask_for_torch()
    module, attribute = _HOMES[name]
    return getattr(import_module(f"foreshock.monitor.callbacks.{module}"), attribute)


def __dir__() -> list[str]:
    return list(_HOMES)
