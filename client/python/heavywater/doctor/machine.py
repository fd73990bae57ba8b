"""Checks of this machine: its processor, memory, limits and ports."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from pathlib import Path

from heavywater.doctor.finding import Finding, fail, ok, warn

GIB = 1 << 30
# Of CacheConfig: what a cache service takes unless it is told otherwise.
_HOST_TIER_BYTES = GIB
_FILES = 1024
PORTS = {7700: "heavywater-cache, unless it is given another", 8000: "heavywater http, likewise"}


def check_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """The kernels want AVX2, and use AVX-512 where it is whole."""
    what = "processor"
    try:
        found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError as error:
        return warn(what, f"unknown: {error}", "heavywater runs on Linux, on x86-64 with AVX2")
    flags = set(found[1].split()) if found else set()
    cores = f"{os.cpu_count()} cores"
    missing = sorted({"avx2", "fma", "f16c"} - flags)
    if missing:
        return fail(what, f"{cores}, without {', '.join(missing)}", "run the workers on a machine with AVX2 and FMA")
    whole = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
    return ok(what, f"{cores}, {'AVX-512' if whole else 'AVX2'}")


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    what = "memory"
    try:
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE))
        available, total = (int(sizes[name]) << 10 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError) as error:
        return warn(what, f"unknown: {error}", "heavywater runs on Linux")
    words = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if available < 2 * GIB:
        return warn(what, words, "a worker takes its weights and 1 GiB; plan with: heavywater plan-memory")
    return ok(what, words)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """The host tier's slab lies there."""
    what = "shared memory"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return fail(
            what, f"{folder}: {error.strerror}", "mount a tmpfs there, or start the servers with --disable_slab"
        )
    words = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB in {folder}"
    if usage.free < _HOST_TIER_BYTES:
        advice = "give the container more (docker run --shm-size=4g), or heavywater-cache a smaller --host_bytes"
        return fail(what, words, advice) if usage.free < _HOST_TIER_BYTES // 8 else warn(what, words, advice)
    return ok(what, words)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"{soft} at once" if soft != resource.RLIM_INFINITY else "any number"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        return warn("open files", words, f"ulimit -n {_FILES} or more (up to {hard} without root)")
    return ok("open files", words)


def check_port(port: int, who: str, host: str = "127.0.0.1") -> Finding:
    """Whether a server could listen there; taken by a server of one's own, that is as it should be."""
    what = f"port {port}"
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return warn(what, f"{error.strerror}", f"of {who}; see who listens: ss -ltnp 'sport = :{port}'")
    return ok(what, "free")


def check_gpu() -> Finding:
    """There may be none: the CPU serves as well."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ok("GPU", "none: workers run on the CPU (backend cpu)")
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return warn("GPU", f"nvidia-smi: {error}", "see docs/gpu.md; workers run on the CPU meanwhile")
    return ok("GPU", "; ".join(done.stdout.strip().splitlines()) + "; deploy/local/gpu-check tests it")
