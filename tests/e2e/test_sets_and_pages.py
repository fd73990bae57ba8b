"""After a generation on three ranks: every position is accounted for, and every demoted byte is there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from cluster import Cluster, cluster, summary
from heavywater.v1 import page_store_pb2, sequence_pb2

NEW_TOKENS = 200
SIZE = 3
LAYERS = 30
LEASE_MS = 8000
SEED = 20261129
BUDGET = {"heavy_tokens": 96, "recent_tokens": 64, "sink_tokens": 4}


class Run:
    """One finished generation: what the service says, what the ranks dumped."""

    def __init__(self, group: Cluster, folder: Path, prompt: list[int], scope: str, head_budgets: str = "even") -> None:
        policy = {"policy": "snapkv_h2o", "scope": scope, "head_budgets": head_budgets, **BUDGET}
        messages = group.generate(tokens=prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, policy=policy)
        self.scope = scope
        self.head_budgets = head_budgets
        self.group = group
        self.summary = summary(messages)
        self.sequence = messages[0].sequence_id
        self.seen = self.summary.counts.tokens_seen
        self.dumps = [_dump(folder, self.sequence, rank) for rank in range(SIZE)]
        self.sets = self._settled_sets()

    def _settled_sets(self) -> list[sequence_pb2.SequenceSet]:
        """Reports come behind the step: waits for those of the last plan."""
        deadline = time.monotonic() + 10
        while True:
            request = sequence_pb2.GetSetsRequest(sequence_id=self.sequence)
            sets = list(self.group.sequences.GetSets(request, timeout=10))
            if sets and all(s.plan == self.summary.plan for s in sets) and sets[0].tokens_seen == self.seen:
                return sets
            assert time.monotonic() < deadline, f"plan {self.summary.plan}, reported: {sets[:1]}"
            time.sleep(0.05)


def _dump(folder: Path, sequence: int, rank: int) -> dict[str, object]:
    stem = folder / f"seq{sequence}_rank{rank}"
    deadline = time.monotonic() + 10
    while not (stem.with_suffix(".json").exists() and stem.with_suffix(".kv").exists()):
        assert time.monotonic() < deadline, f"no dump {stem}"
        time.sleep(0.05)
    dump = json.loads(stem.with_suffix(".json").read_text())
    shape = (dump["num_layers"], dump["num_kv_heads"], dump["tokens_seen"], dump["row_bytes"])
    dump["rows"] = np.fromfile(stem.with_suffix(".kv"), dtype=np.uint8).reshape(shape)
    return dump


def _ranges(flat: list[int]) -> set[int]:
    return {p for first, last in zip(flat[::2], flat[1::2], strict=True) for p in range(first, last)}


@pytest.fixture(scope="module", params=["slab", "stream"])
def group(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Ranks that map the slab, and ranks that send their pages in chunks."""
    folder = tmp_path_factory.mktemp("sets")
    dumps = folder / "dumps"
    dumps.mkdir()
    worker = {"dump_dir": dumps, "device_memory_bytes": 1 << 29, "disable_slab": request.param == "stream"}
    with cluster(folder, SIZE, cache={"sequence_lease_ms": LEASE_MS}, worker=worker) as started:
        yield started


@pytest.fixture(scope="module", params=["layer even", "kv_head even", "kv_head adaptive"])
def run(group: Cluster, long_prompt: list[int], request: pytest.FixtureRequest) -> Run:
    return Run(group, group.folder / "dumps", long_prompt[:600], *request.param.split())


def test_sinks_heavy_recent_and_demoted_are_disjoint_and_together_all_seen_positions(run: Run) -> None:
    heads = 1 if run.scope == "layer" else 3
    assert len(run.sets) == LAYERS * heads
    assert run.seen >= 600 + NEW_TOKENS - 1
    for one in run.sets:
        parts = [set(one.sinks), set(one.heavy), set(one.recent), _ranges(one.demoted_ranges)]
        assert sum(map(len, parts)) == run.seen, (one.layer, one.kv_head)
        assert set.union(*parts) == set(range(run.seen)), (one.layer, one.kv_head)
        assert not one.dropped_ranges
        assert list(one.sinks) == [0, 1, 2, 3]
        assert max(one.recent) == run.seen - 1
    sizes = {(s.layer, s.kv_head): len(s.sinks) + len(s.heavy) + len(s.recent) for s in run.sets}
    if run.head_budgets == "even":
        assert set(sizes.values()) == {160}
    else:
        assert len(set(sizes.values())) > 1
        for layer in range(LAYERS):
            assert sum(size for (of_layer, _), size in sizes.items() if of_layer == layer) == 3 * 160
    assert run.summary.counts.tokens_resident == 160
    assert run.summary.counts.tokens_dropped == 0


def test_get_sets_equals_the_slot_tables_of_every_rank_at_the_same_plan(run: Run) -> None:
    reported = {
        (s.layer, s.kv_head): dict(zip([*s.sinks, *s.heavy, *s.recent], s.scores, strict=True)) for s in run.sets
    }
    compared = 0
    for dump in run.dumps:
        assert dump["plan"] == run.summary.plan
        assert dump["tokens_seen"] == run.seen
        for one in dump["sets"]:  # type: ignore[attr-defined]
            scores = {p: s * 2.0**-32 for p, s in zip(one["positions"], one["scores"], strict=True) if p >= 0}
            assert scores == pytest.approx(reported[one["layer"], one["kv_head"]], rel=1e-12)
            compared += 1
    assert compared == LAYERS * SIZE  # one set a rank: shared in scope layer, its own head's in kv_head


def test_demoted_keys_and_values_read_back_bit_for_bit(run: Run) -> None:
    _compare_demoted(run, count=100)


def _compare_demoted(run: Run, count: int) -> None:
    random = np.random.default_rng(SEED)
    print("seed", SEED)
    for _ in range(count):
        one = run.sets[random.integers(len(run.sets))]
        position = int(random.choice(sorted(_ranges(one.demoted_ranges))))
        head = one.kv_head if one.kv_head >= 0 else int(random.integers(SIZE))
        request = page_store_pb2.ReadRequest(
            sequence_id=run.sequence, layer=one.layer, kv_head=head, first_position=position, num_positions=1
        )
        rows = b"".join(chunk.rows for chunk in run.group.pages.Read(request, timeout=10))
        assert rows == run.dumps[head]["rows"][one.layer, 0, position].tobytes(), (one.layer, head, position)  # type: ignore[index]


def test_pages_outlive_all_workers_until_the_lease_ends(group: Cluster, long_prompt: list[int]) -> None:
    """Last in this file: it ends the group's workers."""
    run = Run(group, group.folder / "dumps", long_prompt[:600], "layer")
    for worker in group.workers:
        worker.kill()
    _compare_demoted(run, count=20)
    deadline = time.monotonic() + 3 * LEASE_MS / 1000
    while time.monotonic() < deadline:
        try:
            group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=run.sequence))
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND
            return
        time.sleep(0.2)
    pytest.fail("the lease has not ended")
