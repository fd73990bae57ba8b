"""KV rows read back from the cache service, or from a rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from heavywater.crc32c import crc32c
from heavywater.errors import HeavywaterError
from heavywater.v1 import common_pb2


class Chunk(Protocol):
    """A message of PageStoreService.Read or AttentionService.ReadKv."""

    @property
    def first_position(self) -> int: ...
    @property
    def rows(self) -> bytes: ...
    @property
    def crc32c(self) -> int: ...


def rows_of(responses: Iterable[Chunk]) -> bytes:
    """Joins the chunks of a read after checking each. Raises HeavywaterError DATA_LOSS."""
    chunks = []
    for response in responses:
        actual = crc32c(response.rows)
        if actual != response.crc32c:
            raise HeavywaterError(
                "DATA_LOSS",
                f"rows from position {response.first_position} have CRC32C {actual:#010x}, "
                f"want {response.crc32c:#010x}",
            )
        chunks.append(response.rows)
    return b"".join(chunks)


def split_rows(rows: bytes, fingerprint: common_pb2.Fingerprint) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(K, V), each [positions, head_dim]: float32, float16, or uint16 holding bfloat16's bits."""
    dtypes = {"fp32": "<f4", "bf16": "<u2", "fp16": "<f2"}
    if fingerprint.dtype not in dtypes:
        raise ValueError(f"KV dtype {fingerprint.dtype!r}, want one of {sorted(dtypes)}")
    values = np.frombuffer(rows, dtype=dtypes[fingerprint.dtype]).reshape(-1, 2, fingerprint.head_dim)
    return values[:, 0], values[:, 1]
