"""A cache that is away must not fail the engine: it misses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from heavywater.errors import HeavywaterError

Result = TypeVar("Result")
_LOG_INTERVAL_S = 60.0


class OutageLog:
    """Turns HeavywaterError into a miss, and says so once a minute. Threads may share one."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._mutex = threading.Lock()
        self._next_at = float("-inf")
        self._silent = 0

    def or_else(self, missed: Result, call: Callable[[], Result]) -> Result:
        """What `call` returns; `missed` when it raises HeavywaterError."""
        try:
            return call()
        except HeavywaterError as error:
            self.note(error)
            return missed

    def note(self, error: HeavywaterError) -> None:
        with self._mutex:
            now = self._clock()
            if now < self._next_at:
                self._silent += 1
                return
            self._next_at = now + _LOG_INTERVAL_S
            silent, self._silent = self._silent, 0
        more = f" ({silent} more since the last such line)" if silent else ""
        self._logger.warning("Heavywater's cache service: %s; a miss%s", error, more)
