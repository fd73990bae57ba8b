"""The programs of docs/clients: clients generated from proto alone, run against servers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from client_fakes import FakeServers
from heavywater import PolicyOptions
from heavywater.local import LocalServers

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = ROOT / "docs/clients"
PROMPT = "It was a dark and stormy night. The rain fell in torrents, and the captain of the ship was asleep."


def ruby(folder: Path) -> list[str]:
    if shutil.which("grpc_tools_ruby_protoc") is None:
        pytest.skip("ruby-grpc and ruby-grpc-tools are not installed (deploy/local/packages.txt)")
    protos = sorted(map(str, (ROOT / "proto/heavywater/v1").glob("*.proto")))
    command = ["grpc_tools_ruby_protoc", "-I", str(ROOT / "proto"), f"--ruby_out={folder}", f"--grpc_out={folder}"]
    subprocess.run([*command, *protos], check=True, timeout=60)
    return ["ruby", "-I", str(folder), str(CLIENTS / "ruby/generate.rb")]


def go(folder: Path) -> list[str]:
    gopath = Path("/usr/share/gocode")  # where Debian's packages have their sources
    wanted = [shutil.which("go"), shutil.which("protoc-gen-go"), shutil.which("protoc-gen-go-grpc")]
    if None in wanted or not (gopath / "src/google.golang.org/grpc").is_dir():
        pytest.skip("Go or its packages for gRPC are not installed (deploy/local/packages.txt)")
    protos = [str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").glob("heavywater/v1/*.proto")]
    (folder / "src").mkdir()
    command = ["protoc", "-I", ".", f"--go_out={folder}/src", f"--go-grpc_out={folder}/src"]
    for proto in protos:
        command += [f"--go_opt=M{proto}=heavywater/v1", f"--go-grpc_opt=M{proto}=heavywater/v1"]
    subprocess.run([*command, *protos], cwd=ROOT / "proto", check=True, timeout=60)
    environment = {
        **os.environ,
        "GO111MODULE": "off",
        "GOFLAGS": "-p=2",
        "GOPATH": f"{folder}:{gopath}",
        "GOCACHE": os.environ.get("GOCACHE", str(folder / "cache")),
    }
    program = folder / "generate"
    build = ["go", "build", "-o", str(program), str(CLIENTS / "go/generate.go")]
    subprocess.run(build, env=environment, check=True, timeout=600)
    return [str(program)]


@pytest.fixture(scope="module", params=[ruby, go], ids=["ruby", "go"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return request.param(tmp_path_factory.mktemp("client"))


def run(program: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_it_prints_the_text_the_figures_and_the_sets(program: list[str], local_servers: LocalServers) -> None:
    policy = PolicyOptions(policy="snapkv_h2o", heavy_tokens=16, recent_tokens=16)
    with local_servers.client() as client:
        expected = client.generate([{"role": "user", "content": PROMPT}], max_new_tokens=24, policy=policy)
        text = expected.text()
        (first,) = client.get_sets(expected.sequence_id, [0])
        client.close(expected.sequence_id)
        before = {sequence.sequence_id for sequence in client.list()}
        done = run(program, local_servers.worker_address, local_servers.cache_address, PROMPT)
        assert done.returncode == 0, done.stderr
        assert {sequence.sequence_id for sequence in client.list()} == before  # it has closed its own
    assert done.stdout.startswith(text)
    assert f"{expected.summary.device_bytes_peak} of {expected.summary.full_cache_bytes} bytes" in done.stdout
    heavy = done.stdout.splitlines()[-1].partition("[")[2].partition("]")[0]
    assert len(heavy.replace(",", " ").split()) == len(first.heavy) > 0
    assert done.stdout.rstrip().endswith("recent 16")


def test_it_goes_on_where_its_stream_broke_off(program: list[str], servers: FakeServers) -> None:
    whole = run(program, servers.address, servers.address, "abc").stdout.splitlines()[0]
    servers.worker.breaks = [5]
    done = run(program, servers.address, servers.address, "abc")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == whole
    assert len(servers.worker.requests[-1].resume.received_tokens) == 5


def test_a_refusal_is_its_last_word(program: list[str], servers: FakeServers) -> None:
    done = run(program, servers.address, servers.address, "")
    assert done.returncode != 0
    assert "neither text nor tokens" in done.stderr or "usage" in done.stderr
