"""Sessions: the cache is written to a running cache service, and another process goes on from there."""

import json
import subprocess
import sys
from pathlib import Path

import heavywater.hf
import pytest
import torch
from heavywater.blobs import BlobClient
from hf_beams_test import POLICIES, step
from hf_models import greedy, left_padded, prompt, tiny
from real_cache import cache_service

HERE = Path(__file__).resolve().parent
PROMPT, NEW, MIB = 70, 20, 1 << 20
SAVED = {name: options for name, options in POLICIES.items() if name != "scissorhands"}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with cache_service(tmp_path_factory.mktemp("cache"), host_bytes=128 * MIB, blob_bytes=64 * MIB) as (address, _):
        yield address


@pytest.fixture(params=SAVED)
def options(request):
    return SAVED[request.param]


def same(cache, other, row=0):
    for mine, own in zip(cache.kept(row), other.kept(row), strict=True):
        assert mine.positions.tolist() == own.positions.tolist()
        assert mine.scores.tolist() == own.scores.tolist()
    assert cache.get_seq_length() == other.get_seq_length()


def test_a_session_goes_on_turn_after_turn_as_if_it_had_never_ended(address, options):
    model, ids = tiny("llama"), prompt(PROMPT)
    never = heavywater.hf.attach(model, **options)
    for turn in range(3):
        cache = heavywater.hf.attach(model, service=address, session="turns", resume=turn > 0, **options)
        want = greedy(model, ids, NEW, cache=never)
        assert torch.equal(greedy(model, ids, NEW, cache=cache), want), f"turn {turn}"
        same(cache, never)
        assert cache.stats().tokens_demoted == never.stats().tokens_demoted
        ids = torch.cat([ids, want, prompt(13)], dim=1)
        del cache


def test_another_process_goes_on(address, tmp_path):
    model, ids = tiny("llama"), prompt(PROMPT)
    model.save_pretrained(tmp_path)
    jobs, wanted = [], []
    for name, options in SAVED.items():
        here = {**options, "service": address, "session": f"elsewhere, {name}"}
        never, cache = (heavywater.hf.attach(model, **one) for one in (options, here))
        first = greedy(model, ids, NEW, cache=never)
        assert torch.equal(greedy(model, ids, NEW, cache=cache), first)
        more = torch.cat([ids, first, prompt(13)], dim=1)
        jobs.append({"options": here, "ids": more.tolist(), "tokens": NEW})
        tokens = greedy(model, more, NEW, cache=never).tolist()
        sets = [kept.positions.tolist() for kept in never.kept()]
        wanted.append({"seen": PROMPT + NEW - 1, "tokens": tokens, "sets": sets})
    command = [sys.executable, str(HERE / "resume_session.py"), str(tmp_path), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == wanted


def test_every_row_of_a_padded_batch_goes_on(address, options):
    model = tiny("llama")
    inputs = left_padded([prompt(tokens)[0] for tokens in (PROMPT, 41)])
    tokens = prompt(8, rows=2)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 8)], dim=1)
    never = heavywater.hf.attach(model, **options)
    cache = heavywater.hf.attach(model, service=address, session="rows", **options)
    for one in (never, cache):
        with torch.no_grad():
            model(inputs["input_ids"], cache=one, attention_mask=mask[:, :PROMPT])
            model(tokens[:, :1], cache=one, attention_mask=mask[:, : PROMPT + 1])
    cache.commit()
    again = heavywater.hf.attach(model, service=address, session="rows", resume=True, **options)
    for column in range(1, 8):
        with torch.no_grad():
            got, want = (
                model(tokens[:, column : column + 1], cache=one, attention_mask=mask[:, : PROMPT + column + 1]).logits
                for one in (again, never)
            )
        assert torch.equal(got, want)
    for row in range(2):
        same(again, never, row)


def test_what_was_taken_back_does_not_come_again(address, options):
    model, ids, tokens = tiny("llama"), prompt(PROMPT), prompt(60)
    cache = heavywater.hf.attach(model, service=address, session="back", crop_tokens=8, **options)
    never = heavywater.hf.attach(model, **options)
    for one in (cache, never):
        step(model, one, ids)
        for column in range(4):
            step(model, one, tokens[:, column : column + 1])
    for column in range(50, 55):
        step(model, cache, tokens[:, column : column + 1])
    cache.commit()
    cache.crop(-5)
    cache.commit()
    again = heavywater.hf.attach(model, service=address, session="back", resume=True, crop_tokens=8, **options)
    same(again, never)
    for column in range(4, 40):
        token = tokens[:, column : column + 1]
        assert torch.equal(step(model, again, token), step(model, never, token))


