"""A short slice of `heavywater soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from cluster import BIN


def test_texts_survive_kills_and_nothing_leaks() -> None:
    # Each process once: three ranks and the cache service.
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "heavywater", "soak", "--kills", "4", "--new-tokens", "40", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"kills": 4, "equal": 4, "errors": 0, "leaked": 0, "pins": 0}
