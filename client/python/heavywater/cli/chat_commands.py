"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from heavywater.chat_session import ChatSession
from heavywater.cli.inspect import STYLES, heaviest_table
from heavywater.conversation import Conversation
from heavywater.inspection import inspect_sets

COMMANDS = {
    "help": "this list",
    "reset": "forget the conversation, but for the system message",
    "undo": "take the last turn back",
    "retry": "ask the last question again",
    "system": "TEXT: set the system message; without a text, show it",
    "file": "PATH: put a text file before the next question",
    "sets": "which tokens of the last answer's cache are where",
    "history": "the conversation so far",
    "save": "FILE: write the conversation; `heavywater chat FILE` goes on with it",
    "load": "FILE: go on with a conversation that was written",
    "quit": "end (or Ctrl-D)",
}
_MAX_FILE_BYTES = 16 << 20
_HEAVIEST = 8


class ChatCommands:
    """Runs them on a session. What they raise (ValueError, OSError, HeavywaterError) is shown, and the chat goes on."""

    def __init__(self, session: ChatSession, log: Console, ask: Callable[[str], None]) -> None:
        self._session = session
        self._log = log
        self._ask = ask
        self.files: list[str] = []  # texts that wait for a question

    def run(self, name: str, argument: str) -> None:
        getattr(self, f"_{name}")(argument)

    def with_files(self, question: str) -> str:
        """The question after the files that wait for one."""
        return "\n\n".join([*self.files, question])

    def _say(self, text: str) -> None:
        self._log.print(Text(text, style="dim"))

    def _help(self, argument: str) -> None:
        table = Table.grid(padding=(0, 2))
        for name, meaning in COMMANDS.items():
            table.add_row(Text(f"  /{name}", style="bold"), Text(meaning))
        self._log.print(table)
        self._say("A question goes on with the last answer's cache; a long one, or another text, is computed anew.")

    def _reset(self, argument: str) -> None:
        self._session.conversation.reset()
        self._session.forget_sequence()
        self.files = []
        self._say("a new conversation")

    def _undo(self, argument: str) -> None:
        question = self._session.conversation.take_back()
        self._say(f"taken back: {_short(question)}" if question else "there is nothing to take back")

    def _retry(self, argument: str) -> None:
        question = self._session.conversation.take_back()
        if not question:
            raise ValueError("there is no question yet")
        self._ask(question)

    def _system(self, argument: str) -> None:
        if argument:
            self._session.conversation.set_system(argument)
        self._say("system: " + (self._session.conversation.system or "(the model's own)"))

    def _file(self, argument: str) -> None:
        path = _path(argument)
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, want at most {_MAX_FILE_BYTES}")
        text = path.read_text(encoding="utf-8")
        self.files.append(text)
        tokens = len(self._session.model.encode(text))
        self._say(
            f"{path.name}: {tokens} tokens before the next question (the context has "
            f"{self._session.model.info.context_tokens})"
        )

    def _sets(self, argument: str) -> None:
        last = self._session.last
        if last is None or not last.sequence_id:
            raise ValueError("there is no answer yet")
        if not self._session.client.has_cache:
            raise ValueError("the cache service knows the sets: give --cache (HEAVYWATER_CACHE)")
        inspection = inspect_sets(self._session.client.get_sets(last.sequence_id))
        line = Text(f"sequence {last.sequence_id}, plan {inspection.plan}, mean of {inspection.num_sets} sets: ")
        for kind, count in inspection.counts().items():
            line.append(f" {kind} {count:.0f} ", style=STYLES[kind])
            line.append(" ")
        self._log.print(line)
        if inspection.heaviest(_HEAVIEST):
            tokens = self._session.client.get(last.sequence_id).tokens

            def piece_of(position: int) -> str:
                return self._session.model.decode([tokens[position]]) if position < len(tokens) else "?"

            self._log.print(heaviest_table(inspection, piece_of, _HEAVIEST))
        self._say(f"in the text: heavywater inspect {last.sequence_id}, until its lease ends")

    def _history(self, argument: str) -> None:
        for message in self._session.conversation.messages:
            self._log.print(Text.assemble((f"{message['role']}: ", "bold"), _short(message["content"], 2000)))

    def _save(self, argument: str) -> None:
        self._session.conversation.save(_path(argument))
        self._say(f"{self._session.conversation.turns} turns in {argument}")

    def _load(self, argument: str) -> None:
        self._session.conversation = Conversation.load(_path(argument))
        self._session.forget_sequence()
        self._history("")

    def _quit(self, argument: str) -> None:
        raise KeyboardInterrupt


def _path(argument: str) -> Path:
    if not argument:
        raise ValueError("want a file's name after the command")
    return Path(argument).expanduser()


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[:length] + f"... ({len(text)} characters)"
