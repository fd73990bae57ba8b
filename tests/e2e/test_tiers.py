"""Tiers below host memory: finished sequences go down to disk and on to Redis, and read back bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
from cluster import Cluster, cluster, summary, token_ids
from heavywater.v1 import admin_pb2, page_store_pb2, sequence_pb2

LAYERS = 30
HEADS = 3
PAGE_TOKENS = 32
PAGE_BYTES = 8192
# A page of all layers and heads.
PAGE_ROW = LAYERS * HEADS * PAGE_BYTES
PROMPT = 64
NEW_TOKENS = 8
SEEN = PROMPT + NEW_TOKENS - 1  # three pages a sequence, the last one not full
SEQUENCES = 9
POLICY = {"heavy_tokens": 24, "recent_tokens": 8, "sink_tokens": 4}


class Redis:
    """A server of its own, ended by its process id."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["redis-server", *options, "--dir", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def pause(self) -> None:
        """It lives, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


@dataclass
class Written:
    """One finished sequence: what the client got, what the rank wrote."""

    sequence: int
    ids: list[int]
    rows: np.ndarray  # [layer][kv_head][position][row bytes]

    def page(self, layer: int, head: int, page: int) -> bytes:
        return bytes(self.rows[layer, head, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].tobytes())


@dataclass
class Tiers:
    group: Cluster
    redis: Redis
    disk: Path
    prompt: list[int]
    written: list[Written] = field(default_factory=list)

    def generate(self, shift: int) -> Written:
        prompt = self.prompt[shift : shift + PROMPT]
        messages = self.group.generate(tokens=prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, policy=POLICY)
        assert summary(messages).counts.tokens_dropped == 0
        sequence = messages[0].sequence_id
        return Written(sequence, token_ids(messages), _rows(self.group.folder / "dumps", sequence))

    def read(self, one: Written, layer: int, head: int, page: int, timeout_s: float = 20) -> bytes:
        first = page * PAGE_TOKENS
        request = page_store_pb2.ReadRequest(
            sequence_id=one.sequence,
            layer=layer,
            kv_head=head,
            first_position=first,
            num_positions=min(PAGE_TOKENS, SEEN - first),
        )
        return b"".join(chunk.rows for chunk in self.group.pages.Read(request, timeout=timeout_s))

    def code(self, one: Written, layer: int, head: int, page: int) -> grpc.StatusCode:
        """Of a read, whose bytes are right where it is OK."""
        try:
            assert self.read(one, layer, head, page) == one.page(layer, head, page)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def stats(self, tier: str) -> admin_pb2.TierStats:
        tiers = self.group.admin.Stats(admin_pb2.StatsRequest(), timeout=10).tiers
        for one in tiers:
            assert one.used_bytes + one.free_bytes == one.total_bytes, one
        return next(one for one in tiers if one.tier == tier)

    def wait_for(self, what: str, reached: object) -> None:
        deadline = time.monotonic() + 30
        while not reached():  # type: ignore[operator]
            assert time.monotonic() < deadline, what
            time.sleep(0.05)


def _rows(dumps: Path, sequence: int) -> np.ndarray:
    stem = dumps / f"seq{sequence}_rank0"
    deadline = time.monotonic() + 10
    while not (stem.with_suffix(".json").exists() and stem.with_suffix(".kv").exists()):
        assert time.monotonic() < deadline, f"no dump {stem}"
        time.sleep(0.05)
    dump = json.loads(stem.with_suffix(".json").read_text())
    shape = (dump["num_layers"], dump["num_kv_heads"], dump["tokens_seen"], dump["row_bytes"])
    rows = np.fromfile(stem.with_suffix(".kv"), dtype=np.uint8).reshape(shape)
    assert rows.shape == (LAYERS, HEADS, SEEN, 256)
    return rows


PAGES = [(layer, head, page) for layer in range(LAYERS) for head in range(HEADS) for page in range(3)]


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory, long_prompt: list[int]) -> Iterator[Tiers]:
    """A slab of six pages for each layer and head, a disk of eight, and sequences of three."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("tiers")
    (folder / "dumps").mkdir()
    redis = Redis(folder)
    cache = {
        "host_bytes": 6 * PAGE_ROW,
        "disk_path": folder / "disk",
        "disk_bytes": 8 * PAGE_ROW,
        "redis_address": redis.address,
        "redis_bytes": 100 * PAGE_ROW,
        "redis_timeout_ms": 2000,
        "sequence_lease_ms": 600_000,
    }
    worker = {
        "page_tokens": PAGE_TOKENS,
        "reserve_ahead_tokens": PAGE_TOKENS,
        "dump_dir": folder / "dumps",
        "device_memory_bytes": 1 << 29,
    }
    try:
        with cluster(folder, cache=cache, worker=worker) as group:
            started = Tiers(group, redis, folder / "disk", long_prompt)
            for number in range(SEQUENCES):
                started.written.append(started.generate(shift=10 * number))
            yield started
    finally:
        redis.kill()


