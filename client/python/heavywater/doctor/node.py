"""This node: its shared memory, its interfaces."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from heavywater.doctor.finding import Finding, Verdict, gibibytes

NODE = "this node"
SHARED_MEMORY = Path("/dev/shm")
INTERFACES = Path("/sys/class/net")
_SLAB_PREFIX = "heavywater-slab-"


def find_shared_memory(config: dict[str, str], folder: Path = SHARED_MEMORY) -> Finding:
    """Whether a cache service with this configuration fits here, and whether its slab is here already."""

    def finding(verdict: Verdict, text: str) -> Finding:
        return Finding(NODE, "shared memory", verdict, text)

    if config.get("disable_slab") == "true":
        return finding(Verdict.WARNING, "the cache service has no slab (disable_slab): ranks stream their pages")
    want = int(config.get("host_bytes", "0"))
    prefix = config.get("slab_name") or _SLAB_PREFIX
    slabs = sorted(path for path in folder.glob(f"{prefix}*") if path.stat().st_size >= want)
    if slabs:
        text = f"{slabs[0]} has {gibibytes(slabs[0].stat().st_size)}: ranks here can map it"
        if os.access(slabs[0], os.R_OK | os.W_OK):
            return finding(Verdict.OK, text)
        return finding(Verdict.FAILED, f"{slabs[0]} belongs to another user: ranks have to run as the same")
    space = os.statvfs(folder)
    total = space.f_frsize * space.f_blocks
    if total < want:
        return finding(
            Verdict.WARNING,
            f"{folder} has {gibibytes(total)}, the cache service's host_bytes is {gibibytes(want)}: it cannot run "
            "here, and ranks here stream their pages",
        )
    return finding(Verdict.WARNING, f"no slab of the cache service in {folder}: ranks here stream their pages")


def find_interfaces(folder: Path = INTERFACES) -> Finding:
    """The interfaces on which ranks of other nodes can be reached."""
    up = []
    for path in sorted(folder.iterdir()):
        state = (path / "operstate").read_text().strip()
        if path.name != "lo" and state in ("up", "unknown"):
            up.append(f"{path.name} (mtu {(path / 'mtu').read_text().strip()})")
    if up:
        return Finding(NODE, "interfaces", Verdict.OK, ", ".join(up))
    return Finding(NODE, "interfaces", Verdict.WARNING, "only the loopback is up: ranks of other nodes cannot connect")


def find_name(address: str) -> Finding:
    """Whether the host of host:port resolves here, and whether to this node alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return Finding(address, "name", Verdict.FAILED, f"{host} does not resolve here: {error}")
    if all(one.startswith("127.") or one == "::1" for one in found):
        return Finding(address, "name", Verdict.OK, f"{', '.join(sorted(found))}: for processes of this node alone")
    return Finding(address, "name", Verdict.OK, ", ".join(sorted(found)))
