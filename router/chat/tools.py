"""What a chat request says about tools and reasoning, checked."""

import json
import re
from dataclasses import dataclass
from typing import Any

from core.errors import RequestError
from core.types import Grammar, GrammarKind
from router.chat.output import THINK, ReadingPlan, ToolFormat
from router.chat.template import ChatTemplate
from router.chat.tool_formats import FORMATS, NAMED_CALL, REQUIRED_CALLS, detect_format

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is told of, and which it must call. Without tools: nothing."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "none"  # auto | none | required | named
    named: str | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def is_forced(self) -> bool:
        """The model must call, and a grammar sees to it."""
        return self.choice in ("required", "named")

    def grammar(self, parallel_calls: bool) -> Grammar:
        """What a forced answer looks like: a list of calls, or the named function's arguments.
        Raises RequestError for schemas that cannot be put into one."""
        if self.named is not None:
            schema = next(
                tool["function"]["parameters"]
                for tool in self.tools
                if tool["function"]["name"] == self.named
            )
        else:
            definitions: dict[str, dict[str, Any]] = {}
            calls = [_call_schema(tool["function"], definitions) for tool in self.tools]
            schema = {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_FORCED_CALLS if parallel_calls else 1,
                "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
                **definitions,
            }
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _call_schema(
    function: dict[str, Any], definitions: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """One call. References are to the root, so what they name goes there, into `definitions`."""
    parameters = dict(function["parameters"])
    for keyword in ("$defs", "definitions"):
        own = parameters.pop(keyword, None)
        for name, schema in own.items() if isinstance(own, dict) else ():
            known = definitions.setdefault(keyword, {})
            if known.setdefault(name, schema) != schema:
                raise RequestError(
                    f"tools: two functions define {name[:80]!r} in different ways", param="tools"
                )
    return {
        "type": "object",
        "properties": {"name": {"enum": [function["name"]]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def parse_tools(tools: list[dict[str, Any]] | None, choice: Any) -> ToolUse:
    """Raises RequestError whose `param` names the part, like `tools[0].function.name`. With the
    choice "none" the model does not hear of its tools."""
    checked = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) < len(names):
        raise RequestError("tools: two functions have one name", param="tools")
    if choice is None:
        choice = "auto" if checked else "none"
    named = _named(choice)
    if named is None and choice not in _CHOICES:
        raise RequestError(
            f"tool_choice: expected {', '.join(_CHOICES)} or a function", param="tool_choice"
        )
    if not checked:
        if choice in ("none", "auto"):
            return ToolUse()
        raise RequestError("tool_choice needs tools", param="tool_choice")
    if named is not None and named not in names:
        raise RequestError(f"tool_choice: no tool is named {named[:80]!r}", param="tool_choice")
    if choice == "none":
        return ToolUse()
    return ToolUse(checked, "named" if named is not None else choice, named)


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)  # /v1/responses has the name beside the type
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """One tool as chat templates expect it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(f"{where}.type: only functions are supported", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function: expected an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name: expected 1 to 64 letters, digits, '_', '-' or '.'",
            param=f"{where}.function.name",
        )
    description = function.get("description") or ""
    if not isinstance(description, str):
        at = f"{where}.function.description"
        raise RequestError(f"{at}: expected a string", param=at)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        at = f"{where}.function.parameters"
        raise RequestError(f"{at}: expected a JSON schema", param=at)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


@dataclass(frozen=True, slots=True)
class ChatReading:
    """How the served model writes tool calls and reasoning; None: it does not."""

    tool_format: ToolFormat | None = None
    reasoning: str | None = None  # deepseek_r1 | qwen3

    @classmethod
    def of(
        cls, template: ChatTemplate | None, tool_parser: str, reasoning_parser: str | None
    ) -> "ChatReading":
        """As configured; the format "auto" is the one that the template shows."""
        if tool_parser != "auto":
            return cls(FORMATS[tool_parser], reasoning_parser)
        tool_format = detect_format(template.tool_source) if template is not None else None
        return cls(tool_format, reasoning_parser)

    def plan(self, use: ToolUse, prompt: str, parallel_calls: bool) -> ReadingPlan | None:
        """What to look for in the answer to `prompt`; None: it is all content."""
        if not use.tools and self.reasoning is None:
            return None
        if use.is_forced:
            return ReadingPlan(
                tool_format=NAMED_CALL if use.named is not None else REQUIRED_CALLS,
                tool_names=frozenset({use.named}) if use.named is not None else use.names,
                parallel_calls=parallel_calls,
            )
        is_open = self.reasoning == "deepseek_r1" or prompt.rstrip().endswith(THINK)
        return ReadingPlan(
            tool_format=self.tool_format if use.tools else None,
            tool_names=use.names,
            parallel_calls=parallel_calls,
            reasoning=None if self.reasoning is None else "open" if is_open else "marked",
        )

    def check(self, use: ToolUse, template: ChatTemplate) -> None:
        """Raises RequestError if this model cannot use tools as asked."""
        if use.tools and not template.knows_tools:
            raise RequestError(
                "tools: this model's chat template has none",
                param="tools",
                code="unsupported_parameter",
            )
        if use.choice == "auto" and self.tool_format is None:
            raise RequestError(
                "tools: this model writes its calls in a way that is not known here "
                "(router.tool_parser names one of the known)",
                param="tools",
                code="unsupported_parameter",
            )
