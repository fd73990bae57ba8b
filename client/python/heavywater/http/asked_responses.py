"""What a request to /v1/responses asks for: as a chat, in that API's words."""

from __future__ import annotations

from typing import Any

from heavywater.http.asked import MAX_TOKENS, ROLES, Asked, asked_of, content_of
from heavywater.http.errors import invalid
from heavywater.http.fields import Fields, checked_text, shown
from heavywater.http.options import HttpOptions

_TEXTS = ("input_text", "output_text", "text")


def asked_responses(values: dict[str, Any], options: HttpOptions) -> Asked:
    """Raises ApiError naming the first field that is wrong."""
    fields = Fields(values)
    instructions = fields.text("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += _input(fields.take("input"))
    max_tokens = fields.integer("max_output_tokens", 1, MAX_TOKENS)
    # No response is kept here: a conversation comes whole, and goes on with its cache all the same (docs/http.md).
    fields.want("previous_response_id")
    fields.want("conversation")
    fields.want("background", False)
    fields.want("tools", [])
    fields.want("tool_choice", "none", "auto")
    fields.want("include", [])
    fields.want("text", {"format": {"type": "text"}}, {})
    fields.want("truncation", "disabled")
    fields.want("top_logprobs", 0)
    fields.want("n", 1)
    asked = asked_of(fields, options, messages=tuple(messages), max_tokens=max_tokens, likeliest=None)
    if asked.include_usage:
        raise invalid("stream_options.include_usage", "is true; a streamed response ends with its usage anyhow")
    return asked


def _input(value: object) -> list[dict[str, str]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": checked_text("input", value)}]
    if not isinstance(value, list) or not value:
        raise invalid("input", f"is {shown(value)}, want a text, or a list of messages")
    return [_item(f"input[{index}]", one) for index, one in enumerate(value)]


def _item(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(name, f"is {shown(value)}, want a message")
    fields = Fields(value, f"{name}.")
    fields.want("type", "message")
    role = fields.take("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(fields.name("role"), f"is {shown(role)}, want one of {', '.join(ROLES)}")
    content = content_of(fields.name("content"), fields.take("content"), _TEXTS)
    fields.ignore("id", "status", "phase", "heavywater")  # of an answer that is sent back
    fields.done()
    return {"role": ROLES[role], "content": content}
