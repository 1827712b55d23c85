"""The tokenizer of a tiny model, trained on texts that anybody may have written."""

from __future__ import annotations

import random
import subprocess
import sys

from fovea.models.tiny import MAX_CORPUS_CHARS, MAX_TEXT_CHARS, build_tokenizer

CORPUS = ["How many circles are there?", "What colour is the square?", "red", "blue"] * 20
TRAIN = """
import random
from fovea.models.tiny import build_tokenizer
word = "".join(random.Random(0).choices("abcdefghij", k=1_000_000))
print(len(build_tokenizer(["How many circles are there?", word], 2000)))
"""


def test_a_row_of_a_megabyte_without_spaces_is_no_hang() -> None:
    """In a process of its own, since nothing else could end a trainer that hangs."""
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=False, timeout=100)
    assert int(done.stdout) > 300, done.stderr


def test_only_the_starts_of_texts_are_trained_on() -> None:
    tail = "".join(random.Random(1).choices("vwxyz", k=100))
    long = [*CORPUS, "a" * MAX_TEXT_CHARS + tail * 30]
    cut = [*CORPUS, "a" * MAX_TEXT_CHARS]
    assert build_tokenizer(long, 400).get_vocab() == build_tokenizer(cut, 400).get_vocab()
    filled = ["b " * (MAX_TEXT_CHARS // 2)] * (MAX_CORPUS_CHARS // MAX_TEXT_CHARS)
    assert build_tokenizer([*filled, *CORPUS], 400).get_vocab() == build_tokenizer(filled, 400).get_vocab()
    assert build_tokenizer(CORPUS, 400).decode(build_tokenizer(CORPUS, 400).encode(tail)) == tail
