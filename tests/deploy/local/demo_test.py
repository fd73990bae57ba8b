"""The demo: what it writes, and that no process outlives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[3] / "deploy/local/demo.py"
FIELDS = ["policy", "recall", "budget", "tp", "tokens_seen", "resident_tokens", "device_bytes", "host_bytes"]
FIELDS += ["prompt_tokens_per_s", "tokens_per_s", "text"]

pytestmark = pytest.mark.skipif(
    shutil.which("heavywater-worker") is None,
    reason="heavywater-worker is not on PATH: run through deploy/local/test or deploy/local/run",
)


class MarkedProcess:
    """Runs the demo with a mark in its environment, by which its children are found."""

    def __init__(self, *arguments: str) -> None:
        self._mark = f"HEAVYWATER_TEST_MARK={uuid.uuid4()}"
        name, value = self._mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, str(DEMO), *arguments],
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def alive(self) -> list[str]:
        """Command names of all living processes with the mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if marked and not zombie:
                    found.append((folder / "comm").read_text().strip())
            except OSError:
                continue  # it has ended, or is another user's
        return found

    def wait_for_child(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not any(name.startswith(comm) for comm in self.alive() if comm.startswith("heavywater-")):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline, self.alive()
            time.sleep(0.05)


def test_the_demo_writes_the_figures_of_all_runs_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    demo = MarkedProcess("--json", str(file), "--prompt-tokens", "1300", "--new-tokens", "24")
    output, _ = demo.process.communicate(timeout=300)
    assert demo.process.returncode == 0, output
    assert demo.alive() == []
    figures = json.loads(file.read_text())
    recalling, bounded, full = figures["runs"]
    assert list(recalling) == list(bounded) == list(full) == FIELDS
    assert (recalling["policy"], recalling["recall"], recalling["budget"]) == ("snapkv_h2o", True, 0.2)
    assert (bounded["policy"], bounded["recall"], bounded["budget"]) == ("snapkv_h2o", False, 0.2)
    assert (full["policy"], full["recall"], full["budget"]) == ("full", False, None)
    for run in (recalling, bounded, full):
        assert run["tp"] == 3
        assert 1323 <= run["tokens_seen"] <= 1324
        assert run["text"] in output
    assert bounded["resident_tokens"] == pytest.approx(260, abs=1)
    assert bounded["device_bytes"] < 0.3 * full["device_bytes"]
    assert bounded["host_bytes"] > 0
    assert recalling["device_bytes"] < 0.3 * full["device_bytes"]
    # Asked after the compression: with recall the detail is found.
    answers = {(one["policy"], one["recall"]): one for one in figures["answers"]}
    for found in (answers["snapkv_h2o", True], answers["full", False]):
        assert found["answer"] == found["expected"]
    assert answers["snapkv_h2o", False]["answer"] != answers["snapkv_h2o", False]["expected"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_a_demo_that_is_told_to_end(number: signal.Signals) -> None:
    demo = MarkedProcess()
    demo.wait_for_child("heavywater-worker")
    demo.process.send_signal(number)
    demo.process.communicate(timeout=60)
    assert demo.process.returncode == 128 + number
    assert demo.alive() == []


def test_servers_die_with_a_demo_that_is_killed() -> None:
    demo = MarkedProcess()
    demo.wait_for_child("heavywater-worker")
    demo.process.kill()
    demo.process.wait()
    deadline = time.monotonic() + 10
    while demo.alive():
        assert time.monotonic() < deadline, demo.alive()
        time.sleep(0.05)
    demo.process.stdout.close()


def test_a_figures_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    demo = MarkedProcess("--json", str(tmp_path / "missing" / "figures.json"))
    output, _ = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 1
    assert output.startswith("error: ")
