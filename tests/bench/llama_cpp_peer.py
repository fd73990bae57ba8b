"""Decodes with llama.cpp (PyPI llama-cpp-python), on one thread with flash attention: the
peer of `heavywater-bench decode`, which starts it and reads and writes JSON lines.

request:  {"prompt": [token, ...], "blocks": number, "block_tokens": number}
answer:   {"prompt_seconds", "block_seconds": [...], "ids": [...]}: CPU time; most probable tokens

The first line that it writes is {"version"}, or {"missing"} where the package is not installed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

CHUNK_TOKENS = 512


def open_context(llama: Any, path: str, tokens: int) -> Any:
    return llama.Llama(
        model_path=path,
        n_ctx=tokens,
        n_batch=CHUNK_TOKENS,
        n_ubatch=CHUNK_TOKENS,
        n_threads=1,
        n_threads_batch=1,
        flash_attn=True,
        verbose=False,
    )


class Decoder:
    """Tokens in, the most probable next one out."""

    def __init__(self, llama: Any, model: Any) -> None:
        self.llama = llama
        self.context = model.ctx
        self.vocabulary = model.n_vocab()

    def feed(self, tokens: list[int]) -> None:
        for first in range(0, len(tokens), CHUNK_TOKENS):
            part = tokens[first : first + CHUNK_TOKENS]
            array = (self.llama.llama_token * len(part))(*part)
            if self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(array, len(part))) != 0:
                raise RuntimeError(f"llama_decode failed at token {first}")

    def best(self) -> int:
        import numpy

        logits = self.llama.llama_get_logits_ith(self.context, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())


def answer(llama: Any, path: str, request: dict[str, Any]) -> dict[str, Any]:
    new_tokens = request["blocks"] * request["block_tokens"]
    model = open_context(llama, path, len(request["prompt"]) + new_tokens)
    decoder = Decoder(llama, model)
    start = time.process_time()
    decoder.feed(request["prompt"])
    ids = [decoder.best()]
    prompt_seconds = time.process_time() - start
    block_seconds = []
    for _ in range(request["blocks"]):
        start = time.process_time()
        for _ in range(request["block_tokens"]):
            decoder.feed([ids[-1]])
            ids.append(decoder.best())
        block_seconds.append(time.process_time() - start)
    model.close()
    return {"prompt_seconds": prompt_seconds, "block_seconds": block_seconds, "ids": ids}


def main() -> None:
    path = sys.argv[1]
    try:
        import llama_cpp as llama
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    print(json.dumps({"version": llama.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llama, path, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
