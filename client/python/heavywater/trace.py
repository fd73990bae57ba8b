"""Traces: Q, K and V of one sequence, recorded, for `heavywater replay`.

The format is in worker/replay/trace_file.h. This module writes fp32 and fp16 traces of
any engine's numbers, and reads both.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heavywater.crc32c import crc32c, crc32c_of_rows

VERSION = 1
_MAGIC = b"hwtrace\0"
_PREFIX = struct.Struct("<8sIII")  # magic, version, the header's bytes and checksum
_CHECKSUM_BLOCK = 4096
_MAX_HEADER_BYTES = 64 << 10
_DTYPES: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2")}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Trace:
    """q [layers][tokens][query heads][head_dim], k and v [layers][tokens][KV heads][head_dim], rotated."""

    q: Floats
    k: Floats
    v: Floats
    prompt_tokens: int  # the other tokens came one by one
    dtype: str = "fp32"  # in the file
    attention_scale: float = 0.0  # of the logits; 0: 1 / sqrt(head_dim)
    model: str = ""

    def header(self) -> dict[str, Any]:
        """Raises ValueError naming what does not fit together."""
        layers, tokens, query_heads, head_dim = self.q.shape
        kv_heads = self.k.shape[2]
        if self.k.shape != (layers, tokens, kv_heads, head_dim) or self.v.shape != self.k.shape:
            raise ValueError(
                f"q, k and v have shapes {self.q.shape}, {self.k.shape}, {self.v.shape}: they do not match"
            )
        if query_heads % kv_heads != 0:
            raise ValueError(f"{query_heads} query heads, want a multiple of the {kv_heads} KV heads")
        if not 1 <= self.prompt_tokens <= tokens:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}, want 1 to {tokens}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, want one of {', '.join(_DTYPES)}")
        return {
            "num_layers": layers,
            "num_query_heads": query_heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "num_tokens": tokens,
            "prompt_tokens": self.prompt_tokens,
            "dtype": self.dtype,
            "attention_scale": self.attention_scale,
            "model": self.model,
        }


def write_trace(path: Path, trace: Trace) -> None:
    """Writes the file; under its name once it is whole. Raises ValueError."""
    header = json.dumps(trace.header()).encode()
    stored = _DTYPES[trace.dtype]
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(_PREFIX.pack(_MAGIC, VERSION, len(header), crc32c(header)))
        file.write(header)
        for layer in range(len(trace.q)):
            rows = (trace.q[layer], trace.k[layer], trace.v[layer])
            if not all(np.isfinite(row).all() for row in rows):
                raise ValueError(f"layer {layer} holds a number that is not finite")
            data = b"".join(row.astype(stored).tobytes() for row in rows)
            file.write(data)
            file.write(struct.pack("<I", _checksum(data)))
    part.replace(path)


def read_header(path: Path) -> dict[str, Any]:
    """What Trace.header() was. Raises ValueError for a file of another kind."""
    with path.open("rb") as file:
        return _parse_header(path, file.read(_PREFIX.size + _MAX_HEADER_BYTES))[0]


def read_trace(path: Path) -> Trace:
    """Raises ValueError for a file that is cut off, changed, or of another kind."""
    data = path.read_bytes()
    header, first = _parse_header(path, data)
    if header["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: dtype is {header['dtype']!r}, want one of {', '.join(_DTYPES)}")
    return _read_layers(path, header, memoryview(data)[first:])


def _parse_header(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where the layers begin."""
    if len(data) < _PREFIX.size:
        raise ValueError(f"{path} has {len(data)} bytes, want a trace")
    magic, version, header_bytes, header_crc = _PREFIX.unpack_from(data)
    if magic != _MAGIC or version != VERSION or header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"{path} is no trace of version {VERSION}")
    text = data[_PREFIX.size : _PREFIX.size + header_bytes]
    if len(text) != header_bytes or crc32c(text) != header_crc:
        raise ValueError(f"{path}: its header is cut off or changed")
    header: dict[str, Any] = json.loads(text)
    return header, _PREFIX.size + header_bytes


def _read_layers(path: Path, header: dict[str, Any], data: memoryview) -> Trace:
    stored = _DTYPES[header["dtype"]]
    layers, tokens, head_dim = header["num_layers"], header["num_tokens"], header["head_dim"]
    heads = (header["num_query_heads"], header["num_kv_heads"], header["num_kv_heads"])
    counts = [tokens * count * head_dim for count in heads]
    layer_bytes = sum(counts) * stored.itemsize
    if len(data) != layers * (layer_bytes + 4):
        raise ValueError(f"{path} has {len(data)} bytes of layers, want {layers * (layer_bytes + 4)}")
    parts: list[list[Floats]] = [[], [], []]
    for layer in range(layers):
        first = layer * (layer_bytes + 4)
        rows = bytes(data[first : first + layer_bytes])
        if struct.unpack_from("<I", data, first + layer_bytes)[0] != _checksum(rows):
            raise ValueError(f"{path}: layer {layer} has another checksum")
        begin = 0
        for part, count, head_count in zip(parts, counts, heads, strict=True):
            numbers = np.frombuffer(rows, stored, count, begin * stored.itemsize)
            part.append(numbers.astype(np.float32).reshape(tokens, head_count, head_dim))
            begin += count
    q, k, v = (np.stack(part) for part in parts)
    return Trace(q, k, v, header["prompt_tokens"], header["dtype"], header["attention_scale"], header["model"])


def _checksum(data: bytes) -> int:
    """CRC32C over the CRC32Cs of blocks."""
    whole = len(data) // _CHECKSUM_BLOCK
    blocks = np.frombuffer(data, np.uint8, whole * _CHECKSUM_BLOCK).reshape(whole, _CHECKSUM_BLOCK)
    checksums = crc32c_of_rows(blocks).astype("<u4").tobytes()
    rest = data[whole * _CHECKSUM_BLOCK :]
    return crc32c(checksums + (struct.pack("<I", crc32c(rest)) if rest else b""))
