"""Long public-domain English: the novels of the Debian package r-cran-janeaustenr.

R keeps a package's data in a lazy-load database: `Rdata.rdx` maps names to
(offset, length) of records in `Rdata.rdb`; a record is the length of the unpacked
bytes (4, big endian) and a zlib stream of R's XDR serialization (R internals, 1.8).
"""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

PACKAGE = "r-cran-janeaustenr"
_INSTALLED = Path("/usr/lib/R/site-library")
_DATA = Path("janeaustenr/data/Rdata")

_SYMBOL, _PAIRLIST, _STRING, _LOGICALS, _INTS = 1, 2, 9, 10, 13
_STRINGS, _VECTOR, _NIL, _REFERENCE = 16, 19, 254, 255
_HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400


def read_book(book: str = "northangerabbey") -> str:
    """The book's lines joined by newlines; the package is fetched once when it is not installed."""
    prefix = _INSTALLED / _DATA
    if not prefix.with_suffix(".rdb").is_file():
        prefix = _fetched() / "usr/lib/R/site-library" / _DATA
    index = _load(zlib.decompress(prefix.with_suffix(".rdx").read_bytes(), zlib.MAX_WBITS | 32))
    offset, length = index["variables"][book]
    record = prefix.with_suffix(".rdb").read_bytes()[offset : offset + length]
    return "\n".join(_load(zlib.decompress(record[4:])))


def _fetched() -> Path:
    """Folder with the unpacked Debian package, fetched through apt."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "heavywater" / PACKAGE
    if cache.is_dir():
        return cache
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
        os.chmod(scratch, 0o755)  # apt downloads as the user _apt
        if _run(["apt-get", "download", PACKAGE], scratch) != 0:
            _run(["apt-get", "update", "-q"], scratch)
            if _run(["apt-get", "download", PACKAGE], scratch) != 0:
                raise RuntimeError(f"apt-get download {PACKAGE} failed; install {PACKAGE}, or give --text FILE")
        archive = next(Path(scratch).glob("*.deb"))
        unpacked = Path(scratch) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", str(archive), str(unpacked)], check=True)
        unpacked.rename(cache)
    return cache


def _run(command: list[str], folder: str) -> int:
    return subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def _load(data: bytes) -> Any:
    """One value of R's XDR serialization: lists, strings and integers."""
    return _Reader(data).item()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at, self._symbols = data, 2, list[str]()
        if data[:2] != b"X\n":
            raise ValueError(f"R stream starts with {data[:2]!r}, want b'X\\n'")
        version = self._int()
        self._at += 8  # versions of the writer and of the oldest reader
        if version == 3:
            self._bytes(self._int())  # the native encoding's name

    def _bytes(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def _int(self) -> int:
        return int(struct.unpack(">i", self._bytes(4))[0])

    def item(self) -> Any:
        return self._item(self._int())

    def _item(self, flags: int) -> Any:
        kind = flags & 0xFF
        if kind == _NIL:
            return None
        if kind == _REFERENCE:
            return self._symbols[(flags >> 8) - 1]
        if kind == _SYMBOL:
            self._symbols.append(self.item())
            return self._symbols[-1]
        if kind == _STRING:
            size = self._int()
            return None if size < 0 else self._bytes(size).decode("utf-8")
        if kind == _PAIRLIST:
            return self._pairs(flags)
        if kind in (_LOGICALS, _INTS):
            values = [self._int() for _ in range(self._int())]
        elif kind in (_STRINGS, _VECTOR):
            values = [self.item() for _ in range(self._int())]
        else:
            raise ValueError(f"R type {kind} at byte {self._at} is not supported")
        attributes = self.item() if flags & _HAS_ATTRIBUTES else None
        names = (attributes or {}).get("names")
        return dict(zip(names, values, strict=True)) if kind == _VECTOR and names else values

    def _pairs(self, flags: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while flags & 0xFF == _PAIRLIST:
            if flags & _HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & _HAS_TAG else str(len(pairs))
            pairs[tag] = self.item()
            flags = self._int()
        return pairs
