"""CIDEr-D: the TF-IDF-weighted n-gram similarity of a caption and its references.

Vedantam et al., arXiv 1411.5726, sections 4 and 5: n-grams of 1 to 4 words weighted by TF-IDF, a cosine whose
counts are clipped to the reference's, a Gaussian penalty (sigma 6) on the difference in length, times 10. As in
the authors' evaluation code, TF is the plain count. Words are runs of letters and digits in lower case; that code
uses the Penn Treebank tokenizer, which differs in contractions and hyphens.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

MAX_N = 4
SIGMA = 6.0
SCALE = 10.0
IDF_ROWS = 20_000
"""Rows whose references give the document frequencies: enough for rare words; more would only take memory."""
_WORD = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}-]\w+)*")

_Ngram: TypeAlias = tuple[str, ...]
_Vectors: TypeAlias = list[dict[_Ngram, float]]
"""The TF-IDF vectors of a caption, one for each n."""


def words_of(text: str) -> list[str]:
    """The words of a caption: [a, dog's, ball] in `A dog's ball.`"""
    return _WORD.findall(text.casefold())


class CiderD:
    """The metric with the document frequencies of one set of references."""

    def __init__(self, reference_sets: Iterable[Sequence[str]]) -> None:
        """`reference_sets` holds the references of each image; an n-gram counts once for an image."""
        self._frequencies: Counter[_Ngram] = Counter()
        num_images = 0
        for references in reference_sets:
            num_images += 1
            self._frequencies.update({ngram for text in references for ngram in _ngrams(words_of(text))})
        self._log_num_images = math.log(max(num_images, 1))

    def score(self, caption: str, references: Sequence[str]) -> float:
        """The mean over the references, 0..10: 10 for a single reference itself, if no n-gram is in every image's."""
        given = words_of(caption)
        vectors = self._vectors(given)
        scores = []
        for reference in references:
            words = words_of(reference)
            penalty = math.exp(-((len(given) - len(words)) ** 2) / (2 * SIGMA**2))
            pairs = zip(vectors, self._vectors(words), strict=True)
            scores.append(penalty * sum(_clipped_cosine(one, other) for one, other in pairs) / MAX_N)
        return SCALE * sum(scores) / len(scores) if scores else 0.0

    def _vectors(self, words: Sequence[str]) -> _Vectors:
        vectors: _Vectors = [{} for _ in range(MAX_N)]
        for ngram, count in Counter(_ngrams(words)).items():
            vectors[len(ngram) - 1][ngram] = count * self._idf(ngram)
        return vectors

    def _idf(self, ngram: _Ngram) -> float:
        """The inverse document frequency; an n-gram that no reference has counts as one of a single image."""
        return self._log_num_images - math.log(max(self._frequencies[ngram], 1))


def _ngrams(words: Sequence[str]) -> list[_Ngram]:
    return [tuple(words[start : start + n]) for n in range(1, MAX_N + 1) for start in range(len(words) - n + 1)]


def _clipped_cosine(given: dict[_Ngram, float], reference: dict[_Ngram, float]) -> float:
    product = sum(min(weight, reference.get(ngram, 0.0)) * reference.get(ngram, 0.0) for ngram, weight in given.items())
    norms = math.hypot(*given.values()) * math.hypot(*reference.values())
    return product / norms if norms else 0.0
