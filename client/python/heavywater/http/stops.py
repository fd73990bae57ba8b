"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Gives out text up to the first stop string; holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """None of `stops` is empty."""
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = self._may_begin(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back, once no more comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Characters at the end that begin a stop string, the most there are."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
