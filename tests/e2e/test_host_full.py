"""A host tier that is too small: what finds no page is a clean miss, all else is kept."""

from __future__ import annotations

import json
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from cluster import Cluster, cluster, summary
from heavywater.v1 import page_store_pb2, sequence_pb2

LAYERS = 30
HEADS = 3
PAGE_TOKENS = 32
# A page of 32 positions takes 8 KiB, of all layers and heads 90 times that.
PAGE_ROW = LAYERS * HEADS * 8192
SMALL = {"heavy_tokens": 24, "recent_tokens": 8, "sink_tokens": 4}
PROMPT = 100
NEW_TOKENS = 150


def _ranges(flat: list[int]) -> set[int]:
    return {p for first, last in zip(flat[::2], flat[1::2], strict=True) for p in range(first, last)}


def _settled_sets(group: Cluster, sequence: int, plan: int) -> list[sequence_pb2.SequenceSet]:
    deadline = time.monotonic() + 10
    while True:
        sets = list(group.sequences.GetSets(sequence_pb2.GetSetsRequest(sequence_id=sequence), timeout=10))
        if sets and all(s.plan == plan for s in sets):
            return sets
        assert time.monotonic() < deadline, f"plan {plan} is not committed: {sets[:1]}"
        time.sleep(0.05)


def _read(group: Cluster, sequence: int, layer: int, head: int, position: int) -> bytes:
    request = page_store_pb2.ReadRequest(
        sequence_id=sequence, layer=layer, kv_head=head, first_position=position, num_positions=1
    )
    return b"".join(chunk.rows for chunk in group.pages.Read(request, timeout=10))


def _rows(dumps: Path, sequence: int, rank: int) -> np.ndarray:
    stem = dumps / f"seq{sequence}_rank{rank}"
    deadline = time.monotonic() + 10
    while not (stem.with_suffix(".json").exists() and stem.with_suffix(".kv").exists()):
        assert time.monotonic() < deadline, f"no dump {stem}"
        time.sleep(0.05)
    dump = json.loads(stem.with_suffix(".json").read_text())
    shape = (dump["num_layers"], dump["num_kv_heads"], dump["tokens_seen"], dump["row_bytes"])
    return np.fromfile(stem.with_suffix(".kv"), dtype=np.uint8).reshape(shape)


@pytest.mark.parametrize("transport", ["slab", "stream"])
def test_dropped_positions_are_misses_and_demoted_ones_read_back(
    folder: Path, long_prompt: list[int], transport: str
) -> None:
    """Three ranks; the prompt's four pages fit, then one more, then none."""
    dumps = folder / "dumps"
    dumps.mkdir()
    worker = {
        "on_host_full": "drop",
        "page_tokens": PAGE_TOKENS,
        "reserve_ahead_tokens": PAGE_TOKENS,
        "dump_dir": dumps,
        "disable_slab": transport == "stream",
    }
    with cluster(folder, HEADS, cache={"host_bytes": 5 * PAGE_ROW + 65536}, worker=worker) as group:
        messages = group.generate(tokens=long_prompt[:PROMPT], max_new_tokens=NEW_TOKENS, ignore_eos=True, policy=SMALL)
        sequence = messages[0].sequence_id
        counts = summary(messages).counts
        seen = PROMPT + NEW_TOKENS - 1
        sets = _settled_sets(group, sequence, summary(messages).plan)
        rows = [_rows(dumps, sequence, rank) for rank in range(HEADS)]
        for one in sets:
            demoted, dropped = _ranges(one.demoted_ranges), _ranges(one.dropped_ranges)
            parts = [set(one.sinks), set(one.heavy), set(one.recent), demoted, dropped]
            assert sum(len(part) for part in parts) == seen
            assert set().union(*parts) == set(range(seen))
            assert dropped
            assert min(dropped) >= 4 * PAGE_TOKENS  # which rank gets the last pages is a race
            for head in range(HEADS):
                for position in sorted(demoted)[:: 1 + len(demoted) // 6]:
                    row = _read(group, sequence, one.layer, head, position)
                    assert row == rows[head][one.layer, 0, position].tobytes(), (one.layer, head, position)
                with pytest.raises(grpc.RpcError) as miss:
                    _read(group, sequence, one.layer, head, max(dropped))
                assert miss.value.code() == grpc.StatusCode.NOT_FOUND, miss.value.details()
        assert counts.tokens_dropped > 0
        assert counts.tokens_resident + counts.tokens_demoted + counts.tokens_dropped == pytest.approx(seen)
