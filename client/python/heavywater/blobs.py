"""Values by key at the cache service: what integrations with other engines' caches stand on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from heavywater.client import CHANNEL_OPTIONS
from heavywater.crc32c import crc32c
from heavywater.errors import HeavywaterError, translated
from heavywater.security import Security
from heavywater.v1 import blob_pb2, blob_pb2_grpc

MAX_KEYS = 1024  # of one call
CHUNK_BYTES = 1 << 20

# A value's bytes, in one or more pieces of memory (of bytes, one after the other).
Parts = Sequence[memoryview]

Item = TypeVar("Item")


class BlobClient:
    """Stores and reads values by key. Threads may share one.

    Keys are bytes, of a space: a text that says whose they are, and all that makes their bytes what they are (model,
    dtype, layout, rank). Equal keys of a space must mean equal bytes: a value that is there is not replaced. It is a
    cache: values go when room is needed. Every call raises HeavywaterError; nothing is repeated.

        with BlobClient("127.0.0.1:7700") as blobs:
            blobs.put("my model", {b"key": b"value"})
            assert blobs.get("my model", [b"key"]) == [b"value"]
    """

    def __init__(
        self, address: str, *, timeout_s: float = 30.0, security: Security | None = None, tenant: str = ""
    ) -> None:
        """`address`: the cache service's host:port; its configuration must give it `blob_bytes`.

        `tenant`: whose quota bounds what is stored.
        `security`: TLS and the token, whose role must be worker; None: Security.from_environment().
        """
        security = Security.from_environment() if security is None else security
        self._channel = security.channel(address, CHANNEL_OPTIONS)
        self._stub = blob_pb2_grpc.BlobServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._tenant = tenant

    def disconnect(self) -> None:
        """Closes the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> BlobClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def put(self, space: str, values: dict[bytes, bytes]) -> dict[bytes, bool]:
        """By key: whether its value is there now. Those that find no room are not."""
        stored = self.put_parts(space, list(values), [[memoryview(value)] for value in values.values()])
        return dict(zip(values, stored, strict=True))

    def put_parts(self, space: str, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        """As `put`, in the order of the keys. What is there already is not sent."""
        stored = self.has(space, keys)
        missing = [index for index, present in enumerate(stored) if not present]
        for batch in _batches(missing):
            requests = itertools.chain.from_iterable(
                _put_requests(space, keys[i], values[i], self._tenant) for i in batch
            )
            with translated():
                response = self._stub.Put(requests, timeout=self._timeout_s)
            for index, is_stored in zip(batch, response.stored, strict=True):
                stored[index] = is_stored
        return stored

    def get(self, space: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values; None for those that are not there."""
        values: list[bytes | None] = []
        for batch in _batches(keys):
            found: list[bytearray | None] = [bytearray() for _ in batch]
            for chunk in self._chunks(space, batch):
                if chunk.missing:
                    found[chunk.index] = None
                elif (value := found[chunk.index]) is not None:
                    value += chunk.data
            values += [None if value is None else bytes(value) for value in found]
        return values

    def get_into(self, space: str, keys: Sequence[bytes], targets: Sequence[Parts]) -> list[bool]:
        """Copies values to where they are wanted: by key, whether it was there.

        Where it was not, what lies in its target is void. FAILED_PRECONDITION: a value has another size than its
        target.
        """
        found = []
        for batch in _batches(range(len(keys))):
            writers = [_PartsWriter(targets[i]) for i in batch]
            is_there = [True] * len(batch)
            for chunk in self._chunks(space, [keys[i] for i in batch]):
                if chunk.missing:
                    is_there[chunk.index] = False
                    continue
                writer = writers[chunk.index]
                if chunk.total_bytes != writer.total_bytes:
                    raise HeavywaterError(
                        "FAILED_PRECONDITION",
                        f"the value has {chunk.total_bytes} bytes, its target {writer.total_bytes}",
                    )
                writer.write(chunk.data)
            found += is_there
        return found

    def has(self, space: str, keys: Sequence[bytes]) -> list[bool]:
        """By key: whether it has a value now."""
        present: list[bool] = []
        for batch in _batches(keys):
            with translated():
                request = blob_pb2.HasBlobsRequest(space=space, keys=batch)
                present += self._stub.Has(request, timeout=self._timeout_s).present
        return present

    def erase(self, space: str, keys: Sequence[bytes] | None = None) -> int:
        """How many values went: those of the keys, or all of the space."""
        erased = 0
        for batch in [[]] if keys is None else _batches(keys):
            with translated():
                request = blob_pb2.EraseBlobsRequest(space=space, keys=batch)
                erased += self._stub.Erase(request, timeout=self._timeout_s).erased
        return erased

    def _chunks(self, space: str, keys: Sequence[bytes]) -> Iterator[blob_pb2.GetBlobsResponse]:
        """Each checked."""
        with translated():
            request = blob_pb2.GetBlobsRequest(space=space, keys=keys)
            for chunk in self._stub.Get(request, timeout=self._timeout_s):
                if not chunk.missing and crc32c(chunk.data) != chunk.crc32c:
                    raise HeavywaterError("DATA_LOSS", f"bytes from {chunk.offset} of key {chunk.index} have changed")
                yield chunk


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for first in range(0, len(items), MAX_KEYS):
        yield items[first : first + MAX_KEYS]


def _put_requests(space: str, key: bytes, parts: Parts, tenant: str) -> Iterator[blob_pb2.PutBlobsRequest]:
    total_bytes = sum(part.nbytes for part in parts)
    for index, data in enumerate(_cut(parts) if total_bytes else [b""]):
        request = blob_pb2.PutBlobsRequest(data=data, crc32c=crc32c(data))
        if index == 0:
            request.space, request.key, request.total_bytes = space, key, total_bytes
            request.tenant = tenant
        yield request


def _cut(parts: Parts) -> Iterator[bytes]:
    """The parts, joined and cut into chunks."""
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        while part.nbytes:
            piece = part[:room]
            pieces.append(piece)
            part = part[piece.nbytes :]
            room -= piece.nbytes
            if room == 0:
                yield b"".join(pieces)
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield b"".join(pieces)


class _PartsWriter:
    """Writes what comes in order to where the parts lie."""

    def __init__(self, parts: Parts) -> None:
        self.total_bytes = sum(part.nbytes for part in parts)
        self._parts = iter(parts)
        self._room = memoryview(b"")

    def write(self, data: bytes) -> None:
        """The next bytes, no more than are missing."""
        source = memoryview(data)
        while source.nbytes:
            if self._room.nbytes == 0:
                self._room = next(self._parts)
            piece = source[: self._room.nbytes]
            self._room[: piece.nbytes] = piece
            self._room = self._room[piece.nbytes :]
            source = source[piece.nbytes :]
