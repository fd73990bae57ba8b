"""CRC32C (Castagnoli), as the servers compute it."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

try:
    import google_crc32c
except ImportError:
    google_crc32c = None

_POLYNOMIAL = 0x82F63B78  # reflected
_ROW_BYTES = 128  # of a long text, which is cut into rows that are checked side by side

Words = npt.NDArray[np.uint32]


def _make_table() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    """Checksum of `data`: some 100 MB/s, or as fast as memory where the package google-crc32c is installed."""
    if google_crc32c is not None:
        return int(google_crc32c.value(data))
    return crc32c_without_package(data)


def crc32c_without_package(data: bytes) -> int:
    """The same, with numpy alone."""
    # Registers are linear in the data, and zeros in front of it change nothing where they begin at 0: so the rows'
    # are joined pair by pair, and what beginning at all ones adds comes last.
    num_rows = 1
    while num_rows * _ROW_BYTES < len(data):
        num_rows *= 2
    padded = np.zeros(num_rows * _ROW_BYTES, np.uint8)
    padded[len(padded) - len(data) :] = np.frombuffer(data, np.uint8)
    registers = _registers_of_rows(padded.reshape(num_rows, _ROW_BYTES), 0)
    row_bytes = _ROW_BYTES
    while len(registers) > 1:
        registers = _apply(_zeros_operator(row_bytes), registers[0::2]) ^ registers[1::2]
        row_bytes *= 2
    first = np.array([0xFFFFFFFF], np.uint32)
    for bit in range(len(data).bit_length()):
        if len(data) >> bit & 1:
            first = _apply(_zeros_operator(1 << bit), first)
    return int(registers[0] ^ first[0]) ^ 0xFFFFFFFF


def crc32c_of_rows(rows: npt.NDArray[np.uint8]) -> Words:
    """Checksums of each row of [rows][bytes], all rows at a time: some 100 MB/s for many."""
    return _registers_of_rows(rows, 0xFFFFFFFF) ^ np.uint32(0xFFFFFFFF)


def _registers_of_rows(rows: npt.NDArray[np.uint8], first: int) -> Words:
    registers = np.full(len(rows), first, np.uint32)
    for column in np.ascontiguousarray(rows.T):
        registers = (registers >> np.uint32(8)) ^ _TABLE[(registers ^ column) & np.uint32(0xFF)]
    return registers


@functools.cache
def _zeros_operator(num_bytes: int) -> Words:
    """What `num_bytes` zeros, a power of two, make of a register: what they make of each of its 32 bits."""
    if num_bytes == 1:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        one: Words = (bits >> np.uint32(8)) ^ _TABLE[bits & np.uint32(0xFF)]
        return one
    half = _zeros_operator(num_bytes // 2)
    return _apply(half, half)


def _apply(operator: Words, registers: Words) -> Words:
    result = np.zeros_like(registers)
    for bit in range(32):
        result ^= np.where(registers >> np.uint32(bit) & np.uint32(1), operator[bit], np.uint32(0))
    return result
