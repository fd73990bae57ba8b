"""A question about a text, as a prompt and what follows it once the prompt is compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heavywater.model import Model

# Between a text and the question about it, in one turn of a conversation.
SEPARATOR = "\n\n"


def split_chat(model: Model, messages: Sequence[Mapping[str, str]], question: str) -> tuple[str, str]:
    """(prompt, suffix) of a conversation whose last message is followed by a question.

    Both together are the model's chat format for that message with the question at its
    end; the prompt ends before the question. Without a question the suffix is empty.
    """
    if not question:
        return model.chat(messages), ""
    last = {**messages[-1], "content": messages[-1]["content"] + SEPARATOR + question}
    rendered = model.chat([*messages[:-1], last])
    begin = rendered.rfind(last["content"])
    if begin < 0:
        raise ValueError(f"the chat template of {model.info.name} changes the message: {last['content']!r}")
    at = begin + len(last["content"]) - len(question)
    return rendered[:at], rendered[at:]
