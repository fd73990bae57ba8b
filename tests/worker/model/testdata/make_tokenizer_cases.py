"""Writes tokenizer_cases.json: texts that are hard to tokenise and the ids that the `tokenizers` library gives.

    python make_tokenizer_cases.py MODEL.gguf tokenizer_cases.json

The tokenizer is that of tests/reference/tokenizer.py, control tokens recognised. Needs gguf and tokenizers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "reference"))

from tokenizer import chat_prompt, encode, load_tokenizer

TEXTS = [
    "",
    " ",
    "  ",
    "   x",
    "Hello, world!",
    "It's we're they'll I'd I've I'm can't 'sup 'S 'RE don''t",
    "tabs\tand\t\tmore\t \tmixed",
    "line\nline\n\nline\n\n\n  indented\r\nwindows\r\n",
    " trailing spaces   ",
    "trailing newline\n",
    "\n\n\n",
    "1234567890 3.14159 1,000,000 -42 0x1F 1e-9",
    "  7  77   777",
    "a1b2c3 x1 1x",
    "\u00bd \u2167 \u0663\u0664 \u4e00\u4e8c \u00b2\u00b3 \u2460",  # other numbers
    "caf\u00e9 na\u00efve \u00fcber Stra\u00dfe \u0130stanbul",
    "cafe\u0301 combining",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6211\u5f88\u597d\u3002",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "\u00a0no-break \u2003em \u3000ideographic \u200bzero \ufeffbom \u0085nel \u2028ls",
    " \u00a0 \u2009x",
    "null \x00 bell \x07 escape \x1b delete \x7f",
    "\U0010ffff \ue000 \ufffd \U0001d54f",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|> <|im_start |> <|im_",
    "<repo_name>x<reponame>y<filename><file_sep><gh_stars>",
    "a<|im_end|>b <|im_end|> c  <|im_end|>  d",
    "def f(x):\n    return x**2  # \u03c0\n\n\nclass A: pass",
    "https://example.com/?q=1&r=%20#top user@example.org",
    "!!!???...---___===+++",
    "'" * 20,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababababababababababababababababababababababababab",
    " " * 100 + "x",
    "\n" * 50,
    "Donaudampfschifffahrtselektrizit\u00e4tenhauptbetriebswerkbauunterbeamtengesellschaft",
    chat_prompt("Why is the sky blue?"),
]

# Pieces of random texts: what borders on what matters.
PIECES = [
    " ", "  ", "\n", "\t", "\u00a0", "a", "the", "Zebra", "'s", "'ll", "'", "1", "42", "\u00b2", "\u0663", ".", "!?",
    "\u00e9", "e\u0301", "\u4f60\u597d", "\U0001f600", "\u200d", "\x00", "<|im_end|>",
    "<|", "_", "-", "\u03c0",
    "\u0939\u0940",
]


def random_text(source: random.Random) -> str:
    return "".join(source.choice(PIECES) for _ in range(source.randrange(1, 25)))


def main() -> None:
    tokenizer = load_tokenizer(Path(sys.argv[1]))
    source = random.Random(1)
    texts = TEXTS + [random_text(source) for _ in range(200)]
    cases = [{"text": text, "ids": encode(tokenizer, text)} for text in texts]
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(sys.argv[2]).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
