"""The image's parts, as far as they can be checked without building it; deploy/image/check builds it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
IMAGE = ROOT / "deploy/image"
BIN = Path(os.environ.get("HEAVYWATER_BIN", ROOT / "build/release/bin"))
BINARIES = ["heavywater-cache", "heavywater-worker", "heavywater-health"]


def packages(path: Path) -> set[str]:
    return {line for line in path.read_text().splitlines() if line and not line.startswith("#")}


def stages() -> dict[str, str]:
    """Name of a stage -> its instructions."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", (IMAGE / "Dockerfile").read_text(), flags=re.M)
    return {name: base + "\n" + body for base, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)}


def libraries() -> set[str]:
    """Files that the loader takes from Debian's folders, of all binaries."""
    command = ["ldd", *(str(BIN / binary) for binary in BINARIES)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "not found" not in listed
    return set(re.findall(r"=> (/(?:usr/)?lib/\S+)", listed))


@pytest.fixture(scope="module")
def needed() -> set[str]:
    """The packages of these. dpkg knows a file by where it was installed, with or without /usr."""
    found = libraries()
    assert len(found) > 20
    reals = {library: str(Path(library).resolve()) for library in found}
    names = {library: {library, real, real.removeprefix("/usr")} for library, real in reals.items()}
    paths = sorted(set().union(*names.values()))
    listed = subprocess.run(["dpkg-query", "-S", *paths], capture_output=True, text=True).stdout
    owner = {path: package.split(":")[0] for package, path in re.findall(r"^(\S+): (.+)$", listed, flags=re.M)}
    assert [library for library in found if not owner.keys() & names[library]] == [], "of no package"
    return {owner[path] for paths in names.values() for path in paths if path in owner}


def installed_with(names: set[str]) -> set[str]:
    """The packages and all that they depend on."""
    command = ["apt-cache", "depends", "--recurse", "--installed", "--no-recommends", "--no-suggests"]
    command += ["--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances", *sorted(names)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line for line in text.splitlines() if line and not line.startswith((" ", "<"))}


def test_the_image_installs_every_library_that_the_servers_are_linked_with(needed: set[str]) -> None:
    always = {"libc6", "libgcc-s1", "libstdc++6"}
    assert needed - installed_with(packages(IMAGE / "packages.runtime")) - always == set()


def test_no_package_is_installed_for_nothing(needed: set[str]) -> None:
    assert packages(IMAGE / "packages.runtime") - needed == set()


def test_what_builds_the_image_builds_the_project() -> None:
    assert packages(IMAGE / "packages.build") - packages(ROOT / "deploy/local/packages.txt") == set()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_both_images_run_as_a_user_of_their_own_and_say_whether_they_are_well(target: str) -> None:
    found = stages()
    assert found[target].startswith("runtime\n")
    assert found[target].rstrip().endswith("USER 65532:65532"), "the last word on the user"
    assert f"COPY --from=build-{target} /out/ /usr/local/" in found[target]
    assert "HEALTHCHECK" in found["runtime"] and "heavywater-health" in found["runtime"]


def test_the_default_target_is_the_one_for_cpus() -> None:
    assert list(stages())[-1] == "cpu"


def test_the_chart_runs_as_the_user_of_the_image() -> None:
    values = (ROOT / "deploy/helm/heavywater/values.yaml").read_text()
    assert "runAsUser: 65532" in values and "runAsGroup: 65532" in values


def test_the_build_sees_the_sources_and_nothing_else() -> None:
    lines = (IMAGE / "Dockerfile.dockerignore").read_text().splitlines()
    assert "**" in lines
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert kept <= {path.name for path in ROOT.iterdir()}
    assert {"CMakeLists.txt", "cache_service", "worker", "proto", "deploy"} <= kept
