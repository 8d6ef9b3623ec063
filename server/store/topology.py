"""What a boot watches, as stored."""

import json
from functools import lru_cache

from foreshock.contract.wire import HeadRef, Layer


@lru_cache(maxsize=256)
def layers_of(stored: str) -> tuple[Layer, ...]:
    """The layers of a stored topology."""
    return tuple(Layer.model_validate(layer) for layer in json.loads(stored))


@lru_cache(maxsize=256)
def heads_of_layers(stored: str) -> tuple[HeadRef, ...]:
    """The (layer, head) of every row of a boot's arrays, in order."""
    return tuple((layer.layer, head) for layer in layers_of(stored) for head in layer.heads)
