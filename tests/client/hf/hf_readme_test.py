"""The README's lines for Transformers, and those of docs/transformers.md, run as they are written."""

import re
from pathlib import Path

import pytest
import transformers
from hf_models import prompt, tiny
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[3]


def blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    # torchrun's lines and those that want a cache service have tests of their own.
    return [code for code in found if "heavywater.hf" in code and "torchrun" not in code and "service=" not in code]


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny Llama and a tokenizer of letters."""
    tiny("llama").save_pretrained(tmp_path)
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(" abcdefghijklmnopqrstuvwxyz")}, " "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=" ").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", ["README.md", "docs/transformers.md"])
def test_the_lines_run_as_written(document, checkpoint, capsys):
    names = {
        "NAME_OR_PATH": str(checkpoint),
        "model": tiny("llama"),
        "text": "the quick brown fox jumps over the lazy dog " * 7,
        "inputs": {"input_ids": prompt(300)},
    }
    code = blocks(document)
    assert code
    for lines in code:
        exec(lines, names)
    assert names["model"].last_cache.stats().tokens_dropped > 200  # the last lines are the paper's form
    if document == "docs/transformers.md":
        assert "tokens_demoted=" in capsys.readouterr().out
