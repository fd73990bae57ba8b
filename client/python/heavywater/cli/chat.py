"""heavywater chat"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jinja2
import typer
from rich.console import Console
from rich.text import Text

from heavywater.chat_session import ChatSession, Sampling
from heavywater.cli.chat_commands import COMMANDS, ChatCommands
from heavywater.cli.connection import Address, CacheAddress, LocalModel, Ranks, connected
from heavywater.cli.live import LiveText, mebibytes
from heavywater.cli.policy import (
    MAX_INT,
    RECALL,
    Budget,
    DeviceRatio,
    Policy,
    Recall,
    RecallTokens,
    Scope,
    Seed,
    TopK,
    policy_options,
)
from heavywater.conversation import Conversation
from heavywater.errors import HeavywaterError
from heavywater.generation import Token
from heavywater.local import LocalOptions

_HEADING = "Ask; /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends."


def chat(
    load: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A conversation that /save wrote.")] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, max=MAX_INT, help="Of an answer.")
    ] = 512,
    policy: Policy = RECALL,
    scope: Scope = "layer",
    budget: Budget = 0.2,
    recall: Recall = None,
    recall_tokens: RecallTokens = "",
    device_ratio: DeviceRatio = 0.0,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens that have this probability.")] = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    model: LocalModel = None,
    ranks: Ranks = 1,
    address: Address = "",
    cache: CacheAddress = "",
) -> None:
    """Talk with the model, turn by turn.

    The conversation lives here. A question goes on with the cache of the last answer while that holds most of what is
    asked; else the whole conversation is computed anew. /save writes it to a file, from which it goes on later, on the
    same servers or others.
    """
    options = policy_options(policy, scope, budget, recall, recall_tokens, device_ratio)
    conversation = Conversation.load(load) if load else Conversation()
    if system:
        conversation.set_system(system)
    log = Console(stderr=True)
    local = LocalOptions(ranks=ranks, model=model, supervise=True)
    with connected(address, cache, local, log) as client:
        sampling = Sampling(temperature, top_p, top_k, seed)
        session = ChatSession(client, client.get_model(), options, max_new_tokens, sampling, conversation)
        session.check()
        _Terminal(session, Console(), log).run()


class _Terminal:
    """Reads lines and shows answers. Answers go to standard output, all else to standard error."""

    def __init__(self, session: ChatSession, console: Console, log: Console) -> None:
        self._session = session
        self._console = console
        self._log = log
        self._commands = ChatCommands(session, log, self._ask)

    def run(self) -> None:
        # As an exception that stops an answer only; elsewhere it ends the command.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._log.print(_HEADING, style="dim", highlight=False)
        if self._session.conversation.turns:
            self._commands.run("history", "")
        read = _line_reader()
        try:
            while (line := read()) is not None:
                self._take(line)
        except KeyboardInterrupt:
            self._log.print()
        finally:
            self._session.forget_sequence()

    def _take(self, line: str) -> None:
        line = line.strip()
        name, _, rest = line.removeprefix("/").partition(" ")
        try:
            if not line.startswith("/"):
                if line:
                    self._ask(line)
            elif name in COMMANDS:
                self._commands.run(name, rest.strip())
            else:
                raise ValueError(f"no command /{name}; /help lists them")
        except (HeavywaterError, ValueError, OSError, jinja2.TemplateError) as error:
            self._log.print(Text(f"error: {error}{_hint(error)}", style="red"))

    def _ask(self, question: str) -> None:
        with LiveText(self._console) as live:

            def show(token: Token) -> None:
                live.figures.sequence_id = self._session.last.sequence_id if self._session.last else 0
                live.show(token)

            whole = self._session.ask(self._commands.with_files(question), show)
        self._commands.files.clear()
        self._log.print(Text(self._describe(whole), style="dim"))

    def _describe(self, whole: bool) -> str:
        last = self._session.last
        if last is None or not last.finished:
            return "stopped" if not whole else ""
        summary = last.summary
        parts = [
            f"{summary.prompt_tokens + summary.suffix_tokens} + {summary.new_tokens} tokens",
            f"resident {summary.counts.tokens_resident:.0f} of {summary.counts.tokens_seen}",
            f"{mebibytes(summary.device_bytes_peak)} of {mebibytes(summary.full_cache_bytes)} on the device",
        ]
        if summary.new_tokens > 1 and summary.decode_seconds > 0:
            parts.append(f"{(summary.new_tokens - 1) / summary.decode_seconds:.0f} tokens/s")
        if summary.finish_reason == "length":
            parts.append("cut off by --max-new-tokens")
        return " · ".join(parts)


def _hint(error: Exception) -> str:
    if isinstance(error, HeavywaterError) and error.code == "OUT_OF_RANGE":
        return "; /reset begins anew, /undo takes the last turn back"
    return ""


def _line_reader() -> Callable[[], str | None]:
    """Reads a line, None at the end; on a terminal with a prompt, and with the keys of readline."""
    if not sys.stdin.isatty():
        return lambda: sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401

    def read() -> str | None:
        try:
            return input("\001\033[1;36m\002> \001\033[0m\002")
        except EOFError:
            print()
            return None

    return read
