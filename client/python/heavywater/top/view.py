"""The figures as a person looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from heavywater.cli.policy import policy_name
from heavywater.top.rates import RankRates, Rates
from heavywater.top.report import failures_of
from heavywater.top.sample import RankSample, Sample
from heavywater.v1 import admin_pb2, sequence_pb2

_SPARKS = "▁▂▃▄▅▆▇█"
_BAR, _SHORT_BAR = 16, 7
_NARROW_POLICY = 19
_NARROW = 100  # columns of a screen that has less room for bars and names
_GAP, _FRAME = 2, 4  # between columns, and around a table
_HISTORY = 32
_NO_RANKS = "ranks: not seen without --metrics HOST:PORT,... (heavywater serve prints them)"
_NO_SEQUENCES = "none now; heavywater generate and heavywater chat make some"
RESIDENT, DEMOTED, DROPPED, REST = "green", "blue", "red", "bright_black"
_MISSING = 0.05  # of attention: more may change an answer
_HIGH, _MIDDLE = 0.9, 0.75  # of a bar that fills: red, yellow


class View:
    """Draws samples; remembers the throughput of the last ones."""

    def __init__(self) -> None:
        self._history: list[float] = []

    def note(self, rates: Rates) -> None:
        """To be called once a sample."""
        self._history = [*self._history, rates.total_tokens_per_s][-_HISTORY:]

    def draw(self, sample: Sample, rates: Rates, height: int, width: int, problem: str = "") -> RenderableType:
        """At most `height` lines: what does not fit of the sequences is counted. A narrow screen has fewer columns."""
        heading = self._heading(sample, rates, width, problem)
        tiers = _panel(_tiers(sample.stats.tiers, width), "tiers")
        above: list[RenderableType] = [heading, tiers]
        lines = heading.plain.count("\n") + 1 + len(sample.stats.tiers) + 3
        if sample.ranks:
            above.append(_panel(_ranks(sample, rates, width), "ranks"))
            lines += len(sample.ranks) + 3
        else:
            above.append(Text(_NO_RANKS, style=REST, no_wrap=True, overflow="ellipsis"))
            lines += 1
        room = max(1, height - lines - 4)
        shown = sample.sequences[:room]
        hidden = sample.stats.sequences - len(shown)
        title = f"sequences ({hidden} more)" if hidden > 0 else "sequences"
        if not shown:
            return Group(*above, _panel(Text(_NO_SEQUENCES, style=REST), title))
        return Group(*above, _panel(_sequences(shown, rates, width), title))

    def _heading(self, sample: Sample, rates: Rates, width: int, problem: str) -> Text:
        """Lines that fit, as far as they have no problem to tell."""
        stats = sample.stats
        running = sum(not one.finished for one in sample.sequences)
        line = Text.assemble(
            ("heavywater ", "bold"),
            (f"{stats.version}  up {_duration(stats.uptime_ms / 1000)}  ", REST),
            f"{_counted(stats.groups, 'group')}, {_counted(stats.ranks, 'rank')}, ",
            f"{_counted(stats.sequences, 'sequence')} ",
            (f"({running} running)", "bold" if running else REST),
        )
        if sample.ranks:
            speed = self._speed(rates)
            line.append("   " if line.cell_len + 3 + speed.cell_len <= width else "\n")
            line.append_text(speed)
            problem = problem or _problem_of(sample.ranks)
        if problem:
            line.append(f"\n{problem}", style="bold red")
        return line

    def _speed(self, rates: Rates) -> Text:
        speed = Text.assemble((f"{rates.total_tokens_per_s:,.1f} tokens/s ", "bold"), (_spark(self._history), "cyan"))
        first = rates.ranks[0]
        if first.step_ms:
            speed.append(f"  step {first.step_ms:.0f} ms", style=REST)
        return speed


def _problem_of(ranks: Sequence[RankSample]) -> str:
    """The first rank that something is wrong with."""
    for rank in ranks:
        if rank.error:
            return f"no metrics from {rank.address}: {rank.error}"
        if not rank.cache_up:
            return f"the rank at {rank.address} cannot reach the cache service"
    return ""


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=title, title_align="left", border_style=REST, box=box.ROUNDED, padding=(0, 1))


@dataclass(frozen=True)
class _Column:
    title: str
    left: bool = False
    style: str = REST  # of the title: that of the numbers below
    extra: int = 0  # where the screen is narrow, the column with the highest goes first; 0: stays


def _table(columns: Sequence[_Column], rows: Sequence[Sequence[RenderableType]], width: int) -> Table:
    """As many columns as fit whole."""
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [
        max([len(column.title), *(cell.cell_len for row in cells if isinstance(cell := row[index], Text))])
        for index, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    while sum(widths[index] + _GAP for index in shown) > width - _FRAME:
        last = max(shown, key=lambda index: columns[index].extra)
        if not columns[last].extra:
            break
        shown.remove(last)
    table = Table(box=None, expand=True, padding=(0, 1), header_style=REST, pad_edge=False)
    for index in shown:
        column = columns[index]
        justify: Literal["left", "right"] = "left" if column.left else "right"
        table.add_column(
            column.title, justify=justify, no_wrap=True, min_width=widths[index], header_style=column.style
        )
    for row in cells:
        table.add_row(*(row[index] for index in shown))
    return table


_TIER_COLUMNS = (
    _Column("", left=True),
    _Column("", left=True),
    _Column("used"),
    _Column("of"),
    _Column("pages", extra=1),
    _Column("hits", extra=4),
    _Column("down", extra=3),
    _Column("up", extra=2),
    _Column("refused"),
    _Column("failed"),
)


def _tiers(tiers: Sequence[admin_pb2.TierStats], width: int) -> Table:
    return _table(_TIER_COLUMNS, [_tier_row(tier) for tier in tiers], width)


def _tier_row(tier: admin_pb2.TierStats) -> list[RenderableType]:
    return [
        Text(tier.tier, style="bold"),
        _fill(tier.used_bytes / tier.total_bytes if tier.total_bytes else 0.0),
        _bytes(tier.used_bytes),
        _bytes(tier.total_bytes),
        _number(tier.pages),
        _number(tier.hits),
        _number(tier.moved_down),
        _number(tier.moved_up),
        _bad(tier.reservations_refused),
        _bad(failures_of(tier)),
    ]


_RANK_COLUMNS = (
    _Column("", left=True),
    _Column("device", left=True),
    _Column("used"),
    _Column("of", extra=4),
    _Column("running"),
    _Column("queued"),
    _Column("resident", style=RESIDENT, extra=2),
    _Column("demoted", style=DEMOTED, extra=1),
    _Column("reads/s"),
    _Column("promoted/s", extra=3),
    _Column("missing"),
)


def _ranks(sample: Sample, rates: Rates, width: int) -> Table:
    rows = [
        [Text(f"rank {number}", style="bold"), *_rank_cells(rank, rate)]
        for number, (rank, rate) in enumerate(zip(sample.ranks, rates.ranks, strict=True))
    ]
    return _table(_RANK_COLUMNS, rows, width)


def _rank_cells(rank: RankSample, rates: RankRates) -> list[RenderableType]:
    if rank.error:
        return [Text("no answer", style="bold red"), *[Text("-", style=REST) for _ in _RANK_COLUMNS[2:]]]
    limit = rank.device_limit_bytes
    return [
        _fill(rank.device_used_bytes / limit if limit else 0.0),
        _bytes(rank.device_used_bytes),
        _bytes(limit) if limit else "-",
        f"{rank.sequences.get('running', 0):.0f}",
        _bad(rank.sequences.get("queued", 0), "yellow"),
        Text(_number(rank.positions.get("resident", 0.0)), style=RESIDENT),
        Text(_number(rank.positions.get("demoted", 0.0)), style=DEMOTED),
        _number(rates.per_s.get("recall_reads", 0.0)),
        _number(rates.per_s.get("promoted", 0.0)),
        Text(f"{rank.mass_missing:.1%}", style="yellow" if rank.mass_missing > _MISSING else ""),
    ]


_SEQUENCE_COLUMNS = (
    _Column("", left=True),
    _Column("id", left=True),
    _Column("policy", left=True),
    _Column("tenant", left=True, extra=5),
    _Column("tokens", left=True, extra=1),
    _Column("seen"),
    _Column("resident", style=RESIDENT),
    _Column("demoted", style=DEMOTED, extra=2),
    _Column("dropped", style=DROPPED, extra=6),
    _Column("tok/s"),
    _Column("host", extra=3),
    _Column("lease", extra=4),
)


def _sequences(sequences: Sequence[sequence_pb2.Sequence], rates: Rates, width: int) -> Table:
    rows = [_sequence_row(one, rates, narrow=width < _NARROW) for one in sequences]
    table = _table(_SEQUENCE_COLUMNS, rows, width)
    for row, one in zip(table.rows, sequences, strict=True):
        row.style = REST if one.finished else ""
    return table


def _sequence_row(one: sequence_pb2.Sequence, rates: Rates, narrow: bool) -> list[RenderableType]:
    counts = one.counts
    per_s = rates.tokens_per_s.get(one.sequence_id, 0.0)
    reading = not one.finished and not counts.tokens_seen
    parts = [(counts.tokens_resident, RESIDENT), (counts.tokens_demoted, DEMOTED), (counts.tokens_dropped, DROPPED)]
    return [
        Text("•") if one.finished else Text("▶", style="bold green"),
        str(one.sequence_id),
        _cut(_policy(one), _NARROW_POLICY if narrow else len(_policy(one))),
        _cut(one.tenant, _BAR),
        Text("reading" if narrow else "reading prompt", style="italic")
        if reading
        else _shares(parts, _SHORT_BAR if narrow else _BAR),
        _number(counts.tokens_seen or one.prompt_tokens),
        Text("-" if reading else _number(counts.tokens_resident), style=RESIDENT),
        Text("-" if reading else _number(counts.tokens_demoted), style=DEMOTED),
        Text(_number(counts.tokens_dropped) if counts.tokens_dropped else "-", style=DROPPED),
        f"{per_s:.1f}" if per_s else "-",
        _bytes(one.host_bytes),
        _duration(one.lease_remaining_ms / 1000),
    ]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _policy(one: sequence_pb2.Sequence) -> str:
    return policy_name(one.budget) + ("" if one.budget.scope == "layer" else " by head")


def _fill(share: float) -> Text:
    """A bar that is better empty than full."""
    style = "red" if share > _HIGH else "yellow" if share > _MIDDLE else "green"
    full = min(_BAR, round(share * _BAR)) if share < 1 / _BAR else min(_BAR, int(share * _BAR + 0.5))
    return Text.assemble(("━" * full, style), ("━" * (_BAR - full), REST), f" {share:4.0%}")


def _shares(parts: Sequence[tuple[float, str]], bar: int) -> Text:
    """A bar cut by what is where; whatever there is has a cell at least."""
    total = sum(count for count, _ in parts)
    text, left = Text(), bar
    for count, style in parts:
        cells = min(left, max(1, round(count / total * bar))) if count > 0 else 0
        text.append("█" * cells, style=style)
        left -= cells
    return text


def _spark(history: Sequence[float]) -> str:
    most = max(history, default=0.0)
    if most <= 0:
        return ""
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(value / most * (len(_SPARKS) - 1) + 0.5))] for value in history)


def _bad(count: float, style: str = "bold red") -> Text:
    """A number that is better 0."""
    return Text(_number(count), style=style if count else REST)


def _number(count: float) -> str:
    if count >= 10_000_000:
        return f"{count / 1e6:.0f}M"
    return f"{count / 1e3:.0f}k" if count >= 100_000 else f"{count:,.0f}"


def _bytes(count: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 360_000 else f"{seconds / 86400:.0f} d"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
