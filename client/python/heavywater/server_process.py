"""One server of the project as a child process."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_LISTENING = re.compile(r"listening on (\S+)")
_METRICS = re.compile(r"metrics on (\S+)")


class ServerError(RuntimeError):
    """A server could not be started or has died; the message ends with its last words."""


def find_binary(name: str) -> str:
    """Path of a binary of the project. Raises ServerError naming where it was sought."""
    found = shutil.which(name)
    if found is None:
        raise ServerError(
            f"{name} is not on PATH: the servers are not part of the Python package. In a checkout, deploy/local/run "
            "CMD... builds them and sets PATH; HEAVYWATER_ADDRESS and HEAVYWATER_CACHE name servers that run elsewhere"
        )
    return found


class ServerProcess:
    """Runs a server with its output in `log`. It dies with this process, even when that is killed.

    It is in a process group of its own, so that Ctrl-C reaches only this process,
    which then stops its servers in the right order.
    """

    def __init__(self, name: str, flags: Sequence[str], log: Path, *, append: bool = False) -> None:
        """`append`: to the log of an earlier process."""
        self.name = name
        self.log = log
        command = [find_binary(name), *flags]
        setpriv = shutil.which("setpriv")
        if setpriv is not None:
            # Killed before setpriv has asked for it, this process is no longer the parent.
            still_child = ["/bin/sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
            command = [setpriv, "--pdeathsig", "KILL", "--", *still_child, *command]
        # OpenMP threads that spin while they wait starve the other ranks of the machine.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        with log.open("ab" if append else "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=environment,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it at once, as the system would for lack of memory."""
        if self._process.poll() is None:
            self._signal_group(signal.SIGKILL)
        self._process.wait()

    def check_alive(self) -> None:
        """Raises ServerError when the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServerError(f"{self.name} ended with {code}:\n{self._last_words()}")

    def wait_for_address(self, deadline_s: float) -> str:
        """The address it prints once it listens; `deadline_s` is of time.monotonic()."""
        while time.monotonic() < deadline_s:
            found = _LISTENING.search(self.log.read_text(errors="replace"))
            if found:
                return found.group(1)
            self.check_alive()
            time.sleep(0.05)
        raise ServerError(f"{self.name} does not listen in time:\n{self._last_words()}")

    def metrics_address(self) -> str:
        """Where its metrics are, once it listens; empty where they are off."""
        found = _METRICS.search(self.log.read_text(errors="replace"))
        return found.group(1) if found else ""

    def terminate(self) -> None:
        """Asks it to stop."""
        if self._process.poll() is None:
            self._signal_group(signal.SIGTERM)

    def wait_stopped(self, grace_s: float) -> None:
        """Waits for its end, then ends its whole group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        if self._process.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join("  " + line for line in text[-lines:]) or "  (it printed nothing)"
