"""heavywater plan-memory"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Json
from heavywater.cli.policy import (
    Budget,
    DeviceRatio,
    Recall,
    RecallTokens,
    Scope,
    policy_options,
)
from heavywater.memory_plan import (
    model_of_config,
    parse_bytes,
    parse_tokens,
    plan_memory,
)

Row = dict[str, Any]

_TABLE_WIDTH = 120


def plan_memory_command(
    model: Annotated[
        str,
        typer.Option(help="llama-3-8b or llama-3-70b: shapes only, no weights are read."),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(exists=True, help="Instead: a Transformers folder or its config.json."),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Instead: a GGUF file."),
    ] = None,
    tp: Annotated[str, typer.Option(help="GPUs of a group (tensor parallel), comma-separated.")] = "1",
    context: Annotated[
        str,
        typer.Option(help="Tokens of a sequence, prompt and new ones, comma-separated: 32k, 1m."),
    ] = "32k",
    new_tokens: Annotated[int, typer.Option(min=0, help="Of these, after the prompt.")] = 1024,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences at the same time.")] = 1,
    policy: Annotated[
        str,
        typer.Option(help="A list of full, streaming, h2o, snapkv, snapkv_h2o, scissorhands, pyramidkv, recall."),
    ] = "full,snapkv_h2o,recall",
    scope: Scope = "layer",
    budget: Budget = 0.2,
    recall: Recall = None,
    recall_tokens: RecallTokens = "",
    device_ratio: DeviceRatio = 0.0,
    kv_dtype: Annotated[str, typer.Option(help="Of keys and values: bf16, fp16 or fp32.")] = "bf16",
    page_tokens: Annotated[int, typer.Option(min=1, help="Positions of a page.")] = 256,
    prompt_chunk_tokens: Annotated[int, typer.Option(min=1, help="Rows of the workspace.")] = 512,
    device_memory: Annotated[
        str,
        typer.Option(help="Of one GPU, as 80GiB or 141GB: what fits, and the longest context that does."),
    ] = "",
    bandwidth_gb_s: Annotated[
        float,
        typer.Option(min=0, help="Of the GPU's memory, 10^9 bytes a second: the time of a step."),
    ] = 0,
    host_bandwidth_gb_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Of the bus to host memory, likewise: recall reads its picks over it.",
        ),
    ] = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a deployment needs: memory on each GPU and in the host tier, and a decode step's time.

    The worker's own arithmetic, for the rank that holds most. Weights in bf16.
    """
    request: dict[str, object] = {
        "model": _model(model, config, gguf),
        "world_sizes": [_whole("--tp", part) for part in tp.split(",")],
        "contexts": [parse_tokens(part) for part in context.split(",")],
        "policies": [
            _policy(name.strip(), scope, budget, recall, recall_tokens, device_ratio) for name in policy.split(",")
        ],
        "new_tokens": new_tokens,
        "num_sequences": sequences,
        "kv_dtype": kv_dtype,
        "page_tokens": page_tokens,
        "max_step_tokens": prompt_chunk_tokens,
        "bandwidth_gb_s": bandwidth_gb_s,
        "host_bandwidth_gb_s": host_bandwidth_gb_s,
    }
    if device_memory:
        request["device_bytes"] = parse_bytes(device_memory)
    answer = plan_memory(request)
    if as_json:
        print(json.dumps(answer))
    elif markdown:
        print(_markdown(answer["rows"]))
    else:
        _print_table(answer)


def _model(preset: str, config: Path | None, gguf: Path | None) -> object:
    given = [source for source in (preset, config, gguf) if source]
    if len(given) != 1:
        raise ValueError(f"want one of --model, --config and --gguf, got {len(given)}")
    if config is not None:
        return model_of_config(config)
    return {"gguf": str(gguf)} if gguf is not None else preset


def _whole(option: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{option} {text!r}, want whole numbers")
    return int(text)


def _policy(
    name: str,
    scope: str,
    budget: float,
    recall: bool | None,
    recall_tokens: str,
    device_ratio: float,
) -> dict[str, object]:
    # What a request to a worker would carry, and nothing demoted is there to recall with "full".
    options = policy_options(
        name,
        scope,
        budget,
        None if name == "full" else recall,
        "" if name == "full" else recall_tokens,
        0.0 if name in ("full", "snapkv") else device_ratio,
    )
    return {field.name: value for field, value in options.ListFields()}


def _tokens(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f}"


# Heading, value. Bytes in GiB.
def _cells(row: Row) -> dict[str, str]:
    cells = {
        "GPUs": str(row["world_size"]),
        "context": _tokens(row["context_tokens"]),
        "policy": row["policy"],
        "weights": _gib(row["weight_bytes"]),
        "KV": _gib(row["kv_bytes"]),
        "of full": f"{row['kv_ratio']:.0%}",
        "work": _gib(row["runner_bytes"] + row["workspace_bytes"] + row["step_bytes"]),
        "prompt": _gib(row["prompt_bytes"] + row["prompt_hidden_bytes"]),
        "total": _gib(row["total_bytes"]),
        "host": _gib(row["host_bytes"]),
        "step reads": _gib(row["step_read"]["device_bytes"]),
    }
    if row["step_ms"] is not None:
        cells["ms"] = f"{row['step_ms']:.1f}"
    if row["fits"] is not None:
        cells["fits"] = "yes" if row["fits"] else "no"
        cells["longest"] = _about_tokens(row["longest_context"])
    return cells


def _about_tokens(count: int) -> str:
    return f"{count // 1024}k" if count >= 10 * 1024 else str(count)


def _markdown(rows: list[Row]) -> str:
    table = [_cells(row) for row in rows]
    lines = [
        list(table[0]),
        ["---" if name == "policy" else "--:" for name in table[0]],
    ]
    lines += [list(cells.values()) for cells in table]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _print_table(answer: dict[str, Any]) -> None:
    rows: list[Row] = answer["rows"]
    first = rows[0]
    shape = answer["model"]
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{shape['name'] or 'model'}: GiB on each GPU, {first['num_sequences']} sequence(s), "
        f"KV in {first['kv_dtype']}, {first['new_tokens']} tokens after the prompt",
    )
    for name in _cells(first):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row).values(), end_section=row["policy"] == rows[-1]["policy"])
    # A narrow terminal wraps the lines, which is better than figures cut off.
    console = Console(width=max(Console().width, _TABLE_WIDTH))
    console.print(table)
    console.print(
        "total: while one sequence is in its prompt. host: each rank's part of the host tier. device_memory_bytes of a "
        "worker: total without weights, activations and hidden states (--json has each part). Not counted: memory of "
        "CUDA and its libraries; collectives and launches in a step.",
        style="dim",
    )
