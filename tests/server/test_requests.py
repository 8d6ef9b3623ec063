"""Who acts says so, and why: blanks are neither a name nor a reason, and what is too long is told in characters."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from foreshock.server.models import Acknowledgement, CommandRequest, Decision, Description, Undo
from foreshock.server.problems import items

BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CommandRequest, {"who": "ann", "reason": "it drifts", "mode": "row_corrected"}),
    (Decision, {"who": "ann", "reason": "it drifts"}),
    (Acknowledgement, {"who": "ann", "reason": "it drifts", "incident": "rounding"}),
    (Undo, {"who": "ann", "reason": "it drifts"}),
    (Description, {"who": "ann", "notes": "seed 3"}),
]


@pytest.mark.parametrize(("model", "body"), BODIES)
@pytest.mark.parametrize("blank", ["", " ", "\t \n", "\u00a0\u2003"])
def test_nobody_acts_without_a_name_and_a_reason(model: type[BaseModel], body: dict[str, Any], blank: str) -> None:
    assert model.model_validate(body)
    for field in {"who", "reason"} & body.keys():
        with pytest.raises(ValidationError):
            model.model_validate(body | {field: blank})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"who": "a" * 129}, "String should have at most 128 characters"),
        ({"display_name": "a" * 130}, "Has 130 characters; at most 128 are allowed"),
        ({"tags": [""]}, "Has 0 characters; no fewer than 1 are allowed"),
        ({"tags": ["t" * 65]}, "Has 65 characters; at most 64 are allowed"),
        ({"tags": ["a=b"]}, "Holds a comma or an equals sign, which no tag may: NAME=VALUE is a label"),
        ({"tags": ["t"] * 33}, "List should have at most 32 items after validation, not 33"),
    ],
)
def test_a_text_that_is_not_taken_is_told_in_words_about_a_text(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        Description.model_validate({"who": "ann"} | change)
    assert [item.message for item in items(wrong.value.errors())] == [message]
