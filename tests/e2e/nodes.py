"""Nodes for end-to-end tests: namespaces joined by a bridge, whose links tests cut.

A node is a network, a host name and a /dev/shm of its own: no loopback and no slab is shared by
accident, as between machines. The bridge lies in a namespace, too, and one link joins it to the
test's own network, so that its clients reach the nodes. All of it vanishes with the processes
within, also when the test is killed: a namespace is held open by one that ends with the test.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from types import TracebackType

import pytest
from cluster import Host

# Set where namespaces must work: a test that needs them then fails instead of being skipped.
REQUIRED = "HEAVYWATER_NAMESPACES"
_numbers = count()
_HOLD = "hostname {name} && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo ready && exec cat"


class NamespaceError(RuntimeError):
    """This machine does not let the test make namespaces, or links between them."""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NamespaceError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Namespace:
    """Holds the namespaces of one machine open until it is closed."""

    def __init__(self, name: str) -> None:
        command = ["unshare", "--net", "--mount", "--uts", "--propagation", "private"]
        try:
            self._holder = subprocess.Popen(
                [*command, "sh", "-c", _HOLD.format(name=name)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise NamespaceError(f"unshare: {error}") from error
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":
            _, said = self._holder.communicate(timeout=10)
            raise NamespaceError(f"no namespaces: {said.strip()}")
        self.pid = self._holder.pid
        # It becomes what it runs: its process id is that of the process within.
        self.prefix = ("nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--")

    def run(self, *command: str) -> str:
        """Within; its output."""
        return _run(*self.prefix, *command)

    def close(self) -> None:
        """Lets go: what it held vanishes once no process is left within."""
        self._holder.communicate(timeout=10)


class Node:
    """A machine: `host` says where a server of the project is to run."""

    def __init__(self, name: str, address: str, bridge: Namespace) -> None:
        self.name = name
        self.namespace = Namespace(name)
        self.host = Host(address, self.namespace.prefix)
        self._bridge = bridge
        self._port = f"to-{name}"
        # The same address has the same hardware address, so that a machine may take another's place.
        hardware = "02:00:00:00:00:{:02x}".format(int(address.rpartition(".")[2]))
        try:
            pair = ("type", "veth", "peer", "name", "eth0", "address", hardware)
            bridge.run("ip", "link", "add", self._port, *pair, "netns", str(self.namespace.pid))
            bridge.run("ip", "link", "set", self._port, "master", "br0", "up")
            self.namespace.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
            self.namespace.run("ip", "link", "set", "eth0", "up")
        except NamespaceError:
            self.namespace.close()
            raise

    def unplug(self) -> None:
        """From now on packets vanish in both directions; nobody is told."""
        self._bridge.run("ip", "link", "set", self._port, "nomaster")

    def plug_in(self) -> None:
        self._bridge.run("ip", "link", "set", self._port, "master", "br0")

    def take_down(self) -> None:
        """The node's own interface: whoever sends from there is told that there is no network."""
        self.namespace.run("ip", "link", "set", "eth0", "down")

    def bring_up(self) -> None:
        self.namespace.run("ip", "link", "set", "eth0", "up")

    def isolate(self, on: bool) -> None:
        """From other nodes that are isolated, too: what they send each other vanishes, the test reaches both."""
        self._bridge.run("bridge", "link", "set", "dev", self._port, "isolated", "on" if on else "off")

    def go_deaf(self) -> None:
        """Nothing reaches the node any more; what it sends arrives. Wants iptables: NamespaceError."""
        self.namespace.run("iptables", "-A", "INPUT", "-i", "eth0", "-j", "DROP")

    def hear_again(self) -> None:
        self.namespace.run("iptables", "-F", "INPUT")

    def shape(self, kbit: int, delay_ms: int) -> str:
        """Makes the link slow in both directions, as far as this kernel can: what it does, in words."""
        delay = ("netem", "delay", f"{delay_ms}ms")
        rate = ("tbf", "rate", f"{kbit}kbit", "burst", "32kb", "latency", "400ms")
        for words, discipline in ((f"{delay_ms} ms each way", delay), (f"{kbit} kbit/s each way", rate)):
            try:
                for side, link in self._ends():
                    side.run("tc", "qdisc", "replace", "dev", link, "root", *discipline)
            except NamespaceError:
                continue
            return words
        return "as it is: this kernel shapes no links"

    def unshape(self) -> None:
        for side, link in self._ends():
            with suppress(NamespaceError):
                side.run("tc", "qdisc", "del", "dev", link, "root")

    def _ends(self) -> tuple[tuple[Namespace, str], ...]:
        return (self._bridge, self._port), (self.namespace, "eth0")

    def close(self) -> None:
        """What it held vanishes once no process is left within."""
        self.namespace.close()


class Network:
    """A bridge with nodes on it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        number = next(_numbers)
        # Of the block for measurements between networks (RFC 2544), which is nobody's.
        high, low = divmod((16 * os.getpid() + number) % 512, 256)
        self._subnet = f"198.{18 + high}.{low}"
        self._uplink = f"hw{os.getpid()}n{number}"
        self._bridge = Namespace("bridge")
        try:
            self._bridge.run("ip", "link", "add", "br0", "type", "bridge")
            self._bridge.run("ip", "link", "set", "br0", "up")
            pair = ("type", "veth", "peer", "name", "up0")
            _run("ip", "link", "add", self._uplink, *pair, "netns", str(self._bridge.pid))
            self._bridge.run("ip", "link", "set", "up0", "master", "br0", "up")
            _run("ip", "addr", "add", f"{self._subnet}.1/24", "dev", self._uplink)
            _run("ip", "link", "set", self._uplink, "up")
        except NamespaceError:
            self.close()
            raise

    def add(self, name: str, address: str = "") -> Node:
        """A new node; `address`: that of one that is gone, whose place it takes."""
        node = Node(name, address or f"{self._subnet}.{11 + len(self.nodes)}", self._bridge)
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """Once the processes on the nodes have ended."""
        for node in self.nodes:
            node.close()
        # The kernel takes its time with namespaces that nobody holds any more.
        subprocess.run(["ip", "link", "del", self._uplink], capture_output=True, check=False)
        self._bridge.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@cache
def _why_not() -> str:
    """Why this machine cannot have nodes; empty where it can."""
    try:
        with Network() as network:
            network.add("probe")
    except (NamespaceError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


@contextmanager
def network() -> Iterator[Network]:
    """A network for one test, or its skip (its failure, where namespaces must work) with the reason."""
    if reason := _why_not():
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{REQUIRED}=required, but there are no nodes here: {reason}")
        pytest.skip(f"this machine has no namespaces for nodes: {reason}")
    with Network() as made:
        yield made
