"""Starting and stopping servers, with small programs in their place."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from heavywater.local import LocalOptions, LocalServers, find_model
from heavywater.serve_config import read_serve_config
from heavywater.server_process import ServerError

# Says where it listens, reports ready, and notes when it was told to stop.
SERVER = """
import os, pathlib, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
name = pathlib.Path(sys.argv[0]).name
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("readiness", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
def stop(number, frame):
    with open(os.environ["STOPS"], "a") as log:
        log.write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
with open(os.environ["STARTS"], "a") as log:
    log.write(" ".join([name, *sys.argv[1:]]) + "\\n")
print(f"listening on 127.0.0.1:{port}", flush=True)
time.sleep(60)
"""
DIES = "import sys; sys.exit('cannot map the slab')"
HANGS = "import time; time.sleep(60)"


class Programs:
    """Programs on PATH with the servers' names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model.gguf"
        self.model.touch()

    def put(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\n{body}")
        path.chmod(0o755)

    def log(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("STARTS", "STOPS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return Programs(tmp_path)


def test_workers_get_the_cache_service_and_their_rank_and_stop_before_it(programs: Programs) -> None:
    programs.put("heavywater-cache", SERVER)
    programs.put("heavywater-worker", SERVER)
    options = LocalOptions(
        ranks=2, model=programs.model, worker_flags={"kv_dtype": "fp32"}, cache_flags={"disable_slab": True}
    )
    with LocalServers(options) as servers:
        servers.check_alive()
        assert servers.worker_address != servers.cache_address
        cache, *workers = programs.log("STARTS")
        assert cache == "heavywater-cache --disable_slab=true --listen_address=127.0.0.1:0"
        for rank, worker in enumerate(sorted(workers)):
            for flag in (f"rank={rank}", "size=2", f"cache_address={servers.cache_address}", "kv_dtype=fp32"):
                assert f" --{flag} " in worker + " "
    assert programs.log("STOPS") == ["heavywater-worker", "heavywater-worker", "heavywater-cache"]


def test_serve_passes_the_policy_of_requests_that_name_none(programs: Programs) -> None:
    programs.put("heavywater-cache", SERVER)
    programs.put("heavywater-worker", SERVER)
    command = [sys.executable, "-m", "heavywater", "serve", "--model", str(programs.model), "--policy", "recall"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        assert serve.stdout.readline().startswith("export HEAVYWATER_ADDRESS=127.0.0.1:")
        serve.send_signal(signal.SIGINT)
    assert " --default_policy=recall " in programs.log("STARTS")[1] + " "


CONFIG = """
ranks: 2
model: model.gguf
cache: {host_bytes: 4096, disable_slab: true}
worker:
  default_policy: h2o
  kv_dtype: fp32
"""


@pytest.mark.parametrize(("options", "policy"), [([], "h2o"), (["--policy", "full"], "full")])
def test_serve_starts_what_a_yaml_says_and_options_count_before_it(
    programs: Programs, options: list[str], policy: str
) -> None:
    programs.put("heavywater-cache", SERVER)
    programs.put("heavywater-worker", SERVER)
    config = programs.folder / "serve.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "heavywater", "serve", "--config", str(config), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as serve:
        assert serve.stdout is not None
        assert serve.stdout.readline().startswith("export HEAVYWATER_ADDRESS=127.0.0.1:")
        serve.send_signal(signal.SIGINT)
    cache, *workers = programs.log("STARTS")
    assert " --host_bytes=4096 --disable_slab=true " in cache
    assert len(workers) == 2
    for worker in workers:
        for flag in ("size=2", f"model={programs.model}", f"default_policy={policy}", "kv_dtype=fp32"):
            assert f" --{flag} " in worker + " "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "is list, want fields: ranks, model, cache, worker"),
        ("rank: 2", "no field 'rank', want ranks"),
        ("ranks: two", "ranks is 'two', want a whole number"),
        ("ranks: true", "ranks is True"),
        ("ranks: 99999", "ranks is 99999, want a whole number, 1 to 256"),
        ("model: 7", "model is 7"),
        ("cache: 5", "cache is 5, want the fields of heavywater-cache's configuration"),
        ("worker: {rank: 1}", "worker.rank is what heavywater serve gives the server"),
        ("worker: {kv_dtype: [fp32]}", "worker.kv_dtype is ['fp32'], want one value"),
        ("cache: {tls_cert_file: a}", "cache.tls_cert_file is for all servers: want --tls_cert_file or its like"),
        ("a: [", "while parsing"),
    ],
)
def test_a_yaml_is_refused_by_the_fields_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_serve_config(path)


def test_bench_passes_all_on_and_ends_as_the_program_does(programs: Programs) -> None:
    programs.put("heavywater-bench", "import sys; print(sys.argv[1:]); sys.exit(3)")
    command = [sys.executable, "-m", "heavywater", "bench", "attention", "--help", "--cores=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "['attention', '--help', '--cores=2']\n")


def test_a_server_that_dies_is_reported_with_its_last_words(programs: Programs) -> None:
    programs.put("heavywater-cache", SERVER)
    programs.put("heavywater-worker", DIES)
    with pytest.raises(ServerError, match=r"(?s)heavywater-worker ended with 1.*cannot map the slab"):
        LocalServers(LocalOptions(model=programs.model)).__enter__()
    assert programs.log("STOPS") == ["heavywater-cache"]


def test_a_server_that_does_not_listen_in_time_is_reported_and_ended(programs: Programs) -> None:
    programs.put("heavywater-cache", HANGS)
    before = time.monotonic()
    with pytest.raises(ServerError, match="heavywater-cache does not listen in time"):
        LocalServers(LocalOptions(model=programs.model, ready_timeout_s=0.5)).__enter__()
    assert time.monotonic() - before < 8


def test_a_binary_that_is_not_there_is_named(programs: Programs) -> None:
    with pytest.raises(ServerError, match="heavywater-cache is not on PATH"):
        LocalServers(LocalOptions(model=programs.model)).__enter__()


def test_a_model_that_is_not_there_is_named(programs: Programs) -> None:
    with pytest.raises(ServerError, match=r"no\.gguf does not exist, want a GGUF file or a folder"):
        LocalServers(LocalOptions(model=Path("no.gguf"))).__enter__()


def test_the_model_is_the_environments_before_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAVYWATER_MODEL", "mine.gguf")
    assert find_model() == Path("mine.gguf")
    monkeypatch.delenv("HEAVYWATER_MODEL")
    assert find_model().suffix == ".gguf"
    assert os.path.getsize(find_model()) > 1 << 20
