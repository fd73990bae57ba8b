"""What a request asks for, read from its JSON."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heavywater.http.errors import invalid
from heavywater.http.fields import Fields, checked_text, shown
from heavywater.http.options import HttpOptions
from heavywater.http.policy_fields import policy_of
from heavywater.v1 import common_pb2

Prompt = str | tuple[int, ...]

MAX_TOKENS = 2**31 - 1
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256
_MAX_TENANT_BYTES = 128
_LEAST_FLOAT = 1.2e-38  # of 32 bits, as the API's
_DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's
_MAX_COMPLETION_LOGPROBS, _MAX_CHAT_LOGPROBS = 5, 20  # likewise
_IGNORED = (
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Asked:
    """One request: `n` answers to each prompt, or to the messages."""

    model: str
    prompts: tuple[Prompt, ...]  # of completions
    messages: tuple[dict[str, str], ...]  # of a chat
    n: int
    max_tokens: int | None  # None: what the context has room for, up to the server's default
    temperature: float
    top_p: float
    top_k: int
    seed: int  # of the first answer; the others count on from it
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    logprobs: bool
    likeliest: int  # of each token, with their log-probabilities
    policy: common_pb2.PolicyOptions | None
    tenant: str
    keep: bool  # the sequences stay until their leases end

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def num_choices(self) -> int:
        return self.n * max(1, len(self.prompts))


def asked_completion(values: dict[str, Any], options: HttpOptions) -> Asked:
    """Of /v1/completions. Raises ApiError naming the first field that is wrong."""
    fields = Fields(values)
    prompts = _prompts(fields.take("prompt"))
    max_tokens = fields.integer("max_tokens", 1, MAX_TOKENS) or _DEFAULT_COMPLETION_TOKENS
    off = fields.take("logprobs") is False
    likeliest = None if off else fields.integer("logprobs", 0, _MAX_COMPLETION_LOGPROBS)
    fields.want("echo", False)
    fields.want("suffix", "")
    fields.want("best_of", 1, fields.take("n"))  # the best of as many as are wanted are all of them
    return asked_of(fields, options, prompts=prompts, max_tokens=max_tokens, likeliest=likeliest)


def asked_chat(values: dict[str, Any], options: HttpOptions) -> Asked:
    """Of /v1/chat/completions. Raises ApiError naming the first field that is wrong."""
    fields = Fields(values)
    messages = _messages(fields.take("messages"))
    max_tokens = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    older = fields.integer("max_tokens", 1, MAX_TOKENS)
    logprobs = fields.boolean("logprobs")
    likeliest = fields.integer("top_logprobs", 0, _MAX_CHAT_LOGPROBS) or 0
    if likeliest and not logprobs:
        raise invalid("top_logprobs", f"is {likeliest}, which wants logprobs to be true")
    fields.want("tools", [])
    fields.want("functions", [])
    fields.want("tool_choice", "none", "auto")
    fields.want("response_format", {"type": "text"})
    fields.want("modalities", ["text"])
    return asked_of(
        fields, options, messages=messages, max_tokens=max_tokens or older, likeliest=likeliest if logprobs else None
    )


def asked_of(
    fields: Fields,
    options: HttpOptions,
    *,
    prompts: tuple[Prompt, ...] = (),
    messages: tuple[dict[str, str], ...] = (),
    max_tokens: int | None,
    likeliest: int | None,
) -> Asked:
    """What both have in common. `likeliest`: None without log-probabilities."""
    fields.ignore(*_IGNORED)
    fields.want("presence_penalty", 0, 0.0)
    fields.want("frequency_penalty", 0, 0.0)
    fields.want("logit_bias", {})
    stream = fields.boolean("stream")
    stream_options = fields.nested("stream_options")
    include_usage = stream_options.boolean("include_usage")
    stream_options.ignore("include_obfuscation")
    stream_options.done()
    n = fields.integer("n", 1, options.max_choices) or 1
    if n * len(prompts) > options.max_choices:
        raise invalid("prompt", f"{len(prompts)} prompts and n {n}, want at most {options.max_choices} answers")
    extension = fields.nested("heavywater")
    policy = policy_of(extension)
    user = _tenant(fields, "user")
    tenant = _tenant(extension, "tenant") or user
    keep = extension.boolean("keep")
    extension.done()
    temperature, top_p = fields.number("temperature", 0, 2), fields.number("top_p", 0, 1)
    if top_p is not None and top_p < _LEAST_FLOAT:
        temperature = 0.0  # the likeliest token alone; as a float it would be 0, which is all tokens
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    asked = Asked(
        model=fields.text("model"),
        prompts=prompts,
        messages=messages,
        n=n,
        max_tokens=max_tokens,
        temperature=1.0 if temperature is None else temperature if temperature >= _LEAST_FLOAT else 0.0,
        top_p=1.0 if top_p is None else top_p,
        top_k=fields.integer("top_k", 0, MAX_TOKENS) or 0,
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        stops=_stops(fields.take("stop")),
        ignore_eos=fields.boolean("ignore_eos"),
        stream=stream,
        include_usage=include_usage,
        logprobs=likeliest is not None,
        likeliest=likeliest or 0,
        policy=policy,
        tenant=tenant,
        keep=keep,
    )
    fields.done()
    return asked


def _tenant(fields: Fields, field: str) -> str:
    text = fields.text(field)
    if len(text.encode()) > _MAX_TENANT_BYTES:
        raise invalid(fields.name(field), f"has {len(text.encode())} bytes, want at most {_MAX_TENANT_BYTES}")
    return text


def _prompts(value: object) -> tuple[Prompt, ...]:
    """A text, a list of texts, token ids, or a list of such lists."""
    if isinstance(value, str):
        return (_prompt("prompt", value),)
    if not isinstance(value, list) or not value:
        raise invalid("prompt", f"is {shown(value)}, want a string, token ids, or a list of either")
    if all(_is_token(one) for one in value):
        return (tuple(value),)
    return tuple(_prompt(f"prompt[{index}]", one) for index, one in enumerate(value))


def _prompt(name: str, value: object) -> Prompt:
    if isinstance(value, list) and value and all(_is_token(one) for one in value):
        return tuple(value)
    if isinstance(value, str) and value:
        return checked_text(name, value)
    raise invalid(name, f"is {shown(value)}, want a string that is not empty, or token ids")


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise invalid("messages", f"is {shown(value)}, want a list of messages, one at least")
    return tuple(_message(f"messages[{index}]", one) for index, one in enumerate(value))


def _message(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(name, f"is {shown(value)}, want an object")
    fields = Fields(value, f"{name}.")
    role = fields.take("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(fields.name("role"), f"is {shown(role)}, want one of {', '.join(ROLES)}")
    content = content_of(fields.name("content"), fields.take("content"), ("text",))
    fields.want("tool_calls", [])
    fields.want("function_call")
    fields.want("audio")
    fields.ignore("name", "refusal", "annotations", "heavywater")  # the last three: an answer that is sent back
    fields.done()
    return {"role": ROLES[role], "content": content}


def content_of(name: str, value: object, kinds: tuple[str, ...]) -> str:
    """A text, or parts that are texts: of these types."""
    if not isinstance(value, list):
        return checked_text(name, value)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            served = ", ".join(kinds)
            raise invalid(f"{name}[{index}]", f"has type {shown(kind)}; only parts of type {served} are served")
        texts.append(checked_text(f"{name}[{index}].text", part.get("text")))
    return "".join(texts)


def _stops(value: object) -> tuple[str, ...]:
    stops: Sequence[object] = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > _MAX_STOPS:
        raise invalid("stop", f"has {len(stops)} strings, want at most {_MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(checked_text("stop", stop)) <= _MAX_STOP_CHARACTERS:
            raise invalid("stop", f"is {shown(stop)}, want 1 to {_MAX_STOP_CHARACTERS} characters")
    return tuple(str(stop) for stop in stops)
