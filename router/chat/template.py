"""Chat messages to prompt text, by the model's own Jinja template.

The template comes with the model and never from a request; `router.chat.template_sandbox` has its
limits. The text is then encoded with the strings of special tokens read as those tokens: that is
how a template marks turns.
"""

from typing import Any

import jinja2
from jinja2.sandbox import SecurityError

from core.errors import ModelError, RequestError
from router.chat.messages import normalize_messages
from router.chat.template_sandbox import (
    TemplateLimitError,
    joined,
    make_environment,
    template_budget,
)

__all__ = ["ChatTemplate", "normalize_messages"]

MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0

_ENVIRONMENT = make_environment()


class ChatTemplate:
    """One model's template, compiled once. `special_tokens` are names and strings that the
    template may use (`bos_token`, `eos_token`, ...). Safe to use from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str] | None = None,
        *,
        tool_use_source: str | None = None,
        max_steps: int = MAX_STEPS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self.source = source
        self._template = _compile(source)
        self._tool_use_source = tool_use_source
        self._tool_use = _compile(tool_use_source) if tool_use_source else self._template
        self._special_tokens = dict(special_tokens or {})
        self._knows_developer = "developer" in source
        self._max_steps = max_steps
        self._max_seconds = max_seconds

    @property
    def knows_tools(self) -> bool:
        return self._tool_use is not self._template or "tools" in self.source

    @property
    def tool_source(self) -> str:
        """The template that is used with tools."""
        return self._tool_use_source or self.source

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        switches: dict[str, bool] | None = None,
    ) -> str:
        """The prompt text, to be encoded with `add_special_tokens=False`.

        `switches` are variables of the template, like `enable_thinking`.
        Takes messages as a client sends them (`normalize_messages` is applied). Milliseconds for
        real templates, bounded for others: call it in a thread. Raises RequestError when the
        messages are wrong or the template refuses them, ModelError when the template itself
        goes out of bounds."""
        normal = normalize_messages(messages)
        if not self._knows_developer:  # the newer name of the same role
            for message in normal:
                if message["role"] == "developer":
                    message["role"] = "system"
        template = self._tool_use if tools else self._template
        try:
            with template_budget(self._max_steps, self._max_seconds):
                return joined(
                    template.generate(
                        **self._special_tokens,
                        **(switches or {}),
                        messages=normal,
                        tools=tools,
                        documents=None,
                        add_generation_prompt=add_generation_prompt,
                    )
                )
        except (TemplateLimitError, SecurityError, RecursionError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            raise ModelError(f"the model's chat template was stopped: {reason}") from error
        # raise_exception, undefined names, and what Python raises on values of another type.
        except Exception as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _compile(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"the model's chat template is not valid Jinja: {error}") from error
