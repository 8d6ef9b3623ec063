"""Triton's interpreter without what it does again and again to the same end."""

from typing import Any

from triton.runtime import interpreter


def lighten() -> None:
    """Patch the language once in a launch, not in each call of a device function, and look a NumPy type up once."""
    patch, launch, look_up = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    patched: dict[frozenset[int], Any] = {}
    types: dict[str, Any] = {}

    def patch_once(function: Any) -> Any:
        """The language as a function sees it: for the next one that sees the same it is patched already."""
        languages = (interpreter.tl, interpreter.tl.core)
        seen = frozenset(id(each) for each in function.__globals__.values() if any(each is one for one in languages))
        if seen not in patched:
            patched[seen] = patch(function)
        return patched[seen]

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # the end of the last one took its patches back
        launch(self, *args, **kwargs)

    def type_of(dtype: Any) -> Any:
        """By its name: a block's type has no hash."""
        if dtype.name not in types:
            types[dtype.name] = look_up(dtype)
        return types[dtype.name]

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launched
    interpreter._get_np_dtype = type_of
