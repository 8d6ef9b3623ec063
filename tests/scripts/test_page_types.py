"""JSON schemas as TypeScript: every kind that the service answers with, and a sentence for one that is not known."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, TypeAdapter
from tests.loading import module_at

ROOT = Path(__file__).parents[2]
SCRIPT = module_at(ROOT / "scripts" / "page_types.py")
type_of: Callable[[dict[str, Any]], str] = SCRIPT.type_of


class Named(BaseModel):
    """Stands for an answer of the service."""

    name: str
    """What it is called."""
    sizes: list[int | None] = []


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (int, "number"),
        (float, "number"),
        (bool, "boolean"),
        (str | None, "string | null"),
        (list[str], "string[]"),
        (list[str | int], "(string | number)[]"),
        (list[list[float]], "number[][]"),
        (tuple[int, str], "[number, string]"),
        (dict[str, float], "Record<string, number>"),
        (dict[str, Any], "Record<string, unknown>"),
        (Literal["a"], '"a"'),
        (Literal["a", "b"] | None, '"a" | "b" | null'),
        (Any, "unknown"),
    ],
)
def test_a_type_of_python_is_written_as_the_page_reads_it(kind: Any, written: str) -> None:
    assert type_of(TypeAdapter(kind).json_schema()) == written


def test_a_name_stands_for_itself_and_a_type_that_is_told_twice_stands_once() -> None:
    assert type_of({"$ref": "#/components/schemas/Incident"}) == "Incident"
    assert type_of({"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]}) == "number | null"


def test_a_schema_of_an_unknown_kind_is_refused_and_says_where_to_teach_it() -> None:
    with pytest.raises(ValueError, match=r"no TypeScript for the schema .*; teach it to scripts/page_types\.py"):
        type_of({"type": "rainbow"})


def test_fields_that_may_be_missing_are_marked_and_descriptions_become_comments() -> None:
    lines = "\n".join(SCRIPT._interface("Named", Named.model_json_schema()))
    assert "/** Stands for an answer of the service. */\nexport interface Named {" in lines
    assert "  name: string;" in lines
    assert "  sizes?: (number | null)[];" in lines


def test_every_type_that_is_named_is_written_once() -> None:
    text = "\n".join(SCRIPT.page_types())
    made = re.findall(r"^export (?:interface|type) (\w+)", text, re.MULTILINE)
    assert len(made) == len(set(made)) > 20
    code = re.sub(r'/\*\*.*?\*/|"[^"]*"', "", text)
    assert set(re.findall(r"\b[A-Z]\w+", code)) - {"Record"} == set(made)
