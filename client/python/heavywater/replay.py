"""Policies over a recorded trace, by the worker's own engine (heavywater-replay)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heavywater.eval.rows import Row, make_rows
from heavywater.server_process import find_binary
from heavywater.trace import read_header

BINARY = "heavywater-replay"
RECALL = "recall"
_FIELDS = ("heavy_tokens", "recent_tokens", "sink_tokens", "plan_interval_steps", "exposure")


def policy_request(trace: Path, policy: str, scope: str, budget: float) -> dict[str, Any]:
    """A row of `heavywater eval`'s tables for the trace's prompt. Raises ValueError."""
    if policy == RECALL:
        return {"policy": RECALL, "scope": scope, "device_ratio": budget, "min_budget_tokens": 1}
    make_rows([policy], [scope], [budget])  # knows the names
    options = Row(policy, scope, budget).options(int(read_header(trace)["prompt_tokens"]))
    return {"policy": policy, "scope": scope} | {name: getattr(options, name) for name in _FIELDS}


def replay_policy(trace: Path, policy: Mapping[str, Any], threads: int = 1) -> dict[str, Any]:
    """The figures of one policy (worker/replay/replay_json.h). Raises ValueError with the program's complaint."""
    request = {"trace": str(trace.resolve()), "policies": [policy], "num_threads": threads}
    done = subprocess.run([find_binary(BINARY)], input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip() or f"{BINARY} ended with {done.returncode}")
    row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
    return row
