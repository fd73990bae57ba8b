"""Writes dequantize_cases.json: blocks of each tensor type and the values that the gguf package gives for them.

    python make_dequantize_cases.py dequantize_cases.json

Needs numpy and gguf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

_BLOCK_BYTES = {"Q8_0": 34, "Q4_1": 20, "Q4_0": 18, "Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
# Where a block has its halves: the scale, and the minimum or its scale.
_SCALE_AT = {"Q6_K": 208}
_WITH_MINIMUM = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}
_BLOCKS = 3
_SCALES = [0.0123, -1.75, 6.1e-5]  # the last one is below half's normal range
_MINIMUMS = [-0.5, 3.25, 0.0]


def quantised_case(name: str, random: np.random.Generator) -> dict[str, object]:
    blocks = random.integers(0, 256, size=(_BLOCKS, _BLOCK_BYTES[name]), dtype=np.uint8)
    at = _SCALE_AT.get(name, 0)
    blocks[:, at : at + 2] = np.array(_SCALES, dtype=np.float16).view(np.uint8).reshape(_BLOCKS, 2)
    if name in _WITH_MINIMUM:
        blocks[:, 2:4] = np.array(_MINIMUMS, dtype=np.float16).view(np.uint8).reshape(_BLOCKS, 2)
    values = dequantize(blocks.reshape(1, -1), GGMLQuantizationType[name])
    return {"type": name, "bytes": blocks.tobytes().hex(), "values": values.ravel().tolist()}


def half_case() -> dict[str, object]:
    values = [0.0, -0.0, 1.0, -2.5, 65504.0, 6.1035e-5, 5.96e-8, -3.0e-6, 0.333251953125]
    stored = np.array(values, dtype=np.float16)
    return {"type": "F16", "bytes": stored.tobytes().hex(), "values": stored.astype(np.float32).tolist()}


def bfloat16_case() -> dict[str, object]:
    stored = np.array([0x0000, 0x8000, 0x3F80, 0xC020, 0x7F7F, 0x0080, 0x0001, 0x3EAB], dtype=np.uint16)
    values = dequantize(stored.view(np.uint8).reshape(1, -1), GGMLQuantizationType.BF16)
    return {"type": "BF16", "bytes": stored.tobytes().hex(), "values": values.ravel().tolist()}


def main() -> None:
    random = np.random.default_rng(20240229)
    cases = [quantised_case(name, random) for name in _BLOCK_BYTES]
    cases += [half_case(), bfloat16_case()]
    text = ",\n".join(json.dumps(case) for case in cases)
    Path(sys.argv[1]).write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
