"""Extracts a book from the data of the R package janeaustenr (Debian: r-cran-janeaustenr).

R keeps a package's data in a lazy-load database: `Rdata.rdb` is a sequence of
records, each a 4-byte big-endian length (of the unpacked bytes) followed by a
zlib stream of R's XDR serialization; `Rdata.rdx` is a compressed serialized
list that maps each name to the (offset, length) of its record.

    python janeausten.py .../janeaustenr/data/Rdata northanger.txt
"""

from __future__ import annotations

import argparse
import struct
import zlib
from pathlib import Path
from typing import Any

# SEXPTYPE codes of R's serialization (R internals, section 1.8).
_SYMSXP, _LISTSXP, _CHARSXP, _LGLSXP, _INTSXP, _REALSXP = 1, 2, 9, 10, 13, 14
_STRSXP, _VECSXP, _REFSXP, _NILVALUE_SXP = 16, 19, 255, 254
_HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400


class RList(dict[str, Any]):
    """A named R list."""


class _XdrReader:
    """Reads the part of R's XDR serialization that plain vectors and lists need."""

    def __init__(self, data: bytes) -> None:
        if data[:2] != b"X\n":
            raise ValueError(f"not an R XDR stream: starts with {data[:2]!r}, want b'X\\n'")
        self._data = data
        self._at = 2
        self._symbols: list[str] = []
        version = self._int()
        self._at += 8  # version of the writer, least version of a reader
        if version == 3:
            self._take(self._int())  # native encoding
        elif version != 2:
            raise ValueError(f"R serialization version {version}, want 2 or 3")

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise ValueError(f"R stream ends at byte {len(self._data)}, want {self._at + size}")
        chunk = self._data[self._at : self._at + size]
        self._at += size
        return chunk

    def _int(self) -> int:
        return int(struct.unpack(">i", self._take(4))[0])

    def _numbers(self, code: str, width: int) -> list[Any]:
        count = self._int()
        return list(struct.unpack(f">{count}{code}", self._take(count * width)))

    def read(self) -> Any:
        """Returns the next item: a list, an RList, a string or None."""
        flags = self._int()
        kind = flags & 0xFF
        if kind == _NILVALUE_SXP:
            return None
        if kind == _REFSXP:
            return self._symbols[(flags >> 8) - 1]
        if kind == _SYMSXP:
            self._symbols.append(self.read())
            return self._symbols[-1]
        if kind == _CHARSXP:
            size = self._int()
            return None if size < 0 else self._take(size).decode("utf-8")
        if kind == _LISTSXP:
            return self._pairlist(flags)
        value = self._vector(kind)
        if flags & _HAS_ATTRIBUTES:
            names = (self.read() or {}).get("names")
            if kind == _VECSXP and names is not None:
                return RList(zip(names, value, strict=True))
        return value

    def _pairlist(self, flags: int) -> RList:
        pairs = RList()
        while flags & 0xFF == _LISTSXP:
            if flags & _HAS_ATTRIBUTES:
                self.read()
            tag = self.read() if flags & _HAS_TAG else str(len(pairs))
            pairs[tag] = self.read()
            flags = self._int()
        return pairs

    def _vector(self, kind: int) -> list[Any]:
        if kind in (_LGLSXP, _INTSXP):
            return self._numbers("i", 4)
        if kind == _REALSXP:
            return self._numbers("d", 8)
        if kind in (_STRSXP, _VECSXP):
            return [self.read() for _ in range(self._int())]
        raise ValueError(f"R type {kind} at byte {self._at} is not supported")


def _read_index(prefix: Path) -> dict[str, list[int]]:
    packed = Path(f"{prefix}.rdx").read_bytes()
    plain = zlib.decompress(packed, wbits=zlib.MAX_WBITS | 32)  # zlib or gzip
    return _XdrReader(plain).read()["variables"]


def book_names(prefix: Path) -> list[str]:
    """Names of the books in the database `prefix`.rdb / `prefix`.rdx."""
    return sorted(_read_index(prefix))


def read_lines(prefix: Path, book: str) -> list[str]:
    """Lines of one book. Raises KeyError for an unknown name."""
    index = _read_index(prefix)
    if book not in index:
        raise KeyError(f"no book {book!r}, there are {sorted(index)}")
    offset, length = index[book]
    record = Path(f"{prefix}.rdb").read_bytes()[offset : offset + length]
    (plain_bytes,) = struct.unpack(">I", record[:4])
    plain = zlib.decompress(record[4:])
    if len(plain) != plain_bytes:
        raise ValueError(f"record of {book!r} has {len(plain)} bytes, want {plain_bytes}")
    return _XdrReader(plain).read()


def read_book(prefix: Path, book: str = "northangerabbey") -> str:
    """Text of one book: its lines joined by newlines."""
    return "\n".join(read_lines(prefix, book))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefix", type=Path, help="path of Rdata.rdb without its ending")
    parser.add_argument("out", type=Path)
    parser.add_argument("--book", default="northangerabbey")
    args = parser.parse_args()
    args.out.write_bytes(read_book(args.prefix, args.book).encode("utf-8"))


if __name__ == "__main__":
    main()