def test_full_pages_are_written_through_and_commits_leave_nothing_behind(address):
    model = tiny("llama")
    with BlobClient(address) as blobs:
        cache = heavywater.hf.attach(model, service=address, session="pages", **SAVED["recall"])
        step(model, cache, prompt(PROMPT))
        row = cache.rows.rows[0].name
        space = "heavywater.hf/pages"
        page_keys = [f"page/{row}/{page}".encode() for page in range(3)]
        assert blobs.has(space, page_keys) == [True, True, False]
        for _ in range(4):
            cache.commit()
        keys = [f"{what}/{number}" for number in range(1, 5) for what in ("state", "tail")]
        there = blobs.has(space, [f"{key}/0".encode() for key in keys])
        assert there == [False] * 4 + [True] * 4
        cache.reset()
        step(model, cache, prompt(PROMPT))
        cache.commit()
        assert blobs.has(space, page_keys) == [False] * 3
        heavywater.hf.attach(model, service=address, session="pages", **SAVED["recall"])
        assert blobs.erase(space) == 0


def test_a_commit_that_broke_off_leaves_the_one_before(address, options):
    model, ids, tokens = tiny("llama"), prompt(PROMPT), prompt(12)
    cache = heavywater.hf.attach(model, service=address, session="torn", **options)
    never = heavywater.hf.attach(model, **options)
    for one in (cache, never):
        step(model, one, ids)
    cache.commit()
    step(model, cache, tokens[:, :1])
    cache.commit()
    with BlobClient(address) as blobs:
        assert blobs.erase("heavywater.hf/torn", [b"state/2/0"]) == 1
        again = heavywater.hf.attach(model, service=address, session="torn", resume=True, **options)
        same(again, never)
        step(model, again, tokens[:, :1])
        again.commit()  # over the torn one
        step(model, never, tokens[:, :1])
        same(heavywater.hf.attach(model, service=address, session="torn", resume=True, **options), never)
        blobs.erase("heavywater.hf/torn", [b"state/1/0", b"state/2/0", b"state/3/0"])
        with pytest.raises(heavywater.HeavywaterError, match=r"DATA_LOSS.*has gone from the cache service"):
            heavywater.hf.attach(model, service=address, session="torn", resume=True, **options)


def test_what_differs_is_named(address):
    model, options = tiny("llama"), SAVED["h2o"]
    cache = heavywater.hf.attach(model, service=address, session="mine", **options)
    with pytest.raises(RuntimeError, match="has taken nothing in"):
        cache.commit()
    step(model, cache, prompt(PROMPT))
    cache.commit()

    def resumed(model=model, session="mine", **changes):
        return heavywater.hf.attach(model, service=address, session=session, resume=True, **{**options, **changes})

    with pytest.raises(heavywater.HeavywaterError, match="NOT_FOUND: session 'other' is not at this cache service"):
        resumed(session="other")
    with pytest.raises(ValueError, match=r"saved with policy\.heavy_tokens 12, here it is 13"):
        resumed(heavy_tokens=13)
    with pytest.raises(ValueError, match="saved with weights"):
        resumed(tiny("llama"))
    with pytest.raises(ValueError, match="want service, its host:port"):
        heavywater.hf.attach(model, session="mine", **options)
    with pytest.raises(ValueError, match="service wants a session"):
        heavywater.hf.attach(model, service=address, **options)
    with pytest.raises(RuntimeError, match="has no session"):
        heavywater.hf.attach(model, **options).commit()


def test_a_policy_whose_state_cannot_be_saved_says_so(address):
    model = tiny("llama")
    cache = heavywater.hf.attach(model, service=address, session="no", **POLICIES["scissorhands"])
    step(model, cache, prompt(PROMPT))
    with pytest.raises(heavywater.HeavywaterError, match="scissorhands' history cannot be saved"):
        cache.commit()
    step(model, cache, prompt(1))  # goes on


def test_a_service_that_goes_away_stops_no_forward_pass(tmp_path):
    model = tiny("llama")
    with cache_service(tmp_path, host_bytes=64 * MIB, blob_bytes=32 * MIB) as (address, process):
        cache = heavywater.hf.attach(model, service=address, session="away", **SAVED["recall"])
        step(model, cache, prompt(PROMPT))
        process.kill()
        for _ in range(40):
            step(model, cache, prompt(1))
        assert cache.get_seq_length() == PROMPT + 40
        with pytest.raises(heavywater.HeavywaterError, match="UNAVAILABLE"):
            cache.commit()
        step(model, cache, prompt(1))


def test_a_service_without_room_says_so(tmp_path):
    model = tiny("llama")
    with cache_service(tmp_path, host_bytes=64 * MIB, blob_bytes=64 << 10) as (address, _):
        cache = heavywater.hf.attach(model, service=address, session="small", **SAVED["full"])
        step(model, cache, prompt(PROMPT))
        with pytest.raises(heavywater.HeavywaterError, match="has no room for state/1/0 of session 'small'"):
            cache.commit()
