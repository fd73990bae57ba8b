"""What the cache did for an answer: the `heavywater` object beside it."""

from __future__ import annotations

from heavywater.aio import Generation
from heavywater.generation import Token, mean_reads
from heavywater.v1 import generation_pb2


def figures_of(generation: Generation, last: Token | None, seed: int) -> dict[str, object]:
    """Of an answer that has finished. One that a stop string ended has no summary: the last token's figures."""
    figures: dict[str, object] = {"sequence_id": generation.sequence_id, "seed": seed}
    if last is not None:
        figures |= {
            "tokens_seen": last.counts.tokens_seen,
            "resident_tokens": last.counts.tokens_resident,
            "demoted_tokens": last.counts.tokens_demoted,
            "device_bytes": last.device_bytes,
            "host_bytes": last.host_bytes,
        }
    if generation.finished:
        figures |= _of_summary(generation.summary)
    return figures


def _of_summary(summary: generation_pb2.GenerateSummary) -> dict[str, object]:
    figures: dict[str, object] = {
        "policy": summary.budget.policy,
        "scope": summary.budget.scope,
        "budget_tokens": summary.budget.budget_tokens,
        "device_bytes_peak": summary.device_bytes_peak,
        "full_cache_bytes": summary.full_cache_bytes,
        "prompt_seconds": summary.prompt_seconds,
        "decode_seconds": summary.decode_seconds,
    }
    if summary.HasField("recall"):
        figures["recall"] = {
            "reads_mean": mean_reads(summary.recall),
            "reads_max": summary.recall.reads_max,
            "promoted": summary.recall.promoted,
            "mass_missing": summary.recall.mass_missing,
        }
    return figures
