"""Values by key, against a real cache service."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from heavywater import crc32c as checksums
from heavywater.blobs import BlobClient
from heavywater.errors import HeavywaterError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from real_cache import cache_service

MIB = 1 << 20


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cache_service(tmp_path_factory.mktemp("cache"), host_bytes=64 * MIB, blob_bytes=16 * MIB) as (address, _):
        yield address


@pytest.fixture
def blobs(address: str) -> Iterator[BlobClient]:
    with BlobClient(address) as client:
        client.erase("space")
        yield client


def test_values_of_any_size_come_back(blobs: BlobClient) -> None:
    values = {str(size).encode(): os.urandom(size) for size in (1, 4096, MIB, MIB + 1, 3 * MIB + 17)}
    assert blobs.put("space", values) == dict.fromkeys(values, True)
    assert blobs.get("space", [*values, b"missing"]) == [*values.values(), None]
    assert blobs.has("space", [b"missing", b"1"]) == [False, True]
    assert blobs.get("another space", [b"1"]) == [None]


def test_what_is_there_is_not_sent_again(blobs: BlobClient) -> None:
    assert blobs.put("space", {b"key": b"first"}) == {b"key": True}
    assert blobs.put("space", {b"key": b"other"}) == {b"key": True}
    assert blobs.get("space", [b"key"]) == [b"first"]


def test_values_of_several_pieces_are_read_into_several_pieces(blobs: BlobClient) -> None:
    value = os.urandom(2 * MIB + 100)
    pieces = [memoryview(value)[:10], memoryview(value)[10 : MIB + 5], memoryview(value)[MIB + 5 :]]
    assert blobs.put_parts("space", [b"key"], [pieces]) == [True]
    assert blobs.get("space", [b"key"]) == [value]
    target = bytearray(len(value))
    view = memoryview(target)
    assert blobs.get_into("space", [b"missing", b"key"], [[memoryview(bytearray(1))], [view[:MIB], view[MIB:]]]) == [
        False,
        True,
    ]
    assert target == value
    with pytest.raises(HeavywaterError, match=f"the value has {len(value)} bytes, its target 5"):
        blobs.get_into("space", [b"key"], [[memoryview(bytearray(5))]])


def test_more_keys_than_one_call_takes(blobs: BlobClient) -> None:
    values = {f"{i}".encode(): f"value {i}".encode() for i in range(1030)}
    assert all(blobs.put("space", values).values())
    assert blobs.get("space", list(values)) == list(values.values())
    assert blobs.erase("space", [b"0", b"1029", b"missing"]) == 2
    assert blobs.erase("space") == 1028


def test_what_finds_no_room_is_told(blobs: BlobClient) -> None:
    assert blobs.put("space", {b"a": b"x", b"large": bytes(17 * MIB), b"b": b"y"}) == {
        b"a": True,
        b"large": False,
        b"b": True,
    }


def test_an_empty_value_is_refused(blobs: BlobClient) -> None:
    with pytest.raises(HeavywaterError) as refused:
        blobs.put("space", {b"key": b""})
    assert refused.value.code == "INVALID_ARGUMENT"


def test_bytes_that_have_changed_on_the_way_are_data_loss(blobs: BlobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs.put("space", {b"key": b"value"})
    monkeypatch.setattr("heavywater.blobs.crc32c", lambda data: 0)
    for call in (lambda: blobs.get("space", [b"key"]), lambda: blobs.put("space", {b"other": b"value"})):
        with pytest.raises(HeavywaterError) as lost:
            call()
        assert lost.value.code == "DATA_LOSS"
    assert blobs.has("space", [b"other"]) == [False]


def test_a_service_without_room_for_values_says_so(tmp_path: Path) -> None:
    with (
        cache_service(tmp_path) as (address, _),
        BlobClient(address) as client,
        pytest.raises(HeavywaterError, match="blob_bytes is 0"),
    ):
        client.put("space", {b"key": b"value"})


def test_values_outlive_the_service_with_a_state_dir(tmp_path: Path) -> None:
    """In the slab and on disk; killed, not asked."""
    flags = {
        "host_bytes": 8 * MIB,
        "blob_bytes": 64 * MIB,
        "disk_path": tmp_path / "disk",
        "disk_bytes": 64 * MIB,
        "state_dir": tmp_path / "state",
    }
    values = {f"{i}".encode(): os.urandom(MIB) for i in range(12)}
    with cache_service(tmp_path, **flags) as (address, process), BlobClient(address) as client:
        assert all(client.put("space", values).values())
        process.kill()
    with cache_service(tmp_path, **flags) as (address, _), BlobClient(address) as client:
        assert client.get("space", list(values)) == list(values.values())
        assert client.erase("space") == 12
    # It waits for a service with this state_dir, and there is none any more.
    for slab in re.findall(r'slab="(heavywater-state-[^"]+)"', (tmp_path / "cache.log").read_text()):
        (Path("/dev/shm") / slab).unlink(missing_ok=True)


def test_checksums_without_the_package_are_those_with_it() -> None:
    assert checksums.crc32c_without_package(b"123456789") == 0xE3069283  # the standard's check value
    for size in (0, 1, 127, 128, 129, 1000, 5000):
        data = os.urandom(size)
        register = 0xFFFFFFFF
        for byte in data:
            register = (register >> 8) ^ int(checksums._TABLE[(register ^ byte) & 0xFF])
        assert checksums.crc32c_without_package(data) == register ^ 0xFFFFFFFF
    google_crc32c = pytest.importorskip("google_crc32c")
    data = os.urandom(MIB + 3)
    assert checksums.crc32c(data) == google_crc32c.value(data) == checksums.crc32c_without_package(data)
