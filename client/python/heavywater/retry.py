"""Repeats idempotent reads while a server cannot be reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from heavywater.errors import HeavywaterError

Result = TypeVar("Result")

BACKOFFS_S = (0.1, 0.4, 1.6)


def read_with_retries(read: Callable[[], Result], sleep: Callable[[float], None] = time.sleep) -> Result:
    """Calls `read`, again after each of BACKOFFS_S when it is UNAVAILABLE.

    For calls that change nothing. Mutations are never repeated by the client.
    """
    for backoff_s in BACKOFFS_S:
        try:
            return read()
        except HeavywaterError as error:
            if error.code != "UNAVAILABLE":
                raise
        sleep(backoff_s)
    return read()
