"""heavywater admin"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
import yaml
from google.protobuf.json_format import MessageToDict

from heavywater.cli.connection import Json
from heavywater.cli.help import Command
from heavywater.client import Client
from heavywater.v1 import admin_pb2

admin_app = typer.Typer(no_args_is_help=True, help="What operators do at the cache service.")

_Cache = Annotated[str, typer.Option("--cache", envvar="HEAVYWATER_CACHE", help="host:port of the cache service")]
_Sequence = Annotated[int, typer.Argument(metavar="SEQ", help="The sequence's id.")]
_Owner = Annotated[str, typer.Option(help="Whose pin it is.")]
_DEFAULT_CACHE = "127.0.0.1:7700"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_of(text: str) -> int:
    """Bytes of "1073741824", "1GiB" or "1G"."""
    number = text.lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    digits = number.removesuffix(unit)
    if not digits.isdigit():
        raise ValueError(f'"{text}" is no size, want a number with K, M, G or T: 512M')
    return int(digits) * _UNITS[unit]


def _show(message: Any, as_json: bool, text: Callable[[], str]) -> None:
    """The message, or what a person wants to know of it."""
    if as_json:
        print(json.dumps(_as_dict(message)))
    else:
        print(text())


def _as_dict(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _quota_line(tenant: admin_pb2.TenantStats) -> str:
    def part(used: int, limit: int) -> str:
        return f"{used:,} of {limit:,}" if limit else f"{used:,}"

    used, quota = tenant.used, tenant.quota
    return (
        f"tenant {json.dumps(tenant.tenant)}: host {part(used.host_bytes, quota.host_bytes)} bytes, "
        f"below {part(used.lower_bytes, quota.lower_bytes)} bytes, "
        f"sequences {part(used.sequences, quota.sequences)}{'' if tenant.own_quota else ' (default quota)'}"
    )


def _drain_line(state: admin_pb2.DrainState) -> str:
    return f"draining: {state.running_sequences} sequences run, {state.suspended_by_drain} were suspended for it"


def _stats_text(stats: admin_pb2.StatsResponse) -> str:
    lines = [
        f"{tier.tier}: {tier.used_bytes:,} of {tier.total_bytes:,} bytes, {tier.pages:,} pages" for tier in stats.tiers
    ]
    lines.append(f"sequences {stats.sequences}, groups {stats.groups}, ranks {stats.ranks}, values {stats.blobs}")
    lines.append(
        f"pins {stats.pins} of {stats.pinned_sequences} sequences, {stats.pinned_bytes:,} bytes of host memory"
    )
    lines += [_quota_line(tenant) for tenant in stats.tenants]
    if stats.tenants_left_out:
        lines.append(f"and {stats.tenants_left_out} tenants more")
    if stats.HasField("drain"):
        lines.append(_drain_line(stats.drain))
    return "\n".join(lines)


@admin_app.command(cls=Command)
def stats(cache: _Cache = _DEFAULT_CACHE, as_json: Json = False) -> None:
    """Show tiers, tenants, pins."""
    with Client(cache=cache) as client:
        response = client.stats()
    _show(response, as_json, lambda: _stats_text(response))


@admin_app.command(cls=Command)
def quota(
    tenant: Annotated[str, typer.Argument(help="Its name; an empty one is what comes without.")],
    host: Annotated[str, typer.Option(help="Bytes of host memory (512M, 4G); 0: no limit [as it is].")] = "",
    lower: Annotated[str, typer.Option(help="Bytes in the tiers below, likewise.")] = "",
    sequences: Annotated[int | None, typer.Option(min=0, help="Sequences; 0: no limit [as it is].")] = None,
    default: Annotated[bool, typer.Option("--default", help="The configuration's quota again.")] = False,
    cache: _Cache = _DEFAULT_CACHE,
    as_json: Json = False,
) -> None:
    """Show how much a tenant may hold, or set it: limits that are not named stay."""
    asked = bool(host or lower or sequences is not None)
    if default and asked:
        raise ValueError("--default with limits, want one of the two")
    with Client(cache=cache) as client:
        if default:
            response = client.set_quota(tenant, use_default=True)
        else:
            response = _tenant(client, tenant)
            limits = response.quota
            if asked:
                response = client.set_quota(
                    tenant,
                    host_bytes=size_of(host) if host else limits.host_bytes,
                    lower_bytes=size_of(lower) if lower else limits.lower_bytes,
                    sequences=limits.sequences if sequences is None else sequences,
                )
    _show(response, as_json, lambda: _quota_line(response))


def _tenant(client: Client, name: str) -> admin_pb2.TenantStats:
    """What it holds, and its limits: the default ones of a tenant that holds nothing."""
    stats = client.stats()
    for tenant in stats.tenants:
        if tenant.tenant == name:
            return tenant
    if stats.tenants_left_out:
        raise ValueError(f'tenant "{name}" is not among the {len(stats.tenants)} that the cache service lists')
    config = yaml.safe_load(client.get_config())
    limits = admin_pb2.TenantQuota(
        host_bytes=config.get("tenant_host_bytes", 0),
        lower_bytes=config.get("tenant_lower_bytes", 0),
        sequences=config.get("tenant_sequences", 0),
    )
    return admin_pb2.TenantStats(tenant=name, quota=limits)


@admin_app.command("config", cls=Command)
def show_config(cache: _Cache = _DEFAULT_CACHE) -> None:
    """Print the configuration in effect, as YAML."""
    with Client(cache=cache) as client:
        print(client.get_config(), end="")


@admin_app.command(cls=Command)
def pin(
    sequence_id: _Sequence,
    ttl: Annotated[float, typer.Option("--ttl", min=0.001, help="Seconds.")],
    owner: _Owner = "operator",
    cache: _Cache = _DEFAULT_CACHE,
    as_json: Json = False,
) -> None:
    """Keep a sequence and its pages where they are."""
    with Client(cache=cache) as client:
        response = client.pin(sequence_id, owner, ttl)
    _show(response, as_json, lambda: f"sequence {sequence_id} has {response.pins} pins, for {ttl:g} s this one")


@admin_app.command(cls=Command)
def unpin(
    sequence_id: _Sequence, owner: _Owner = "operator", cache: _Cache = _DEFAULT_CACHE, as_json: Json = False
) -> None:
    """End a pin."""
    with Client(cache=cache) as client:
        response = client.unpin(sequence_id, owner)
    _show(response, as_json, lambda: f"sequence {sequence_id} has {response.pins} pins")


@admin_app.command(cls=Command)
def drain(
    deadline: Annotated[float, typer.Option(min=0, help="Seconds to wait; 0: a minute.")] = 0.0,
    suspend: Annotated[bool, typer.Option("--suspend", help="Suspend what runs.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take new work again.")] = False,
    cache: _Cache = _DEFAULT_CACHE,
    as_json: Json = False,
) -> None:
    """Take no new sequences, and wait until none runs. Exit status 3: some still do."""
    if undo and (suspend or deadline):
        raise ValueError("--undo with --suspend or --deadline, want --undo alone")
    if not math.isfinite(deadline):
        raise ValueError(f"--deadline is {deadline}, want seconds")
    with Client(cache=cache) as client:
        if undo:
            client.undo_drain()
            print("{}" if as_json else "takes new work again")
            return
        state = client.drain(deadline, suspend=suspend)
    _show(state, as_json, lambda: _drain_line(state))
    if state.running_sequences > 0:
        raise typer.Exit(3)


@admin_app.command(cls=Command)
def flush(
    sequence_id: Annotated[int, typer.Argument(metavar="[SEQ]", help="0: all.")] = 0,
    cache: _Cache = _DEFAULT_CACHE,
    as_json: Json = False,
) -> None:
    """Send pages of finished and suspended sequences to the tiers below."""
    with Client(cache=cache) as client:
        response = client.flush(sequence_id)
    _show(
        response,
        as_json,
        lambda: f"{response.moved_bytes:,} bytes went down, host memory holds {response.host_used_bytes:,}",
    )


@admin_app.command(cls=Command)
def snapshot(cache: _Cache = _DEFAULT_CACHE, as_json: Json = False) -> None:
    """Write the service's state to its medium now."""
    with Client(cache=cache) as client:
        response = client.snapshot()
    _show(response, as_json, lambda: f"{response.sequences} sequences in {response.bytes:,} bytes are on the medium")


@admin_app.command(cls=Command)
def watch(
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between figures.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Messages, then end; 0: until Ctrl-C.")] = 0,
    cache: _Cache = _DEFAULT_CACHE,
    as_json: Json = False,
) -> None:
    """Print figures and events as they come; with --json one object a line."""
    with Client(cache=cache) as client:
        messages = client.watch(interval)
        for number, message in enumerate(messages, start=1):
            _show(message, as_json, lambda message=message: _watch_text(message))  # type: ignore[misc]
            if number == count:
                messages.close()  # type: ignore[attr-defined]
                return


def _watch_text(message: admin_pb2.WatchResponse) -> str:
    lines = [f"{_clock(event.unix_ms)}  {event.kind}  {event.text}" for event in message.events]
    host = message.stats.tiers[0] if message.stats.tiers else admin_pb2.TierStats()
    lines.append(
        f"{_clock(round(1000 * time.time()))}  host {host.used_bytes:,} of {host.total_bytes:,} bytes, "
        f"{message.stats.sequences} sequences, {message.stats.pins} pins"
    )
    return "\n".join(lines)


def _clock(unix_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_ms / 1000))
