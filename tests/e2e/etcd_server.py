"""A real etcd for tests, ended by its process id."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Etcd:
    """One member, with its data below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_port()
        self._peer_port = _free_port()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Also again, with what it had."""
        client, peer = f"http://{self.address}", f"http://127.0.0.1:{self._peer_port}"
        options = {
            "name": "test",
            "data-dir": self._folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"test={peer}",
        }
        log = (self._folder / "etcd.log").open("a")
        command = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
        self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 20
        while not self._listens():
            assert time.monotonic() < deadline, "etcd does not listen"
            time.sleep(0.05)

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return True
        except OSError:
            return False

    def pause(self) -> None:
        """It lives, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
