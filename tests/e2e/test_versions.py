"""Two builds side by side: the previous one's workers with this one's cache service and the reverse, and an upgrade.

HEAVYWATER_PREVIOUS_BIN is a folder with the previous build's servers (deploy/local/previous makes one).
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import BIN, Cluster, cluster, token_ids, until_available
from heavywater import Client, HeavywaterError
from heavywater.v1 import common_pb2
from test_turns import BOUNDED, OFTEN, RECALL, Conversation

PREVIOUS = Path(os.environ.get("HEAVYWATER_PREVIOUS_BIN", ""))
BUILDS = {"previous": PREVIOUS, "this": BIN}
RANKS = 3
TOKENS = 120
UPGRADE_TOKENS = 800  # still being decoded when the group is replaced
FIRST = 60
SECOND = 40

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEAVYWATER_PREVIOUS_BIN"),
    reason="HEAVYWATER_PREVIOUS_BIN names no servers of another build: deploy/local/previous makes them",
)


def _version(binaries: Path) -> str:
    """What the servers in this folder call themselves."""
    printed = subprocess.run(
        [str(binaries / "heavywater-worker"), "--version"], capture_output=True, text=True, check=True
    )
    return printed.stdout.split()[-1]


def _cluster(folder: Path, cache: str, worker: str, ranks: int = RANKS, **flags: object) -> Cluster:
    return Cluster(
        folder,
        ranks,
        cache={"state_dir": folder / "state", "sequence_lease_ms": 30000, **flags},
        worker={**OFTEN, "drain_ms": 0},
        binaries={"cache": BUILDS[cache], "worker": BUILDS[worker]},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, long_prompt: list[int]) -> dict[str, list[int]]:
    """What this build says alone."""
    with cluster(tmp_path_factory.mktemp("alone"), RANKS, worker=OFTEN) as group:
        texts = {}
        for name, policy in (("bounded", BOUNDED), ("recall", RECALL)):
            talk = Conversation(group, long_prompt[:150], policy)
            texts[name] = talk.say(FIRST) + talk.say(SECOND, long_prompt[400:425])
        for name, tokens in (("long", TOKENS), ("upgrade", UPGRADE_TOKENS)):
            messages = group.generate(tokens=long_prompt[:200], max_new_tokens=tokens, ignore_eos=True, policy=RECALL)
            texts[name] = token_ids(messages)
        return texts


@pytest.fixture
def group(request: pytest.FixtureRequest, folder: Path) -> Iterator[Cluster]:
    cache, worker = request.param
    started = _cluster(folder, cache, worker)
    yield started
    started.close()


def _replace_cache(group: Cluster, build: str) -> None:
    """In order, as a StatefulSet does it: the next one begins with what this one has kept."""
    group.binaries["cache"] = BUILDS[build]
    assert group.cache is not None
    assert group.cache.terminate() == 0
    group.restart_cache()


def _replace_group(group: Cluster, build: str) -> None:
    """As a whole: ranks of two builds do not meet."""
    group.binaries["worker"] = BUILDS[build]
    for process in group.workers:
        process.terminate()
    group.restart_workers()


def _wait_suspended(group: Cluster, sequence: int) -> None:
    deadline = time.monotonic() + 20
    with Client(worker=group.worker_address, cache=group.cache_address) as client:
        while True:
            try:
                assert client.get(sequence).suspended
                return
            except HeavywaterError as error:
                assert error.code == "UNAVAILABLE", error
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.mark.parametrize("group", [("this", "previous"), ("previous", "this")], indirect=True, ids=["cache", "worker"])
@pytest.mark.parametrize(("name", "policy"), [("bounded", BOUNDED), ("recall", RECALL)], ids=["bounded", "recall"])
def test_a_group_and_a_cache_service_of_two_builds_serve_together(
    group: Cluster,
    long_prompt: list[int],
    undisturbed: dict[str, list[int]],
    name: str,
    policy: common_pb2.PolicyOptions,
) -> None:
    talk = Conversation(group, long_prompt[:150], policy)
    answer = talk.say(FIRST)
    talk.sets()
    with Client(worker=group.worker_address, cache=group.cache_address) as client:
        client.suspend(talk.sequence)
    answer += talk.say(SECOND, long_prompt[400:425])
    assert answer == undisturbed[name]
    assert "no longer kept" not in group.workers[0].log.read_text()
    # A rank that is lost comes back with what is committed.
    resumed = []
    with Client(worker=group.worker_address) as client:
        tokens = client.generate(long_prompt[:200], max_new_tokens=TOKENS, ignore_eos=True, policy=RECALL)
        for token in tokens:
            resumed.append(token.token)
            if len(resumed) == 50:
                group.workers[1].kill()
                group.restart_worker(1)
    assert resumed == undisturbed["long"]
    log = group.workers[0].log.read_text()
    assert "computed again" not in log and 'restored_tokens="' in log


def test_a_rolling_upgrade_under_generation_gives_the_undisturbed_text(
    folder: Path, long_prompt: list[int], undisturbed: dict[str, list[int]]
) -> None:
    """First the cache service, over its state; then the group."""
    started = _cluster(folder, "previous", "previous")
    try:
        text: list[int] = []
        upgrade: threading.Thread | None = None
        with Client(worker=started.worker_address) as client:
            tokens = client.generate(long_prompt[:200], max_new_tokens=UPGRADE_TOKENS, ignore_eos=True, policy=RECALL)
            for token in tokens:
                text.append(token.token)
                if len(text) == 20:
                    _replace_cache(started, "this")
                if len(text) == 60:
                    # Beside this: the client notices, and asks again.
                    upgrade = threading.Thread(target=_replace_group, args=(started, "this"))
                    upgrade.start()
        assert upgrade is not None
        upgrade.join()
        assert text == undisturbed["upgrade"]
        assert started.cache is not None
        kept = started.cache.log.read_text()
        assert "the kept state is discarded" not in kept
        log = started.workers[0].log.read_text()
        assert "computed again" not in log
        assert 'restored_tokens="' in log, "the group was replaced in the middle of the text"
    finally:
        started.close()


@pytest.mark.parametrize("order", [("previous", "this"), ("this", "previous")], ids=["forth", "back"])
def test_a_suspended_conversation_goes_on_in_the_other_build(
    folder: Path, long_prompt: list[int], undisturbed: dict[str, list[int]], order: tuple[str, str]
) -> None:
    """A store of a format that is not read is refused naming both: then it begins anew, and says the same."""
    first, second = order
    started = _cluster(folder, first, first)
    try:
        talk = Conversation(started, long_prompt[:150], RECALL)
        answer = talk.say(FIRST)
        with Client(worker=started.worker_address, cache=started.cache_address) as client:
            client.suspend(talk.sequence)
        _replace_cache(started, second)
        _replace_group(started, second)
        assert started.cache is not None
        refused = [line for line in started.cache.log.read_text().splitlines() if "state is discarded" in line]
        if refused:
            assert "format version" in refused[0] or "heavywater state" in refused[0], refused[0]
            talk = Conversation(started, long_prompt[:150], RECALL)
            answer = until_available(lambda: talk.say(FIRST))
        else:
            _wait_suspended(started, talk.sequence)
        answer += talk.say(SECOND, long_prompt[400:425])
        assert answer == undisturbed["recall"]
    finally:
        started.close()


@pytest.mark.parametrize("group", [("this", "previous")], indirect=True, ids=["upgrade"])
def test_a_rank_of_another_version_is_refused_naming_both(group: Cluster, long_prompt: list[int]) -> None:
    versions = [_version(build) for build in BUILDS.values()]
    if versions[0] == versions[1]:
        pytest.skip(f"both builds call themselves {versions[0]}")
    group.workers[2].kill()
    group.binaries["worker"] = BUILDS["this"]
    group.restart_worker(2)
    assert group.workers[2].wait(60) == 1
    log = group.workers[2].log.read_text()
    for version in versions:
        assert f"version {version};" in log, log[-1000:]
    # One of their own takes the place.
    group.binaries["worker"] = BUILDS["previous"]
    group.restart_worker(2)
    with Client(worker=group.worker_address) as client:

        def text() -> list[int]:
            return [token.token for token in client.generate(long_prompt[:20], max_new_tokens=4, ignore_eos=True)]

        assert len(until_available(text)) == 4
