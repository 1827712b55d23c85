"""CIDEr-D against numbers by hand and against the authors' evaluation code."""

from __future__ import annotations

import math
import random

import pytest

from fovea.environments.graders.cider import CiderD, words_of

REFERENCES = [
    ["a red dog runs on the green grass", "the dog runs on grass"],
    ["two cats sleep on a warm bed", "a cat and a cat on a bed", "two sleeping cats"],
    ["a man rides a bike down the busy street", "a cyclist in the street"],
    ["a green ball on the grass"],
]
CAPTIONS = ["a red dog runs on the grass", "two cats sleep on a bed on a bed on a bed", "a man rides a horse", "ball"]
# of pycocoevalcap 1.2, CiderScorer(n=4, sigma=6.0), on the rows above
PUBLISHED = [5.64174275, 1.1413488, 1.72675303, 1.40273034]


def test_by_hand() -> None:
    """Two images, one reference each; `a` is in both, so that its IDF is log(2/2) = 0."""
    cider = CiderD([["a cat"], ["a dog"]])
    # cosine 1 for words and pairs; no longer n-grams
    assert cider.score("a cat", ["a cat"]) == pytest.approx(10 * 2 / 4)
    # words: only `cat` weighs, clipped from 2 to 1: (1 * 1) / (2 * 1); one word more. Pairs: both of `a cat, cat cat`
    # weigh log 2 (`cat cat` is nowhere, which counts as once)
    expected = 10 * math.exp(-1 / (2 * 36)) * (1 / 2 + 1 / math.sqrt(2)) / 4
    assert cider.score("a cat cat", ["a cat"]) == pytest.approx(expected)
    assert cider.score("dog", ["a cat"]) == 0
    assert cider.score("", ["a cat"]) == cider.score("a cat", [""]) == 0
    assert cider.score("a cat", []) == 0


def test_the_published_code_gives_the_same() -> None:
    cider = CiderD(REFERENCES)
    scores = [cider.score(caption, references) for caption, references in zip(CAPTIONS, REFERENCES, strict=True)]
    assert scores == pytest.approx(PUBLISHED, abs=1e-7)


def test_the_published_code_gives_the_same_on_random_texts() -> None:
    published = pytest.importorskip("pycocoevalcap.cider.cider_scorer", reason="pycocoevalcap is not installed")
    rng = random.Random(0)

    def text(most: int) -> str:
        return " ".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, most)))

    references = [[text(12) for _ in range(rng.randint(1, 5))] for _ in range(200)]
    captions = [text(14) for _ in references]
    scorer = published.CiderScorer(n=4, sigma=6.0)
    for caption, own in zip(captions, references, strict=True):
        scorer += (caption, own)
    cider = CiderD(references)
    own_scores = [cider.score(caption, own) for caption, own in zip(captions, references, strict=True)]
    assert own_scores == pytest.approx(list(scorer.compute_score()[1]), abs=1e-9)


def test_words() -> None:
    assert words_of("A dog's  BALL, well-worn (2)!") == ["a", "dog's", "ball", "well-worn", "2"]
