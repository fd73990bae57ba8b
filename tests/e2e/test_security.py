"""TLS and tokens everywhere: cache service, ranks, both clients, the command line, the health tool."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import certificates
import pytest
from cluster import BIN, Cluster, Process, cluster
from heavywater import Client, HeavywaterError, Security, aio
from heavywater.local import LocalOptions, LocalServers
from heavywater.local_security import LocalSecurity

PROMPT = [504, 260, 253]
TOKENS = {
    "token-of-a": "client team-a",
    "token-of-b": "client team-b",
    "token-of-worker": "worker *",
    "token-of-admin": "admin *",
}


@dataclass
class Secured:
    group: Cluster
    authority: certificates.Authority
    folder: Path
    client_cert: Path
    client_key: Path

    def security(self, token: str, *, ca: Path | None = None) -> Security:
        return Security(
            ca_file=ca or self.authority.ca, cert_file=self.client_cert, key_file=self.client_key, token=token
        )

    def client(self, token: str) -> Client:
        return Client(self.group.worker_address, self.group.cache_address, security=self.security(token), timeout_s=10)

    def environment(self, token: str) -> dict[str, str]:
        return {
            **os.environ,
            "HEAVYWATER_ADDRESS": self.group.worker_address,
            "HEAVYWATER_CACHE": self.group.cache_address,
            "HEAVYWATER_TLS_CA_FILE": str(self.authority.ca),
            "HEAVYWATER_TLS_CERT_FILE": str(self.client_cert),
            "HEAVYWATER_TLS_KEY_FILE": str(self.client_key),
            "HEAVYWATER_TOKEN": token,
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Three ranks and a cache service; mutual TLS and tokens; files are looked at often."""
    folder = tmp_path_factory.mktemp("secured")
    authority = certificates.Authority(folder)
    cert, key = authority.sign("server")
    client_cert, client_key = authority.sign("client")
    common = {
        "tls_cert_file": cert,
        "tls_key_file": key,
        "tls_client_ca_file": authority.ca,
        "tokens_file": certificates.tokens_file(folder, TOKENS),
        "security_reload_ms": 200,
    }
    worker_token = certificates.token_file(folder, "worker-token", "token-of-worker")
    security = Security(ca_file=authority.ca, cert_file=client_cert, key_file=client_key)
    with cluster(
        folder,
        3,
        cache={**common, "metrics_address": "127.0.0.1:0"},
        worker={**common, "tls_ca_file": authority.ca, "token_file": worker_token},
        security=security,
    ) as group:
        yield Secured(group, authority, folder, client_cert, client_key)


def test_a_client_with_certificate_and_token_generates_and_reads(secured: Secured) -> None:
    with secured.client("token-of-a") as client:
        assert client.get_model().info.tensor_parallel == 3
        generation = client.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
        assert len(list(generation)) == 4
        assert generation.sequence_id in [sequence.sequence_id for sequence in client.list()]
        sequence = client.get(generation.sequence_id)
        assert sequence.tenant == "team-a"
        client.get_sets(generation.sequence_id)
        keys, values = client.read(sequence, 0, 0, 0, 2)
        assert len(keys) == len(values) == 2


def test_the_asyncio_client_does_so_too(secured: Secured) -> None:
    async def run() -> tuple[int, bool]:
        worker, cache = secured.group.worker_address, secured.group.cache_address
        async with aio.Client(worker, cache, security=secured.security("token-of-a")) as client:
            tokens = [token async for token in client.generate(PROMPT, max_new_tokens=3, ignore_eos=True)]
            return len(tokens), await client.is_ready()

    assert asyncio.run(run()) == (3, True)


def test_another_tenants_ids_are_not_there(secured: Secured) -> None:
    with secured.client("token-of-a") as a, secured.client("token-of-b") as b:
        generation = a.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
        list(generation)
        sequence = a.get(generation.sequence_id)
        assert generation.sequence_id not in [one.sequence_id for one in b.list()]
        for call in (
            lambda: b.get(generation.sequence_id),
            lambda: b.get_sets(generation.sequence_id),
            lambda: b.close(generation.sequence_id),
            lambda: b.read(sequence, 0, 0, 0, 1),
        ):
            with pytest.raises(HeavywaterError) as refused:
                call()
            assert refused.value.code == "NOT_FOUND"
            assert "is unknown or has ended" in refused.value.message
        assert a.get(generation.sequence_id).sequence_id == generation.sequence_id


@pytest.mark.parametrize(
    ("token", "code", "words"),
    [
        ("", "UNAUTHENTICATED", "want one of role admin"),
        ("token-of-nobody", "UNAUTHENTICATED", "not known here"),
        ("token-of-a", "PERMISSION_DENIED", "role is client, want admin"),
    ],
)
def test_what_is_refused_says_what_is_wanted_and_never_the_token(
    secured: Secured, token: str, code: str, words: str
) -> None:
    with secured.client(token) as client, pytest.raises(HeavywaterError) as refused:
        client.stats()
    assert refused.value.code == code
    assert words in refused.value.message
    assert "token-of" not in refused.value.message


