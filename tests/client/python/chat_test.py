"""`heavywater chat`: conversations and their files, and the command as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from client_fakes import FakeServers
from heavywater.conversation import Conversation

USER, ANSWER = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"


def command(servers: FakeServers, *arguments: str) -> list[str]:
    addresses = ["--address", servers.address, "--cache", servers.address]
    return [sys.executable, "-m", "heavywater", "chat", *addresses, *arguments]


def chat(servers: FakeServers, *lines: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    stdin = "".join(f"{line}\n" for line in lines)
    return subprocess.run(
        command(servers, *options), input=stdin, capture_output=True, text=True, timeout=60, check=True
    )


def prompts(servers: FakeServers) -> list[str]:
    """Of the questions; what a chat asks at its start, to see whether it can, is none."""
    asked = [request.text for request in servers.worker.requests if request.text != "a"]
    return [text.removesuffix("<|im_start|>assistant\n") for text in asked]


def test_each_turn_sends_the_whole_conversation_and_answers_go_to_standard_output(servers: FakeServers) -> None:
    servers.worker.answer = lambda request: "paris" if "france" in request.text.split("user")[-1] else "rome."
    done = chat(servers, "france", "", "italy", options=("--system", "be brief", "-n", "5", "--policy", "h2o"))
    assert done.stdout == "paris\nrome.\n"
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    first = system + USER.format("france")
    assert prompts(servers) == [first, first + ANSWER.format("paris") + USER.format("italy")]
    assert servers.worker.requests[0].policy.policy == "h2o"
    assert servers.cache.closed == [42, 42, 42]  # at the start, when the second is asked for, at the end


def test_a_conversation_goes_on_from_its_file(servers: FakeServers, tmp_path: Path) -> None:
    servers.worker.answer = lambda request: "abc"
    file = tmp_path / "talk.json"
    chat(servers, "/system calm", "one", f"/save {file}", options=("-n", "3"))
    done = chat(servers, "two", options=(str(file), "-n", "3"))
    assert "user: one" in done.stderr
    system = "<|im_start|>system\ncalm<|im_end|>\n"
    assert prompts(servers)[-1] == system + USER.format("one") + ANSWER.format("abc") + USER.format("two")


def test_undo_retry_and_reset_change_what_is_sent(servers: FakeServers) -> None:
    servers.worker.answer = lambda request: "ab"
    chat(servers, "one", "two", "/undo", "three", "/retry", "/reset", "four", options=("-n", "2"))
    one = USER.format("one")
    three = one + ANSWER.format("ab") + USER.format("three")
    assert prompts(servers) == [one, one + ANSWER.format("ab") + USER.format("two"), three, three, USER.format("four")]


def test_a_file_stands_before_the_next_question_only(servers: FakeServers, tmp_path: Path) -> None:
    servers.worker.answer = lambda request: "ab"
    file = tmp_path / "report.txt"
    file.write_text("signed by me")
    done = chat(servers, f"/file {file}", "who signed", "/reset", "again", options=("-n", "2"))
    assert "report.txt: 1" in done.stderr  # so many tokens
    assert prompts(servers) == [USER.format("signed by me\n\nwho signed"), USER.format("again")]


def test_sets_shows_the_last_answers(servers: FakeServers) -> None:
    servers.worker.answer = lambda request: "ab"
    done = chat(servers, "/sets", "one", "/sets", options=("-n", "2"))
    assert "error: there is no answer yet" in done.stderr
    assert "sequence 42, plan 3, mean of 2 sets" in done.stderr
    assert "heavy 2" in done.stderr


def test_what_fails_is_said_and_the_turn_is_taken_back(servers: FakeServers, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    lines = ["/nonsense", "/save", f"/load {missing}", f"/file {missing}", "/retry", "/sets", "/undo"]
    done = chat(servers, *lines, "/history")
    assert done.stderr.count("error: ") == 6
    assert "there is nothing to take back" in done.stderr
    servers.worker.answer = lambda request: {}["broken"] if "one" in request.text else "a"
    done = chat(servers, "one", "/history")
    assert "error: UNKNOWN" in done.stderr
    assert "user: one" not in done.stderr


def test_an_interrupt_stops_the_answer_and_the_chat_goes_on(servers: FakeServers, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "talk.json"
    with (
        out.open("w") as stdout,
        subprocess.Popen(
            command(servers, "-n", "1000000"), stdin=subprocess.PIPE, stdout=stdout, stderr=stdout, text=True
        ) as process,
    ):
        process.stdin.write("abc\n")
        process.stdin.flush()
        deadline_s = time.monotonic() + 20
        while out.stat().st_size < 1000 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(f"/save {file}\n", timeout=20)
    assert process.returncode == 0
    assert servers.worker.cancelled.wait(5)
    question, answer = json.loads(file.read_text())["messages"]
    assert question == {"role": "user", "content": "abc"}
    assert len(answer["content"]) > 100


def test_what_the_servers_refuse_is_said_before_the_first_question(servers: FakeServers) -> None:
    servers.worker.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "policy.policy: preset is 'lru'")
    done = subprocess.run(
        command(servers, "--policy", "lru"), input="hi\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "preset is 'lru'" in done.stderr) == (1, True)
    assert len(servers.worker.requests) == 1


@pytest.mark.parametrize("option", ["--temperature=nan", "--top-p=2", "--ranks=7"])
def test_an_option_that_no_server_takes_is_refused_before_the_first_question(servers: FakeServers, option: str) -> None:
    done = subprocess.run(command(servers, option), input="", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "no conversation"),
        ("[]", "want an object of format"),
        ('{"format": "heavywater-conversation-1"}', "messages is no list"),
        ('{"format": "heavywater-conversation-1", "messages": [{"role": "tool", "content": ""}]}', r"messages\[0\]"),
        ('{"format": "heavywater-conversation-1", "messages": [{"role": "user", "content": 1}]}', r"messages\[0\]"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        Conversation.load(file)


def test_a_conversation_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    conversation = Conversation()
    conversation.set_system("s")
    conversation.ask("naïve?")
    conversation.answer("yes")
    conversation.save(tmp_path / "talk.json")
    assert Conversation.load(tmp_path / "talk.json") == conversation
    conversation.ask("\ud800")  # that UTF-8 cannot hold
    with pytest.raises(ValueError, match="surrogates"):
        conversation.save(tmp_path / "talk.json")
    assert Conversation.load(tmp_path / "talk.json").turns == 1


def test_the_system_message_stays_first() -> None:
    conversation = Conversation()
    conversation.ask("a")
    conversation.set_system("x")
    conversation.set_system("y")
    assert [message["content"] for message in conversation.messages] == ["y", "a"]
    conversation.reset()
    assert (conversation.system, conversation.turns, conversation.take_back()) == ("y", 0, "")
    conversation.set_system("")
    assert conversation.messages == []
