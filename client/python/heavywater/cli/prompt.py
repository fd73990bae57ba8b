"""The text that a command's user gives: options, and what is sent of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from heavywater.cli.policy import MAX_INT
from heavywater.client import Client
from heavywater.question import split_chat

Prompt = Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")]
File = Annotated[Path | None, typer.Option(help="Read the text from this file.")]
Chat = Annotated[bool, typer.Option("--chat", help="Ask in the model's chat format.")]
System = Annotated[str, typer.Option(help="With --chat: the system message.")]
QuestionAfter = Annotated[
    str, typer.Option(help="Append this once the text's cache is compressed; with --chat: at the turn's end.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, max=MAX_INT)]


def read_text(prompt: str, file: Path | None) -> str:
    """The text, from where it is. Raises ValueError unless exactly one of the two is given, and it is text."""
    if bool(prompt) == bool(file):
        raise ValueError("give a text or --file, one of them")
    if file is not None:
        return text_of("--file", file)
    return sys.stdin.read() if prompt == "-" else prompt


def text_of(option: str, file: Path) -> str:
    """A file's text. Raises ValueError naming both where it is none, OSError."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def prompt_and_suffix(client: Client, text: str, chat: bool, system: str, question_after: str) -> tuple[str, str]:
    """What is sent: the prompt, and what is appended once it is compressed. Raises ValueError."""
    if not chat:
        if system:
            raise ValueError("--system without --chat, want both")
        return text, question_after
    first = [{"role": "system", "content": system}] if system else []
    return split_chat(client.get_model(), [*first, {"role": "user", "content": text}], question_after)
