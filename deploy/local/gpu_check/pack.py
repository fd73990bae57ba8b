"""The pack: headers and libraries of Debian packages that a build of the core needs, in a folder that travels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

# Shared libraries with what they in turn load, which another distribution may lack.
PACKAGES = (
    "libabsl-dev",
    "libabsl20220623",
    "libgmock-dev",
    "libgtest-dev",
    "libhwy-dev",
    "libhwy1",
    "libgloo-dev",
    "libgloo0",
    "libhiredis0.14",
    "libibverbs1",
    "libnl-3-200",
    "libnl-route-3-200",
    "nlohmann-json3-dev",
)
MAX_BYTES = 40 << 20  # of the 60 MiB that may travel

_KEPT = ("/usr/include/", "/usr/lib/", "/lib/", "/usr/share/cmake/")
# CMake links Abseil by the full names of its shared libraries.
_LEFT_OUT = re.compile(r".*/(pkgconfig/.*|libibverbs/.*|libabsl_\w+\.(a|so))")


class PackError(Exception):
    """The pack could not be made."""


def installed_packages() -> bool:
    """Whether this machine has all of them as packages."""
    return not _missing()


def make_pack(folder: Path) -> int:
    """Fills the folder anew. Returns its size in bytes; raises PackError naming what is wrong."""
    missing = _missing()
    if missing:
        raise PackError(f"packages that are not installed: {' '.join(missing)} (deploy/local/setup installs them)")
    shutil.rmtree(folder, ignore_errors=True)
    for name in PACKAGES:
        for file in _files_of(name):
            # Links become files: a copy of the folder need not keep them.
            target = folder / _place(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > MAX_BYTES:
        raise PackError(f"{folder} has {size >> 20} MiB, want at most {MAX_BYTES >> 20}")
    (folder / "pack.json").write_text(json.dumps({name: _version(name) for name in PACKAGES}, indent=2) + "\n")
    return size


def cmake_options(folder: Path) -> list[str]:
    """What tells CMake to take everything from the pack, and the linker to find what libraries load."""
    usr = folder / "usr"
    libraries = sorted({file.parent for file in (usr / "lib").rglob("*.so*")})
    paths = ",".join(f"-rpath,{path},-rpath-link,{path}" for path in libraries)
    return [
        f"-Dabsl_DIR={_only(usr, 'abslConfig.cmake')}",
        f"-DGTest_DIR={_only(usr, 'GTestConfig.cmake')}",
        f"-DHWY_DIR={_only(usr, 'hwy-config.cmake')}",
        f"-Dnlohmann_json_DIR={_only(usr, 'nlohmann_jsonConfig.cmake')}",
        f"-DHEAVYWATER_GLOO_INCLUDE_DIR={usr / 'include'}",
        f"-DHEAVYWATER_GLOO_LIBRARY={_only(usr, 'libgloo.so') / 'libgloo.so'}",
        # Old tags: they count for libraries of libraries, too.
        f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags,{paths}",
    ]


def _only(root: Path, name: str) -> Path:
    """The folder of the file of this name."""
    found = sorted(root.rglob(name))
    if len(found) != 1:
        raise PackError(f"{root} has {len(found)} files named {name}, want 1: make the pack again")
    return found[0].parent


def _place(file: str) -> Path:
    """/lib is /usr/lib on Debian; elsewhere in the pack there is only one."""
    return Path("usr" + file if file.startswith("/lib/") else file.lstrip("/"))


def _missing() -> list[str]:
    if shutil.which("dpkg-query") is None:
        return list(PACKAGES)
    return [name for name in PACKAGES if _query(name, "${db:Status-Status}") != "installed"]


def _version(name: str) -> str:
    return _query(name, "${Version}")


def _query(name: str, what: str) -> str:
    return subprocess.run(
        ["dpkg-query", "-W", "-f", what, name], capture_output=True, text=True, check=False
    ).stdout.strip()


def _files_of(name: str) -> list[str]:
    listed = subprocess.run(["dpkg", "-L", name], capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        file for file in listed if file.startswith(_KEPT) and not _LEFT_OUT.fullmatch(file) and Path(file).is_file()
    ]
