"""Text as it is generated, with one line of live figures below it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from heavywater.generation import Token


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


@dataclass
class Figures:
    """What the line shows."""

    started_s: float
    sequence_id: int = 0  # 0: not known
    tokens: int = 0
    seen: int = 0
    resident: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0
    full_bytes_per_token: float = 0.0  # 0: the full cache's size is not known

    def update(self, token: Token) -> None:
        if self.tokens == 0:
            self.started_s = time.monotonic()  # the prompt's time is not the tokens'
        self.tokens += 1
        self.seen = token.counts.tokens_seen
        self.resident = token.counts.tokens_resident
        self.device_bytes = token.device_bytes
        self.host_bytes = token.host_bytes

    @property
    def tokens_per_s(self) -> float:
        elapsed_s = time.monotonic() - self.started_s
        return (self.tokens - 1) / elapsed_s if self.tokens > 1 and elapsed_s > 0 else 0.0

    def line(self, width: int = 1000) -> str:
        """What fits into `width`: the sequence's id, then the host's bytes and the full cache's go first."""
        if self.tokens == 0:
            return f"reading the prompt, {time.monotonic() - self.started_s:.0f} s"
        speed, where = f"{self.tokens_per_s:.1f} tokens/s", f"resident {self.resident:.0f} of {self.seen} seen"
        device, host = f"device {mebibytes(self.device_bytes)}", f"host {mebibytes(self.host_bytes)}"
        beside = device
        if self.full_bytes_per_token:
            full_bytes = self.seen * self.full_bytes_per_token
            beside += f" of the full cache's {mebibytes(full_bytes)} ({self.device_bytes / full_bytes:.0%})"
        named = [f"sequence {self.sequence_id}"] if self.sequence_id else []
        choices = ([*named, speed, where, beside, host], [speed, where, beside, host], [speed, where, beside])
        lines = [" | ".join(parts) for parts in (*choices, [speed, where, device])]
        return next((line for line in lines if len(line) <= width), lines[-1][:width])


class LiveText:
    """Context manager. On a terminal the figures stay below the text; elsewhere only the text is written."""

    def __init__(self, console: Console, full_bytes_per_token: float = 0.0) -> None:
        self._console = console
        self._open_line = ""
        self.figures = Figures(time.monotonic(), full_bytes_per_token=full_bytes_per_token)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveText:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._print(self._open_line)
        else:
            self._console.file.write("\n")

    def show(self, token: Token) -> None:
        """Adds a token's text and figures."""
        self.figures.update(token)
        if not self._console.is_terminal:
            self._console.file.write(token.text)
            self._console.file.flush()
            return
        *complete, self._open_line = (self._open_line + token.text).split("\n")
        for line in complete:
            self._print(line)
        # A paragraph without newlines would outgrow the screen: complete rows move up.
        while len(self._open_line) > self._console.width:
            row, self._open_line = _split_row(self._open_line, self._console.width)
            self._print(row)

    def _print(self, line: str) -> None:
        self._console.print(Text(line))

    def _render(self) -> RenderableType:
        return Group(Text(self._open_line), Text(self.figures.line(self._console.width), style="reverse"))


def _split_row(line: str, width: int) -> tuple[str, str]:
    """The row that fits, broken at its last space, and the rest."""
    space = line.rfind(" ", 1, width + 1)
    return (line[:space], line[space + 1 :]) if space > 0 else (line[:width], line[width:])
