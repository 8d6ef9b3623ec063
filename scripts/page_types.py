"""server/ui/src/service.ts: the service's answers as TypeScript types, from its OpenAPI document.

`make docs` writes the file (scripts/generate_docs.py).
"""

from collections.abc import Iterator
from typing import Any

from foreshock.server.app import create_app
from foreshock.server.settings import Settings

_PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}
_FRAMEWORK = frozenset({"HTTPValidationError", "ValidationError"})
"""FastAPI's own answers, which this service does not give."""


def page_types() -> Iterator[str]:
    """The page's types, from the service's OpenAPI document. Raises ValueError for a schema of an unknown kind."""
    schemas: dict[str, Any] = create_app(Settings()).openapi()["components"]["schemas"]
    for name in sorted(schemas.keys() - _FRAMEWORK):
        yield from _interface(name, schemas[name])


def _interface(name: str, schema: dict[str, Any]) -> Iterator[str]:
    if "properties" not in schema:
        yield f"export type {name} = {type_of(schema)};\n"
        return
    if text := schema.get("description"):
        yield f"/** {' '.join(text.split())} */"
    yield f"export interface {name} {{"
    required = schema.get("required", ())
    for key, value in schema["properties"].items():
        if text := value.get("description"):
            yield f"  /** {' '.join(text.split())} */"
        yield f"  {key}{'' if key in required else '?'}: {type_of(value)};"
    yield "}\n"


def type_of(schema: dict[str, Any]) -> str:
    """A JSON schema as a TypeScript type. Raises ValueError for a kind that it does not know."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(type_of(part) for part in parts))
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        return f"[{', '.join(type_of(item) for item in schema['prefixItems'])}]"
    if kind == "array":
        item = type_of(schema["items"])
        return f"({item})[]" if " | " in item else f"{item}[]"
    if kind == "object" and not schema.get("properties"):
        values = schema.get("additionalProperties", True)
        return f"Record<string, {'unknown' if values is True else type_of(values)}>"
    if kind in _PLAIN:
        return _PLAIN[kind]
    if not schema.keys() - {"title", "description", "default"}:
        return "unknown"
    raise ValueError(f"no TypeScript for the schema {schema}; teach it to scripts/page_types.py")
