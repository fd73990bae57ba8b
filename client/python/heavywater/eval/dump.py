"""Files from which the figures can be computed again: one npz per window and row.

ids          [prompt + targets] int32
prompt       number of prompt tokens
logits       [targets, vocab_size] float32; row i predicts ids[prompt + i]
set_layer, set_kv_head   [sets] int32 (kv_head -1: shared by the layer)
set_begin    [sets + 1] int64: set s is kept_positions[set_begin[s] : set_begin[s + 1]]
kept_positions, kept_scores   after the last plan, ascending within a set
device_bytes, full_cache_bytes   measured
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heavywater.eval.figures import Logits, Totals
from heavywater.eval.logits_file import make_logits_file
from heavywater.eval.measure import Measurement, Window
from heavywater.eval.rows import Row
from heavywater.sets import SequenceSet


class Dump:
    """Writes one measurement's file; its logits go to disk as they come."""

    def __init__(self, folder: Path, row: Row, window: Window, vocab_size: int) -> None:
        self._path = dump_path(folder, row.name, window.offset)
        self._scratch = tempfile.TemporaryDirectory(dir=folder, prefix=".logits-")
        file = Path(self._scratch.name) / "logits.npy"
        self._logits = make_logits_file(file, len(window.targets), vocab_size)

    def __call__(self, index: int, logits: Logits) -> None:
        self._logits[index] = logits

    def finish(self, result: Measurement) -> None:
        """Puts everything into the npz."""
        np.savez(
            self._path,
            ids=np.array(result.window.prompt + result.window.targets, np.int32),
            prompt=np.int64(len(result.window.prompt)),
            logits=self._logits,
            device_bytes=np.int64(result.device_bytes),
            full_cache_bytes=np.int64(result.full_cache_bytes),
            **_kept_arrays(result.sets),
        )
        del self._logits
        self._scratch.cleanup()


def dump_path(folder: Path, row_name: str, offset: int) -> Path:
    return folder / f"{row_name}-{offset}.npz"


def _kept_arrays(sets: list[SequenceSet]) -> dict[str, Any]:
    kept = [_ascending(one) for one in sets]
    lengths = [len(positions) for positions, _ in kept]
    return {
        "set_layer": np.array([one.layer for one in sets], np.int32),
        "set_kv_head": np.array([one.kv_head for one in sets], np.int32),
        "set_begin": np.cumsum([0, *lengths], dtype=np.int64),
        "kept_positions": np.concatenate([np.empty(0, np.int64), *(p for p, _ in kept)]),
        "kept_scores": np.concatenate([np.empty(0, np.float64), *(s for _, s in kept)]),
    }


def _ascending(one: SequenceSet) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    order = np.argsort(one.resident)
    return one.resident[order], one.scores[order]


def totals_of_dumps(folder: Path, row_name: str, offsets: list[int]) -> Totals:
    """The figures of a row, computed from the files alone."""
    totals = Totals()
    for offset in offsets:
        with np.load(dump_path(folder, row_name, offset)) as row, np.load(dump_path(folder, "full", offset)) as full:
            if not np.array_equal(row["ids"], full["ids"]):
                raise ValueError(f"{row_name} and full were run on different tokens at offset {offset}")
            targets = row["ids"][int(row["prompt"]) :]
            for logits, full_logits, target in zip(row["logits"], full["logits"], targets, strict=True):
                totals.add(logits, full_logits, int(target))
    return totals
