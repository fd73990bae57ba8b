"""How the commands describe themselves."""

from __future__ import annotations

from typing import Any

import click
from typer.core import TyperCommand

# Headings of `heavywater --help`.
ASK, SERVERS, MEASURE = "Ask a model", "Servers", "Measure and plan"

# Short, so that what an option means has the room: the limits of a number follow.
_METAVARS: tuple[tuple[type, str], ...] = (
    (click.types.IntParamType, "N"),
    (click.types.FloatParamType, "X"),
    (click.Path, "PATH"),
)
_HUGE = 2**31 - 1  # what no one reaches need not be told


class _AtLeast(click.IntRange):
    """Also bounded above, where 32 or 64 bits end."""

    def _describe_range(self) -> str:
        return f"x>={self.min}"


class Command(TyperCommand):
    """A command whose help fits 80 columns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            kind = parameter.type
            if type(kind) is click.IntRange and kind.min is not None and kind.max is not None and kind.max >= _HUGE:
                parameter.type = _AtLeast(kind.min, kind.max)
            if isinstance(parameter, click.Option) and parameter.metavar is None:
                parameter.metavar = next((name for kind, name in _METAVARS if isinstance(parameter.type, kind)), None)
