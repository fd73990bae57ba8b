"""heavywater diff"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from heavywater.cli.connection import Address, CacheAddress, Json, Ranks, connected
from heavywater.cli.highlight import token_texts
from heavywater.cli.policy import Budget, DeviceRatio, Policy, Recall, RecallTokens, Scope, policy_options
from heavywater.cli.prompt import Chat, File, MaxNewTokens, Prompt, QuestionAfter, System, prompt_and_suffix, read_text
from heavywater.comparison import NOT_RECALLED, NOTICED_SHARE, Comparison, Request, compare, most_likely
from heavywater.generation import Token
from heavywater.local import LocalOptions
from heavywater.model import Model

_TOP = 5  # tokens of a distribution
_POSITIONS = 10
_AROUND = 4  # tokens shown to either side of a position


def diff(
    prompt: Prompt = "",
    file: File = None,
    chat: Chat = False,
    system: System = "",
    max_new_tokens: MaxNewTokens = 128,
    question_after: QuestionAfter = "",
    policy: Policy = "recall",
    scope: Scope = "layer",
    budget: Budget = 0.2,
    recall: Recall = None,
    recall_tokens: RecallTokens = "",
    device_ratio: DeviceRatio = 0.0,
    ranks: Ranks = 1,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """Compare a greedy answer with the full cache's: where they part, and what the policy did not see there."""
    text = read_text(prompt, file)
    log = Console(stderr=True)
    options = policy_options(policy, scope, budget, recall, recall_tokens, device_ratio)
    with connected(address, cache, LocalOptions(ranks=ranks), log) as client:
        text, suffix = prompt_and_suffix(client, text, chat, system, question_after)
        with log.status("asking under the policy and with the full cache"):
            comparison = compare(client, Request(text, suffix, max_new_tokens, options))
        model = client.get_model()
    given = [*model.encode(text), *(model.encode(suffix) if suffix else [])]
    pieces = token_texts(model, [*given, *(token.token for token in comparison.policy_answer)])
    if as_json:
        print(json.dumps(_as_json(comparison, model, pieces)))
    else:
        _print(Console(), comparison, model, pieces)


def _print(console: Console, comparison: Comparison, model: Model, pieces: Sequence[str]) -> None:
    at = comparison.at
    if at is None:
        console.print(Text(_joined(comparison.policy_answer)))
        console.print(f"\n{comparison.verdict}: the full cache gives the same {len(comparison.policy_answer)} tokens")
        return
    console.print(Text(_joined(comparison.policy_answer[:at])))
    console.print(_distributions(comparison.policy_answer[at], comparison.full_answer[at], model))
    unread = "not all" if comparison.verdict == NOT_RECALLED else "nothing"
    console.print(f"\n{comparison.verdict}: queries read {unread} of what has left the device", highlight=False)
    if comparison.note:
        console.print(comparison.note, highlight=False)
    else:
        console.print(_positions(comparison, pieces))


def _joined(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def _distributions(policy: Token, full: Token, model: Model) -> Table:
    table = Table("policy", "", "full cache", "", title=f"token {policy.index}, the first that differs")
    for ours, theirs in zip(most_likely(policy, _TOP), most_likely(full, _TOP), strict=True):
        row: list[Text | str] = []
        for token, probability in (ours, theirs):
            row += [Text(repr(model.decode([token]))), f"{probability:.1%}"]
        table.add_row(*row)
    return table


def _positions(comparison: Comparison, pieces: Sequence[str]) -> Table:
    title = (
        f"unread in this step, though a query would have given it {NOTICED_SHARE:.0%} or more (estimated, in a replay)"
    )
    table = Table("position", "text", "queries", title=title)
    lines = [piece.replace("\n", " ") for piece in pieces]
    for position, count in comparison.missing[:_POSITIONS]:
        text = Text("".join(lines[max(position - _AROUND, 0) : position]), style="dim")
        text.append(lines[position], style="bold not dim")
        text.append("".join(lines[position + 1 : position + 1 + _AROUND]))
        table.add_row(str(position), text, str(count))
    return table


def _as_json(comparison: Comparison, model: Model, pieces: Sequence[str]) -> dict[str, object]:
    at = comparison.at
    return {
        "verdict": comparison.verdict,
        "policy_text": _joined(comparison.policy_answer),
        "full_text": _joined(comparison.full_answer),
        "differs_at": at,
        "policy_top": None if at is None else _top_json(comparison.policy_answer[at], model),
        "full_top": None if at is None else _top_json(comparison.full_answer[at], model),
        "missing": [
            {"position": position, "token": pieces[position], "queries": count}
            for position, count in comparison.missing
        ],
        "note": comparison.note,
    }


def _top_json(token: Token, model: Model) -> list[dict[str, object]]:
    return [
        {"token": one, "text": model.decode([one]), "probability": probability}
        for one, probability in most_likely(token, _TOP)
    ]
