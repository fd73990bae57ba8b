"""A conversation of several turns, and the file that it lives on in."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

_FORMAT = "heavywater-conversation-1"
_MAX_FILE_BYTES = 64 << 20
ROLES = ("system", "user", "assistant")


@dataclass
class Conversation:
    """Messages as chat templates take them. At most one system message, the first."""

    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def system(self) -> str:
        """The system message, empty when there is none."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    @property
    def turns(self) -> int:
        """Messages of the user."""
        return sum(message["role"] == "user" for message in self.messages)

    def set_system(self, content: str) -> None:
        """Puts it first, in the place of one that is there; an empty one takes that away."""
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [{"role": "system", "content": content}, *rest] if content else rest

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = self.messages[:1] if self.system else []

    def ask(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})

    def answer(self, content: str) -> None:
        self.messages.append({"role": "assistant", "content": content})

    def take_back(self) -> str:
        """Undoes the last turn, answered or not; returns the question, empty when there is none."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return ""

    def save(self, path: Path) -> None:
        """Writes the whole file or leaves it as it was. Raises OSError."""
        text = json.dumps({"format": _FORMAT, "messages": self.messages}, ensure_ascii=False, indent=1)
        part = path.with_name(path.name + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)

    @staticmethod
    def load(path: Path) -> Conversation:
        """Raises OSError, or ValueError saying what is wrong with the file."""
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, want at most {_MAX_FILE_BYTES}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no conversation: {error}") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{path} is no conversation: want an object of format {_FORMAT!r}")
        messages = content.get("messages")
        if not isinstance(messages, list):
            raise ValueError(f"{path}: messages is no list")
        for index, message in enumerate(messages):
            if not _is_message(message) or (message["role"] == "system" and index > 0):
                raise ValueError(
                    f"{path}: messages[{index}] wants a role ({', '.join(ROLES)}, system first) and content"
                )
        return Conversation(messages)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and message["role"] in ROLES
        and isinstance(message["content"], str)
    )
