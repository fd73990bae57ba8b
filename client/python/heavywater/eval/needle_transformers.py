"""`eval needle` through Transformers: the same questions to a model around heavywater.hf, in this process.

Needs torch and transformers, as heavywater.hf does: import it only where they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import heavywater.hf
from heavywater.eval.haystack import CODE_DIGITS, Needle
from heavywater.eval.needle import Answer, NeedleResult
from heavywater.eval.rows import Row
from heavywater.hf.attach import cache_argument
from heavywater.hf.cache import HeavywaterCache
from heavywater.hf.models import kv_heads
from heavywater.model import Model
from heavywater.v1 import common_pb2, generation_pb2


@dataclass(frozen=True)
class _TokenizedModel(Model):
    """As a server tells of its model; its tokenizer is the one that Transformers has loaded."""

    loaded: Any = None

    @cached_property
    def tokenizer(self) -> Any:
        return self.loaded


def load(path: Path) -> tuple[Any, Model]:
    """A GGUF file or a checkpoint's folder in float32: the model, and what texts are made with."""
    where = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = transformers.AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(where[0], **where[1])
    return model.eval(), described(tokenizer, path.name)


def described(tokenizer: Any, name: str) -> Model:
    """What a server would tell of a model with this tokenizer (of Transformers)."""
    begins, ends = tokenizer.bos_token_id, tokenizer.eos_token_id
    info = generation_pb2.ModelInfo(
        name=name,
        vocab_size=len(tokenizer),
        chat_template=tokenizer.chat_template or "",
        bos_token=-1 if begins is None else begins,
        eos_token=-1 if ends is None else ends,
        add_bos=begins is not None and tokenizer("")["input_ids"][:1] == [begins],
    )
    pieces = tuple(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    return _TokenizedModel(info, pieces, (), (), loaded=tokenizer.backend_tokenizer)


def attach_arguments(options: common_pb2.PolicyOptions) -> dict[str, Any]:
    """What asks heavywater.hf.attach() for what `options` ask a server for."""
    given: dict[str, Any] = {field.name: value for field, value in options.ListFields()}
    if given.pop("recall_all", False):
        given["recall"] = "all"
    if "recall_min_share" in given:
        given["min_share"] = given.pop("recall_min_share")
    return given


class TransformersNeedles:
    """Asks for every needle under a row's policy, one after the other."""

    def __init__(
        self, model: Any, texts: Model, needles: Sequence[Needle], *, on_answer: Callable[[], None] = lambda: None
    ) -> None:
        """`model` and `texts` as load() returns them."""
        self._model = model
        self._texts = texts
        self._needles = needles
        self._on_answer = on_answer

    def run(self, row: Row, question_after: bool) -> NeedleResult:
        """`question_after`: the text is compressed before the question comes, as a second turn."""
        return NeedleResult(row, question_after, [self._ask(row, needle, question_after) for needle in self._needles])

    def _ask(self, row: Row, needle: Needle, question_after: bool) -> Answer:
        tokens = [*needle.context, *needle.question]
        prompt = len(needle.context) if question_after else len(tokens)
        options = attach_arguments(row.options(prompt))
        cache = heavywater.hf.attach(self._model, max_tokens=len(tokens) + CODE_DIGITS, **options)
        got = self._answer(torch.tensor([tokens]), cache, first_turn=prompt)
        answer = self._answered(row, needle, got, cache)
        cache.reset()
        self._on_answer()
        return answer

    def _answer(self, ids: Any, cache: HeavywaterCache, first_turn: int) -> str:
        """The greedy tokens after `ids`, [1][tokens], of which the first `first_turn` are compressed alone."""
        argument = {cache_argument(type(self._model)): cache}
        if first_turn < ids.shape[1]:
            with torch.inference_mode():
                self._model(ids[:, :first_turn], logits_to_keep=1, **argument)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=CODE_DIGITS,
            min_new_tokens=CODE_DIGITS,
            do_sample=False,
            **argument,
        )
        return self._texts.decode(out[0, ids.shape[1] :].tolist())

    def _answered(self, row: Row, needle: Needle, got: str, cache: HeavywaterCache) -> Answer:
        sequence = cache.rows.rows[0]
        stats = sequence.engine.stats(sequence.sequence)
        if row.recall is not None and stats.tokens_dropped > 0:
            raise RuntimeError(f"{row.name}: {stats.tokens_dropped} tokens were dropped, so recall could not read them")
        config = self._model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * kv_heads(config) * size * torch.float32.itemsize
        resident = None
        if got != needle.code and row.budget is not None:
            kept = [np.isin(np.array(needle.positions), one.positions).sum() for one in cache.kept()]
            resident = float(np.mean(kept))
        recall = common_pb2.RecallCounts(
            queries=stats.recall_queries, reads=stats.recall_reads, reads_max=stats.recall_reads_max
        )
        return Answer(needle, got, cache.stats().kv_bytes, token_bytes * stats.tokens_seen, recall, resident)
