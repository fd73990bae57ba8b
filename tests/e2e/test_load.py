"""A short run of `heavywater load`: clients that come, read and leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from cluster import BIN


def test_a_load_of_sequences_that_come_and_leave_leaves_nothing_behind() -> None:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    lengths = ["--prompt-tokens", "16,64", "--new-tokens", "4,12"]
    command = [sys.executable, "-m", "heavywater", "load", "--sequences", "60", "--clients", "8", "--cancel", "0.2"]
    done = subprocess.run(
        [*command, *lengths, "--json"], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    figures = json.loads(done.stdout)
    assert (figures["refused"], figures["errors"], figures["leaked"]) == ({}, {}, [])
    assert figures["completed"] + figures["cancelled"] == figures["sequences"] == 60
    assert 3 <= figures["cancelled"] <= 24
    assert {name: held for name, held in figures["held"].items() if held != [0, 0]} == {}
    assert {"sequences", "host.used_bytes", "rank0.slots_bytes", "rank0.running_sequences"} <= set(figures["held"])
    assert figures["working_bytes"]["rank0.workspace_bytes"][1] > 0  # gauges that nothing moves would show nothing
    assert figures["tokens_per_s"] > 0
    first = figures["time_to_first_token_ms"]
    assert 0 < first["p50"] <= first["p95"] <= first["p99"]
