"""Says which layers the first sample counted nothing of, and which attention nobody watches."""

from collections.abc import Sequence

from torch import nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words
from foreshock.monitor.attention.running import outside
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer, logger


def tell_unhit_layers(layers: Sequence[wire.Layer], watched: Sequence[nn.Module], words: Words, step: int) -> None:
    """Log a warning for each layer whose heads counted nothing in `words` [N, SLOT_COUNT], with why where known."""
    rows = words[:, [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS]].sum(axis=1)
    first = 0
    for layer, module in zip(layers, watched, strict=True):
        size = len(layer.heads)
        if not rows[first : first + size].any():
            found: WatchedLayer | None = getattr(module, LAYER_ATTRIBUTE, None)
            why = "; ".join(found.unserved) if found is not None else ""
            logger.warning(
                "foreshock: layer %d (%s) counted nothing in step %d%s",
                layer.layer,
                layer.name,
                step,
                f": {why}" if why else ": its forward or backward did not run through the watched attention",
            )
        first += size
    if outside.calls:
        logger.warning(
            "foreshock: scaled_dot_product_attention was called %d times outside every watched module; those calls are "
            "not watched",
            outside.calls,
        )
