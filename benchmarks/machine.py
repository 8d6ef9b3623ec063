"""What a figure from a GPU was measured on."""

from typing import Any

import torch


def gpu() -> dict[str, Any]:
    """The device and the versions that its speed depends on, as every result file has them."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        },
    }
