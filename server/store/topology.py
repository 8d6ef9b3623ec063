"""What a boot watches, as stored."""

import hashlib
from functools import lru_cache

from pydantic import TypeAdapter, ValidationError

from foreshock.contract.wire import HeadRef, Layer
from foreshock.server.store.reading import passed_over

_LAYERS: TypeAdapter[tuple[Layer, ...]] = TypeAdapter(tuple[Layer, ...])


@lru_cache(maxsize=256)
def layers_of(stored: str) -> tuple[Layer, ...]:
    """The layers of a stored topology; none where it cannot be read."""
    try:
        return _LAYERS.validate_json(stored)
    except ValidationError as error:
        why = error.errors(include_url=False, include_input=False)[0]["msg"]
        passed_over("topology", hashlib.sha256(stored.encode()).hexdigest(), why)
        return ()


@lru_cache(maxsize=256)
def heads_of_layers(stored: str) -> tuple[HeadRef, ...]:
    """The (layer, head) of every row of a boot's arrays, in order."""
    return tuple((layer.layer, head) for layer in layers_of(stored) for head in layer.heads)
