"""How clients connect, without servers of the project."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from heavywater import Client, HeavywaterError, Security
from heavywater.cli.app import app
from heavywater.local_security import LocalSecurity
from heavywater.security import is_loopback
from heavywater.v1 import admin_pb2, admin_pb2_grpc
from typer.testing import CliRunner


class Recorder(admin_pb2_grpc.AdminServiceServicer):
    """Keeps what calls carry."""

    def __init__(self) -> None:
        self.authorization: list[str | None] = []

    def Stats(self, request: admin_pb2.StatsRequest, context: grpc.ServicerContext) -> admin_pb2.StatsResponse:
        metadata = dict(context.invocation_metadata())
        self.authorization.append(metadata.get("authorization"))
        return admin_pb2.StatsResponse()


@pytest.fixture
def recorder() -> Iterator[tuple[Recorder, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    made = Recorder()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"127.0.0.1:{port}"
    server.stop(0)


def test_a_token_goes_with_each_call(recorder: tuple[Recorder, str]) -> None:
    made, address = recorder
    with Client(cache=address, security=Security(token="secret")) as client:
        client.stats()
        client.stats()
    with Client(cache=address, security=Security()) as client:
        client.stats()
    assert made.authorization == ["Bearer secret", "Bearer secret", None]


def test_a_tokens_file_is_read_anew_for_each_call(recorder: tuple[Recorder, str], tmp_path: Path) -> None:
    made, address = recorder
    path = tmp_path / "token"
    path.write_text("first\n")
    with Client(cache=address, security=Security(token_file=path)) as client:
        client.stats()
        path.write_text("second\n")
        client.stats()
    assert made.authorization == ["Bearer first", "Bearer second"]


def test_what_is_not_said_the_environment_says(recorder: tuple[Recorder, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, address = recorder
    monkeypatch.setenv("HEAVYWATER_TOKEN", "of-the-environment")
    with Client(cache=address) as client:
        client.stats()
    assert made.authorization == ["Bearer of-the-environment"]


def test_a_token_goes_in_plaintext_to_this_machine_only() -> None:
    with pytest.raises(ValueError, match=r"a token would go to cache:7700 in plaintext"):
        Client(cache="cache:7700", security=Security(token="secret"))


def test_plaintext_to_a_client_with_tls_fails(recorder: tuple[Recorder, str], tmp_path: Path) -> None:
    _, address = recorder
    ca = tmp_path / "ca.pem"
    ca.write_text("garbage")
    with Client(cache=address, security=Security(ca_file=ca), timeout_s=2) as client, pytest.raises(HeavywaterError):
        client.stats()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ca_file": "a", "cert_file": "b"}, "want both"),
        ({"cert_file": "b", "key_file": "c"}, "without ca_file"),
        ({"token": "a", "token_file": "b"}, "want one of the two"),
    ],
)
def test_halves_are_refused(fields: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Security(**fields)


@pytest.mark.parametrize("token", ["se cret", "secret\nother", "secr\u00e9t", "s" * 513])
def test_a_token_that_no_header_carries_is_refused_without_showing_it(token: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="want 1 to 512 of printable ASCII") as refused:
        Security(token=token)
    assert token not in str(refused.value)
    (tmp_path / "token").write_text(token)
    with pytest.raises(ValueError, match="want 1 to 512 of printable ASCII"):
        Security(token_file=tmp_path / "token").metadata()


def test_it_never_shows_its_token() -> None:
    assert "secret" not in repr(Security(token="secret"))
    assert "secret" not in str(Security(token="secret"))


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example.com:1", False),
    ],
)
def test_loopback_is_what_only_this_machine_can_reach(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


def test_servers_of_this_machine_want_all_of_tls_or_none() -> None:
    assert LocalSecurity().server_flags() == {}
    with pytest.raises(ValueError, match="none of the three"):
        LocalSecurity(cert_file=Path("a"))
    with pytest.raises(ValueError, match="or neither"):
        LocalSecurity(tokens_file=Path("a"))


def test_the_command_token_makes_a_token_and_its_line() -> None:
    done = CliRunner().invoke(app, ["token", "--role", "client", "--tenant", "team-a"])
    made = re.search(r"^token +(\S+)$", done.output, re.MULTILINE)
    line = re.search(r"^tokens_file +(\S+) client team-a$", done.output, re.MULTILINE)
    assert made and line, done.output
    assert hashlib.sha256(made[1].encode()).hexdigest() == line[1]
    assert len(made[1]) >= 43


def test_a_client_of_every_tenants_sequences_must_be_asked_for() -> None:
    bare = CliRunner().invoke(app, ["token"])
    assert isinstance(bare.exception, ValueError)
    assert "no --tenant" in str(bare.exception)
    assert " client *\n" in CliRunner().invoke(app, ["token", "--tenant", "*"]).output
    assert " worker *\n" in CliRunner().invoke(app, ["token", "--role", "worker"]).output


def test_the_command_token_refuses_tenants_of_workers() -> None:
    done = CliRunner().invoke(app, ["token", "--role", "worker", "--tenant", "team-a"])
    assert isinstance(done.exception, ValueError)
    assert "act for every tenant" in str(done.exception)
