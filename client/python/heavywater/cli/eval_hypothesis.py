"""heavywater eval hypothesis"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Address, CacheAddress, Json, connected
from heavywater.cli.eval_common import (
    BookText,
    Threads,
    counted,
    local_servers,
    progress_bar,
    text_or_book,
    whole_numbers,
)
from heavywater.cli.highlight import token_texts
from heavywater.eval.hypothesis import CURVE, FIRST, HISTORY, Passage, look_at, mean_figures, runs_of
from heavywater.eval.plots import mass_plot
from heavywater.eval.results_file import ResultsFile
from heavywater.eval.token_class import token_classes
from heavywater.model import Model


def hypothesis(
    text: BookText = None,
    offsets: Annotated[str, typer.Option(help="Where the passages begin, in tokens.")] = "2000,52000",
    prompt: Annotated[int, typer.Option(min=128, help="Tokens of each passage.")] = 1024,
    steps: Annotated[str, typer.Option(help="So many tokens later: a comma-separated list, 1 to 4096 each.")] = (
        "64,256,1024"
    ),
    state: Annotated[Path | None, typer.Option(help="Keep results here, and go on from those that it has.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write mass.png into this folder.")] = None,
    threads: Threads = 0,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """What policies rest on: a few tokens hold most of the attention, and they stay the same."""
    log = Console(stderr=True)
    if address and not cache:
        raise ValueError("what positions received is read from the cache service: give --cache, too")
    later = whole_numbers("--steps", steps)
    if not all(1 <= step <= 4096 for step in later):
        raise ValueError(f"--steps {steps}, want numbers from 1 to 4096")
    content = text_or_book(text)
    settings = {"prompt": prompt, "steps": later, "text": str(text) if text else None}
    results = ResultsFile(state, settings)
    wanted = whole_numbers("--offsets", offsets)
    missing = [offset for offset in wanted if str(offset) not in results]
    if missing:
        with connected(address, cache, local_servers(threads, recall=False), log) as client, progress_bar(log) as bar:
            model = client.get_model()
            ids = model.encode(content)
            task = bar.add_task("prompts", total=len(missing) * runs_of(later))
            for offset in missing:
                passage = _passage(model, ids, offset, prompt, max(later))
                results.add(str(offset), look_at(client, passage, later, lambda: bar.advance(task)))
    figures = mean_figures([results[str(offset)] for offset in wanted])
    if plots is not None:
        words = f"{counted(len(wanted), 'passage')} of {prompt} tokens; mean over KV heads"
        mass_plot(np.array(figures["curve"]), CURVE, plots / "mass.png", words)
    if as_json:
        print(json.dumps({"passages": len(wanted), "prompt": prompt, **figures}))
    else:
        _print(figures)


def _passage(model: Model, ids: list[int], offset: int, prompt: int, more: int) -> Passage:
    end = offset + prompt + more
    if offset < 0 or end > len(ids):
        raise ValueError(f"offset {offset}: the passage ends at token {end}, the text has {len(ids)}")
    tokens = ids[offset:end]
    return Passage(offset, tokens, token_classes(token_texts(model, tokens[:prompt])), prompt)


def _print(figures: dict[str, Any]) -> None:
    console = Console()
    mass = Table("heaviest", "of the attention", f"without the first {FIRST}", title="Mass", box=box.SIMPLE_HEAD)
    for share, value in figures["mass"].items():
        mass.add_row(f"{float(share):.0%} of tokens", f"{value:.1%}", f"{figures['mass_without_first'][share]:.1%}")
    console.print(mass)
    console.print(f"the first {FIRST} tokens hold {figures['mass_of_first']:.1%}", highlight=False)
    later = Table(
        "tokens later",
        "still heavy, all queries",
        "still heavy, last 32",
        f"pivotal that were in the last {HISTORY}",
        "at random",
        title="Persistence",
        box=box.SIMPLE_HEAD,
    )
    for step, values in figures["later"].items():
        later.add_row(
            step,
            f"{values['overlap_all_queries']:.1%}",
            f"{values['overlap_last_queries']:.1%}",
            f"{values['persistence']:.1%}",
            f"{values['persistence_at_random']:.1%}",
        )
    console.print(later)
    classes = Table("class", "of the text", "of heavy tokens", "of the attention", title="Who", box=box.SIMPLE_HEAD)
    for name, values in figures["classes"].items():
        classes.add_row(name, f"{values['of_text']:.1%}", f"{values['of_heavy']:.1%}", f"{values['of_mass']:.1%}")
    console.print(classes)
