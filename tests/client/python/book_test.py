"""The reader of R's lazy-load databases, on one made here, and the packaged book where it can be had."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from heavywater import book


def _int(value: int) -> bytes:
    return struct.pack(">i", value)


def _string(text: str) -> bytes:
    data = text.encode()
    return _int(9) + _int(len(data)) + data


def _strings(*texts: str) -> bytes:
    return _int(16) + _int(len(texts)) + b"".join(map(_string, texts))


def _named_list(**items: bytes) -> bytes:
    """A generic vector with the attribute `names`."""
    names = _int(2 | 0x400) + _int(1) + _string("names") + _strings(*items) + _int(254)
    return _int(19 | 0x200) + _int(len(items)) + b"".join(items.values()) + names


def _stream(item: bytes) -> bytes:
    return b"X\n" + _int(2) + _int(0) + _int(0) + item


def _database(folder: Path, lines: list[str]) -> None:
    plain = _stream(_strings(*lines))
    record = struct.pack(">I", len(plain)) + zlib.compress(plain)
    place = _int(13) + _int(2) + _int(3) + _int(len(record))  # 3 bytes of another record come first
    index = _stream(_named_list(variables=_named_list(emma=place)))
    (folder / "Rdata.rdb").write_bytes(b"abc" + record)
    (folder / "Rdata.rdx").write_bytes(zlib.compress(index))


def test_a_books_lines_are_joined_by_newlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _database(tmp_path, ["EMMA", "", "Emma Woodhouse, née élégante"])
    monkeypatch.setattr(book, "_INSTALLED", tmp_path)
    monkeypatch.setattr(book, "_DATA", Path("Rdata"))
    assert book.read_book("emma") == "EMMA\n\nEmma Woodhouse, née élégante"


def test_a_stream_that_is_not_rs_is_refused() -> None:
    with pytest.raises(ValueError, match="R stream starts with"):
        book._load(b"PK\x03\x04 and so on")
