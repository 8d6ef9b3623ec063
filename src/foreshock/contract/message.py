"""What every message of the wire is made of: its base, and arrays that arrive bit for bit."""

import math
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
import pybase64
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

MAX_BATCH_BYTES: Final = 32 * 2**20


class Message(BaseModel):
    """Base of every message: frozen, non-finite scalars as strings. Fields of a newer version are skipped."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


def first_error(error: ValidationError) -> str:
    """Where the first error of a message or of a saved state stands, and what it is, without what was given."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def at_most(entries: int) -> BeforeValidator:
    """Refuses a longer object before its entries are looked at: each wrong one would be an error of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise ValueError(f"has {len(value)} entries, {entries} are the most")
        return value

    return BeforeValidator(check)


def _decoded(data: str) -> bytes:
    return pybase64.b64decode(data, validate=True)


class Array(Message):
    """A small numeric array, exact to the bit."""

    dtype: Literal["<i8", "<f8", "<f4", "<i4"]
    shape: tuple[Annotated[int, Field(ge=0, le=2**20)], ...] = Field(max_length=4)
    data: str = Field(max_length=MAX_BATCH_BYTES)

    @model_validator(mode="after")
    def _size_matches(self) -> Self:
        want = math.prod(self.shape) * int(self.dtype[2])
        padding = 2 if self.data.endswith("==") else 1 if self.data.endswith("=") else 0
        have = len(self.data) // 4 * 3 - padding
        if len(self.data) % 4 or have != want:
            raise ValueError(f"array of shape {self.shape} and dtype {self.dtype} needs {want} bytes, got {have}")
        try:
            self.__dict__["raw"] = _decoded(self.data)  # once; as `raw` would, without its lock
        except ValueError as error:
            raise ValueError(f"array data is not base64: {error}") from None
        return self

    @cached_property
    def raw(self) -> bytes:
        """The values, little-endian and in C order. Raises ValueError for what is not base64."""
        return _decoded(self.data)

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Self:
        """Encode an int64, float64, float32 or int32 array."""
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        dtype: Any = little.dtype.str
        return cls(dtype=dtype, shape=values.shape, data=pybase64.b64encode_as_string(little.data))

    def numpy(self) -> npt.NDArray[Any]:
        """Decode into a new writable array."""
        return np.frombuffer(bytearray(self.raw), dtype=self.dtype).reshape(self.shape)
