"""Logits kept on disk, so that memory stays bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from heavywater.eval.figures import Logits


def make_logits_file(path: Path, num_targets: int, vocab_size: int) -> Logits:
    """An array [num_targets, vocab_size] that lives in the file `path` (npy)."""
    make = np.lib.format.open_memmap
    array: Logits = make(path, mode="w+", dtype=np.float32, shape=(num_targets, vocab_size))  # type: ignore[no-untyped-call]
    return array
