"""What an agent has saved, read again: checked as a whole before anything of it is taken up."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, SupportsInt

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foreshock.contract import wire
from foreshock.contract.message import first_error
from foreshock.monitor.detect.levels import PassedLevels

UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError)
"""What reading something raises that is not what it seems."""


class OtherHeadsError(ValueError):
    """The state is of other heads than those that this process watches."""


class SavedState(BaseModel):
    """What `Agent.state_dict` holds."""

    model_config = ConfigDict(extra="ignore")

    version: Literal[1]
    run: wire.Identifier
    step: Annotated[int, Field(ge=0)]
    switch: dict[str, Any]
    qk_clip: dict[str, Any] | None = None
    """None: of an agent without QK-Clip."""
    levels: PassedLevels = PassedLevels()
    """Levels that are passed; none in a state of an older agent."""
    detectors: dict[str, Any] | None
    """None: saving them failed and was contained."""


def read_saved(state: object, heads: Sequence[wire.HeadRef]) -> SavedState:
    """The state, of an agent that watched these heads. Raises ValueError with a sentence."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != 1:
        raise ValueError(f"it has version {version!r}; this agent reads version 1")
    try:
        saved = SavedState.model_validate(state)
    except ValidationError as error:
        raise ValueError(f"it is damaged: {first_error(error)}") from None
    watched = (saved.detectors or {}).get("heads")
    if isinstance(watched, list) and list(map(tuple, watched)) != list(heads):
        raise OtherHeadsError(f"it is of {len(watched)} heads, this process watches {len(heads)} or others")
    return saved


def step_in(state: object) -> int | None:
    """The step at which a state was saved, also where nothing else of it can be used."""
    step = state.get("step") if isinstance(state, dict) else None
    return step if isinstance(step, int) and step >= 0 else None


def steps_done(step: object) -> int:
    """A number of steps, from whatever a checkpoint holds it as. Raises ValueError with a sentence for what is none."""
    done = int(step) if isinstance(step, SupportsInt) and step == step else -1  # NaN is not itself
    if done < 0:
        raise ValueError(f"begin_at takes the number of steps that are done, 0 or more, got {step!r:.100}")
    return done
