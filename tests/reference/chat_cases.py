#!/usr/bin/env python3
"""Conversations rendered by Jinja itself with templates in the manner of the model families': chat_cases.json, which
the worker's own renderer is held to (tests/worker/model/chat_template_test.cc).

    tests/reference/chat_cases.py        writes chat_cases.json anew
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

CASES = Path(__file__).with_name("chat_cases.json")
BEGIN, END = "<s>", "</s>"

TEMPLATES = {
    "chatml": """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}
""",
    "headers": """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}

{#- The system message has its place even where there is none. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {{- message.tool_calls[0].function | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    "instructions": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, got " ~ message["role"] ~ "!") }}
    {%- endif %}
{%- endfor %}
{{- " (" ~ user_messages | length ~ ")" }}
""",
    "thoughts": """\
{%- if tools %}
    {{- tools | tojson }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
        not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.thought is string %}
            {%- set thought = message.thought %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and thought)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "turns": """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}
""",
    "space": """\
<begin>
  {% for message in messages %}
    {% if loop.first %}
First: {{ message.role | upper }}
    {% endif %}
  {{ loop.index }}/{{ loop.length }} {{- ' ' -}}   {{ message.content | replace('a', 'A') }}
    {%+ if loop.revindex0 == 0 %} last {% endif +%}

    {# nothing #}
  {% else %}
nobody
  {% endfor %}
{%- set roles = [] %}{% for m in messages if m.role != 'system' %}{% set roles = roles + [m.role] %}{% endfor %}
{{ roles | length }} {{ (messages | first).role }} {{ messages[-1]['content'][:5] }} {{ messages[-1].content[-3:] }}
{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 + 3 * 4 - 1 }} {{ 'a' ~ 1 ~ none ~ true }} {{ undefined_name }}.
{{ "é" in messages[0].content }} {{ messages[0].content | length }} {{ 'x' if false }} {{ missing | default('d') }}
{% for k, v in {'a': 1, 'b': 'two'}.items() %}{{ k }}={{ v }};{% endfor %} {{ ['x', 'y'] | join('-') }} \
{{ messages | rejectattr('role', 'equalto', 'user') | list | length }} {{ {}['a'] is undefined }} \
{% for i in range(2, 4) %}{{ i }}{{ ',' if not loop.last else '.' }}{% endfor %} {{ '\\x41\\u00e9\\t|' }}
""",
}

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Why is heavy water heavy?"}],
    [
        {"role": "system", "content": "  Answer in one word.\n"},
        {"role": "user", "content": "Which metal is liquid?"},
    ],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nA greeting.\n\n</think>\n\nHello! \u00a0"},
        {"role": "user", "content": "\u2003Café für 2 → 你好 🙂 \n"},
    ],
    [
        {"role": "system", "content": "é"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>b</think>c"},
    ],
    [
        {"role": "assistant", "content": "I begin {{ here }} {% not %}"},
        {"role": "user", "content": "'quotes' \"and\" <b>&amp;"},
    ],
]


def environment() -> jinja2.Environment:
    """As Model.chat() and Transformers have it."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    made.globals["raise_exception"] = raise_exception
    return made


def render(template: str, messages: list[dict[str, str]]) -> dict[str, str]:
    """{"text": ...}, or {"error": the template's own words}."""
    try:
        text = (
            environment()
            .from_string(template)
            .render(messages=messages, add_generation_prompt=True, bos_token=BEGIN, eos_token=END)
        )
    except jinja2.TemplateError as error:
        return {"error": str(error)}
    return {"text": text}


def cases() -> dict[str, Any]:
    return {
        "bos_token": BEGIN,
        "eos_token": END,
        "conversations": CONVERSATIONS,
        "templates": [
            {"name": name, "template": template, "rendered": [render(template, one) for one in CONVERSATIONS]}
            for name, template in TEMPLATES.items()
        ],
    }


if __name__ == "__main__":
    CASES.write_text(json.dumps(cases(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
