"""What people and programs ask of the API, beside batches. A wrong word is refused with a sentence.

What is written is kept: in the audit trail, in a run's description, in the store. No text may hold a NUL or half of a
surrogate pair, which JSON can spell and no store can keep.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from foreshock.contract.wire import MAX_LAYERS, HeadRef, ModeName, Step


def _storable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("holds a NUL character, which cannot be stored; leave it out")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("holds half of a surrogate pair, which is no character; leave it out")
    return text


Storable = Annotated[str, AfterValidator(_storable)]
"""Text of a request that every store takes: PostgreSQL has no NUL, and UTF-8 no lone surrogate."""


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank; the audit trail needs a word")
    return text


Said = Annotated[Storable, AfterValidator(_not_blank)]
"""Who acts, and why."""


class Login(BaseModel):
    """A token in exchange for a session cookie."""

    model_config = ConfigDict(extra="forbid")
    token: Storable = Field(max_length=512)


class CommandRequest(BaseModel):
    """An order to switch heads."""

    model_config = ConfigDict(extra="forbid")
    who: Said = Field(min_length=1, max_length=128, description="who orders it; stands in the audit trail")
    reason: Said = Field(min_length=1, max_length=500)
    heads: list[HeadRef] | None = Field(
        default=None, max_length=MAX_LAYERS * 64, description="[[layer, head], ...]; null means every head of the run"
    )
    mode: ModeName = Field(description="the mode that these heads get")
    expect: ModeName | None = Field(default=None, description="refuse unless every named head has this mode now")
    expires_in_seconds: float | None = Field(default=None, gt=0, le=30 * 86400)
    expires_step: Step | None = None
    dry_run: bool = False


class Decision(BaseModel):
    """Approval or rejection of a proposed command, or the end of one that is under way."""

    model_config = ConfigDict(extra="forbid")
    who: Said = Field(min_length=1, max_length=128)
    reason: Said = Field(min_length=1, max_length=500)


class Acknowledgement(Decision):
    """Somebody takes care of an incident."""

    incident: Storable = Field(max_length=64, description="its id: its cause, with a dash for a space")


def _one_line(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("holds a control character, or blanks at an end; write it on one line")
    return text


Line = Annotated[Storable, AfterValidator(_one_line)]


def _tag(text: str) -> str:
    if set(text) & set(",="):
        raise ValueError("holds a comma or an equals sign, which no tag may: NAME=VALUE is a label")
    return text


Tag = Annotated[Line, Field(min_length=1, max_length=64), AfterValidator(_tag)]


class Description(BaseModel):
    """What people say of a run. What is left out stays as it is; what is empty is taken away."""

    model_config = ConfigDict(extra="forbid")
    who: Said = Field(min_length=1, max_length=128)
    display_name: Annotated[Line, Field(max_length=128)] | None = None
    tags: list[Tag] | None = Field(default=None, max_length=32)
    notes: Annotated[Storable, Field(max_length=4000)] | None = None


class Undo(Decision):
    """An order to take a switch back."""

    reason: Said = Field(min_length=1, max_length=480)
    dry_run: bool = False
