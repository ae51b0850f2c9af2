"""What the OpenAPI document says of bodies that are read by hand."""

from typing import Any

from router.openai.protocol import StrictBody


def documented(kind: type[StrictBody], model_name: str) -> dict[str, Any]:
    """For a route's `openapi_extra`: the schema of its body, whole, without references."""
    schema = kind.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    schema["properties"]["model"] = {"type": "string", "enum": [model_name]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str):
        return _inlined(definitions[reference.rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
