"""heavywater inspect"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heavywater.cli.connection import Json
from heavywater.cli.highlight import highlighted, marks_for, stretch, token_texts
from heavywater.cli.policy import MAX_SEED, policy_name
from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.inspection import Inspection, inspect_sets
from heavywater.sets import SequenceSet
from heavywater.v1 import sequence_pb2

STYLES = {
    "sinks": "black on cyan",
    "recent": "black on green",
    "heavy": "black on yellow",
    "demoted": "dim",
    "dropped": "dim strike",
}
_PARTLY_HEAVY = "yellow"  # in some sets, not in most
_MARKS = {STYLES["sinks"]: ("{", "}"), STYLES["recent"]: ("<", ">"), STYLES["heavy"]: ("[", "]")}
_SOME = 0.1  # of the sets: nearly everything is heavy in one of them
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_CELLS = 100


def inspect(
    sequence_id: Annotated[
        int, typer.Argument(metavar="SEQ", min=0, max=MAX_SEED, help="The sequence's id, as generate prints it.")
    ],
    cache: Annotated[
        str, typer.Option("--cache", envvar="HEAVYWATER_CACHE", help="host:port of the cache service")
    ] = "127.0.0.1:7700",
    address: Annotated[
        str,
        typer.Option(envvar="HEAVYWATER_ADDRESS", help="host:port of a worker, for its tokenizer"),
    ] = "",
    layer: Annotated[int, typer.Option(help="One layer only [all, averaged].")] = -1,
    top: Annotated[int, typer.Option(min=0, help="Heaviest tokens to list.")] = 15,
    as_json: Json = False,
) -> None:
    """Show which tokens of a sequence are heavy, recent, sinks or demoted, in its text."""
    with Client(worker=address or None, cache=cache) as client:
        sequence = client.get(sequence_id)
        sets = client.get_sets(sequence_id, [layer] if layer >= 0 else [])
        pieces = _pieces(client if address else None, sequence)
    inspection = inspect_sets(sets)
    if as_json:
        print(json.dumps(_as_json(sequence, sets, inspection, pieces, top)))
        return
    console = Console()
    console.print(_heading(sequence, inspection, layer), highlight=False)
    marks = marks_for(console, _MARKS)
    if pieces:
        console.print(_highlighted(inspection, pieces, marks))
    else:
        console.print("(give --address for the text: the tokenizer is the worker's)", style="dim")
    console.print(_legend(inspection, marks))
    console.print(_overview(inspection, min(console.width, _MOST_CELLS)))
    console.print(heaviest_table(inspection, lambda position: _piece(pieces, position), top))


def _pieces(client: Client | None, sequence: sequence_pb2.Sequence) -> list[str]:
    """The text of each token; empty when no worker can say."""
    if client is None or not sequence.tokens:
        return []
    try:
        model = client.get_model()
    except HeavywaterError:
        return []
    return token_texts(model, sequence.tokens)


def _piece(pieces: Sequence[str], position: int) -> str:
    return pieces[position] if position < len(pieces) else "?"


def _heading(sequence: sequence_pb2.Sequence, inspection: Inspection, layer: int) -> str:
    where = f"layer {layer}" if layer >= 0 else f"averaged over {inspection.num_sets} sets"
    return (
        f"sequence {sequence.sequence_id}: {policy_name(sequence.budget)} in scope {sequence.budget.scope}, "
        f"{inspection.tokens_seen} tokens seen, plan {inspection.plan}, {where}"
    )


def _style(inspection: Inspection, position: int) -> str:
    kind = inspection.kind_of(position)
    if kind in ("demoted", "dropped") and inspection.shares["heavy"][position] >= _SOME:
        return _PARTLY_HEAVY
    return STYLES[kind]


def _highlighted(inspection: Inspection, pieces: list[str], marks: Mapping[str, tuple[str, str]] | None) -> Text:
    return highlighted(pieces[: inspection.tokens_seen], lambda position: _style(inspection, position), marks)


def _legend(inspection: Inspection, marks: Mapping[str, tuple[str, str]] | None) -> Text:
    legend = Text("\nin most sets: ")
    for kind, count in inspection.counts().items():
        legend.append(stretch(f" {kind} {count:.0f} ", STYLES[kind], marks))
        legend.append(" ")
    legend.append("\n")
    if not marks:
        legend.append("heavy in some", style=_PARTLY_HEAVY)
        legend.append(f" ({_SOME:.0%} or more); ", style="dim")
    legend.append("counts: mean positions in a set", style="dim")
    return legend


def _overview(inspection: Inspection, width: int) -> Text:
    """The whole text in a line: how much of each stretch is on the device."""
    kept = sum(inspection.shares[kind] for kind in ("sinks", "heavy", "recent"))
    cells = np.array_split(np.asarray(kept), min(width, inspection.tokens_seen))
    bars = "".join(_LEVELS[round(float(cell.mean()) * (len(_LEVELS) - 1))] for cell in cells)
    text = Text.assemble("\non the device, from the first token to the last:\n", (bars, "green on grey11"))
    text.no_wrap = True
    return text


def heaviest_table(inspection: Inspection, piece_of: Callable[[int], str], top: int) -> Table:
    """The `top` heaviest tokens; `piece_of` gives the text of a position."""
    table = Table(title="heaviest tokens", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("position", justify="right")
    table.add_column("token")
    table.add_column("heavy in", justify="right")
    table.add_column("mean score", justify="right")
    for position in inspection.heaviest(top):
        table.add_row(
            str(position),
            Text(repr(piece_of(position))),
            f"{inspection.shares['heavy'][position]:.0%} of sets",
            f"{inspection.scores[position]:.2f}",
        )
    return table


def _as_json(
    sequence: sequence_pb2.Sequence,
    sets: Sequence[SequenceSet],
    inspection: Inspection,
    pieces: list[str],
    top: int,
) -> dict[str, object]:
    return {
        "sequence_id": sequence.sequence_id,
        "policy": sequence.budget.policy,
        "scope": sequence.budget.scope,
        "tokens_seen": inspection.tokens_seen,
        "plan": inspection.plan,
        "counts": inspection.counts(),
        "heaviest": [
            {
                "position": position,
                "token": pieces[position] if position < len(pieces) else None,
                "heavy_share": float(inspection.shares["heavy"][position]),
                "score": float(inspection.scores[position]),
            }
            for position in inspection.heaviest(top)
        ],
        "sets": [
            {
                "layer": one.layer,
                "kv_head": one.kv_head,
                "sinks": one.sinks.tolist(),
                "heavy": one.heavy.tolist(),
                "recent": one.recent.tolist(),
                "demoted": len(one.demoted),
                "dropped": len(one.dropped),
            }
            for one in sets
        ],
    }