def test_early_sequences_have_moved_down_and_none_was_ended(tiers: Tiers) -> None:
    for tier in ("disk", "remote"):
        tiers.wait_for(f"pages in tier {tier}", lambda tier=tier: tiers.stats(tier).pages > 0)
    for one in tiers.written:
        held = tiers.group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=one.sequence), timeout=10)
        assert held.finished
    first = tiers.written[0]
    held = tiers.group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=first.sequence), timeout=10)
    assert held.host_bytes == 0
    assert tiers.stats("host").moved_down == tiers.stats("disk").moved_in
    assert tiers.stats("disk").moved_down == tiers.stats("remote").moved_in


def test_every_row_of_the_first_sequence_reads_back_bit_for_bit(tiers: Tiers) -> None:
    first = tiers.written[0]
    before = tiers.stats("remote").hits
    for layer, head, page in PAGES:
        assert tiers.read(first, layer, head, page) == first.page(layer, head, page), (layer, head, page)
    assert tiers.stats("remote").hits > before


def test_every_page_of_every_sequence_is_still_there(tiers: Tiers) -> None:
    for one in tiers.written:
        for layer, head, page in PAGES[:: len(PAGES) // 40]:
            assert tiers.read(one, layer, head, page) == one.page(layer, head, page), (one.sequence, layer, head, page)


def _flip_on_disk(folder: Path, page: bytes) -> bool:
    """Every copy that the disk tier's files hold of it."""
    found = False
    for file in folder.glob("*.blob"):
        at = file.read_bytes().find(page)
        if at < 0:
            continue
        with file.open("r+b") as out:
            out.seek(at + 100)
            out.write(bytes([page[100] ^ 1]))
        found = True
    return found


def test_a_page_that_changes_on_disk_is_data_loss_and_the_others_are_not(tiers: Tiers) -> None:
    def damaged() -> tuple[Written, tuple[int, int, int]]:
        for one in reversed(tiers.written):
            for layer, head, page in [p for p in PAGES if p[2] < 2]:  # whole pages
                if not _flip_on_disk(tiers.disk, one.page(layer, head, page)):
                    continue
                # It may have been a copy that had moved on, which nobody reads.
                if tiers.code(one, layer, head, page) == grpc.StatusCode.DATA_LOSS:
                    return one, (layer, head, page)
        pytest.fail("no page lies on disk")

    one, where = damaged()
    assert tiers.stats("disk").failures_corrupt >= 1
    for other in tiers.written:
        codes = {tiers.code(other, *p) for p in PAGES[::7] if (other.sequence, p) != (one.sequence, where)}
        assert codes == {grpc.StatusCode.OK}


def test_a_redis_that_hangs_holds_up_only_reads_of_its_own_pages(tiers: Tiers) -> None:
    """Those readers give up (and the service goes on with their reads, then without them)."""
    newest = tiers.generate(shift=5)
    first = tiers.written[0]
    tiers.redis.pause()
    try:
        gave_up = 0
        for where in PAGES[::9]:
            try:
                tiers.read(first, *where, timeout_s=0.2)
            except grpc.RpcError as error:
                assert error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
                gave_up += 1
            start = time.monotonic()
            assert tiers.read(newest, *where) == newest.page(*where)
            assert time.monotonic() - start < 1.0
        assert gave_up > 0
        assert tiers.generate(shift=5).ids == newest.ids
    finally:
        tiers.redis.resume()
    tiers.wait_for("Redis back", lambda: {tiers.code(first, *p) for p in PAGES[::9]} == {grpc.StatusCode.OK})
    tiers.stats("remote")  # free + used = total


def test_without_redis_its_pages_are_unavailable_and_generation_goes_on(tiers: Tiers) -> None:
    """Last in this file: it ends the Redis."""
    tiers.wait_for("pages in Redis", lambda: tiers.stats("remote").pages > 0)
    tiers.redis.kill()
    codes = [tiers.code(one, *p) for one in tiers.written for p in PAGES[::30]]
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS}
    assert codes.count(grpc.StatusCode.UNAVAILABLE) > 0
    assert tiers.stats("remote").failures_unavailable > 0
    again = tiers.generate(shift=0)
    assert again.ids == tiers.written[0].ids
    assert tiers.code(again, 0, 0, 0) == grpc.StatusCode.OK