def test_admins_see_all_and_their_calls_are_in_the_log(secured: Secured) -> None:
    with secured.client("token-of-admin") as client:
        assert client.stats().ranks == 3
    assert secured.group.cache is not None
    log = secured.group.cache.log.read_text()
    assert re.search(r"admin call .*AdminService/Stats.*127\.0\.0\.1", log)
    for token in TOKENS:
        assert token not in log


def test_without_a_certificate_or_trust_there_is_no_connection(secured: Secured, tmp_path: Path) -> None:
    other = certificates.Authority(tmp_path, "other")
    cert, key = other.sign("client")
    ca = secured.authority.ca
    for security in (
        Security(),
        Security(ca_file=ca),
        Security(ca_file=ca, cert_file=cert, key_file=key),
        secured.security("token-of-admin", ca=other.ca),
    ):
        client = Client(cache=secured.group.cache_address, security=security, timeout_s=3)
        with client, pytest.raises(HeavywaterError) as refused:
            client.stats()
        assert refused.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def test_the_command_line_takes_it_from_the_environment_or_flags(secured: Secured) -> None:
    command = [sys.executable, "-m", "heavywater"]
    done = subprocess.run(
        [*command, "doctor"], env=secured.environment("token-of-admin"), capture_output=True, text=True, timeout=120
    )
    assert "3 ranks" in done.stdout, done.stdout + done.stderr
    environment = secured.environment("")
    token = certificates.token_file(secured.folder, "admin-token", "token-of-admin")
    flags = [
        *("--tls-ca-file", environment.pop("HEAVYWATER_TLS_CA_FILE"), "--token-file", str(token)),
        *("--tls-cert-file", environment.pop("HEAVYWATER_TLS_CERT_FILE")),
        *("--tls-key-file", environment.pop("HEAVYWATER_TLS_KEY_FILE")),
    ]
    top = [*command, *flags, "top", "--once", "--json", "--interval", "0.1"]
    done = subprocess.run(top, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [*command, "inspect", "1"], env=secured.environment(""), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "hint: HEAVYWATER_TOKEN" in done.stderr


def test_the_health_tool_speaks_tls_and_needs_no_token(secured: Secured) -> None:
    for address in (secured.group.cache_address, *secured.group.worker_addresses):
        command = [str(BIN / "heavywater-health"), address, "readiness"]
        done = subprocess.run(command, env=secured.environment(""), capture_output=True, text=True, timeout=30)
        assert done.stdout.strip() == "SERVING"
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 1, "plaintext"


def test_renewed_certificates_are_used_and_broken_ones_are_not(secured: Secured) -> None:
    cert, _ = secured.authority.sign("server")
    good = cert.read_text()
    cert.write_text("garbage")
    time.sleep(3)  # longer than it takes to be seen
    with secured.client("token-of-a") as client:
        assert len(list(client.generate(PROMPT, max_new_tokens=2, ignore_eos=True))) == 2
    assert secured.group.cache is not None
    assert "a changed file is no good; the old one stays in use" in secured.group.cache.log.read_text()
    cert.write_text(good)
    deadline = time.monotonic() + 20
    while "a changed file is used from now on" not in secured.group.cache.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.5)
    with secured.client("token-of-a") as client:
        assert len(list(client.generate(PROMPT, max_new_tokens=2, ignore_eos=True))) == 2


@pytest.mark.parametrize("binary", ["heavywater-cache", "heavywater-worker"])
def test_plaintext_on_an_address_that_others_reach_is_refused(binary: str, tmp_path: Path) -> None:
    flags = {"listen_address": "0.0.0.0:0", "model": "none"} if "worker" in binary else {"listen_address": "0.0.0.0:0"}
    process = Process(binary, flags, tmp_path / "log")
    with pytest.raises(RuntimeError, match="want tls_cert_file and tls_key_file, a loopback address, or allow_plain"):
        process.wait_for_line("listening on ")
    process.close()
    assert not process.alive()


def test_plaintext_there_is_served_when_it_is_allowed(tmp_path: Path) -> None:
    flags = {"listen_address": "0.0.0.0:0", "allow_plaintext": True, "host_bytes": 1 << 20}
    process = Process("heavywater-cache", flags, tmp_path / "log")
    port = process.wait_for_line("listening on ").rpartition(":")[2]
    with Client(cache=f"127.0.0.1:{port}", security=Security()) as client:
        assert client.stats().sequences == 0
    process.close()


def test_servers_of_this_machine_run_with_tls_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `heavywater serve` does with its flags."""
    authority = certificates.Authority(tmp_path)
    cert, key = authority.sign("server")
    security = LocalSecurity(
        cert_file=cert,
        key_file=key,
        ca_file=authority.ca,
        client_ca_file=authority.ca,
        tokens_file=certificates.tokens_file(tmp_path, TOKENS),
        worker_token_file=certificates.token_file(tmp_path, "worker-token", "token-of-worker"),
    )
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("HEAVYWATER_TOKEN", "token-of-a")
    with LocalServers(LocalOptions(supervise=True, security=security)) as servers, servers.client() as client:
        assert len(list(client.generate(PROMPT, max_new_tokens=2, ignore_eos=True))) == 2
        time.sleep(1)  # the supervisor asks for their health
        servers.check_alive()
        with pytest.raises(HeavywaterError) as refused:
            client.stats()
        assert refused.value.code == "PERMISSION_DENIED"
