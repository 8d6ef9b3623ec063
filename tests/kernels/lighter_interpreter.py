"""Triton's interpreter without what it does again and again to the same end: a kernel takes half as long."""

from functools import cache
from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def lighten() -> None:
    """Patch the language once for each function of a launch, not in each call of it; look up a type that is there."""
    _patch_once()
    _types_once()
    # Computed by nine operations, and thrown away where the interpreter does not debug.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _patch_once() -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: dict[Any, Any] = {}
    patched: dict[frozenset[int], Any] = {}

    def patch_once(function: Any) -> Any:
        """The language as a function sees it: for the next one that sees the same it is patched already."""
        if function not in seen:
            languages = (interpreter.tl, interpreter.tl.core)
            sees = frozenset(
                id(each) for each in function.__globals__.values() if any(each is one for one in languages)
            )
            if sees not in patched:
                patched[sees] = patch(function)
            seen[function] = patched[sees]
        return seen[function]

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.clear()
        patched.clear()  # the end of the last one took its patches back
        launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launched


def _types_once() -> None:
    """A NumPy type by its name, since a block's type has no hash; a block's type by its elements' type, which it keeps,
    so that no other has its id; and a tensor's sizes by their numbers."""
    look_up, make = interpreter._get_np_dtype, tl.block_type.__init__
    types: dict[str, Any] = {}
    blocks: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}

    def type_of(dtype: Any) -> Any:
        if dtype.name not in types:
            types[dtype.name] = look_up(dtype)
        return types[dtype.name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), tuple(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    @cache
    def sizes(*shape: int) -> tuple[Any, Any]:
        return tl.constexpr(int(np.prod(shape))), tl.tuple([tl.constexpr(size) for size in shape])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(*(type.shape if type.is_block() else ()))

    interpreter._get_np_dtype = type_of
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
