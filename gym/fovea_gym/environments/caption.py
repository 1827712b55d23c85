"""Descriptions of images: compared with references, judged by a model, or both.

Metrics are scaled to 0..1, where 1 is the score of a reference itself: CIDEr-D is divided by the score of the true
answer (the unscaled value is the part `cider_d`), chrF and BLEU by 100. A judge has a separate scale.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import TypeAlias, cast

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from fovea_gym.environments.base import Split
from fovea_gym.environments.dataset_prompts import plain_answer, question_of
from fovea_gym.environments.dataset_tasks import FileTasks
from fovea_gym.errors import DataError
from fovea_gym.graders.base import Grade, Grader, shown
from fovea_gym.graders.grading import Grading, LimitedCalls
from fovea_gym.graders.judge import CAPTION_PROMPT, JudgeClient, limits_of
from fovea_gym.graders.reward_models import JudgeScores, ScoresAnswers
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import OpenImage
from fovea_gym.settings.environments import CaptionEnvironment, CaptionMetric
from fovea_gym.settings.rewards import Judge
from fovea_gym.settings.splits import ANSWER_KEYS
from fovea_gym.types import Score, Task, Turn

MAX_CHARS = 10_000
"""The length to which a caption is cut before it is compared; more n-grams would only cost time."""
MAX_N = 4
SIGMA = 6.0
SCALE = 10.0
IDF_ROWS = 20_000
"""Most rows that count towards the document frequencies: enough for rare words; more would only take memory."""
_WORD = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}-]\w+)*")

_Ngram: TypeAlias = tuple[str, ...]
_Vectors: TypeAlias = list[dict[_Ngram, float]]
"""The TF-IDF vectors of a caption, one for each n."""
_CHRF, _BLEU = CHRF(), BLEU(effective_order=True)


class Caption(FileTasks):
    """The environment `caption`, whose settings are `CaptionEnvironment`."""

    def __init__(
        self,
        config: CaptionEnvironment,
        access: RowAccess,
        *,
        reward_model: ScoresAnswers | None = None,
        judge: Judge | None = None,
        open_image: OpenImage | None = None,
    ) -> None:
        """`open_image` opens the pictures that the judge sees."""
        super().__init__(config, access, read_answer=first_caption)
        self._metrics = CaptionGrader(config, self.tasks, reward_model)
        self._judge = judge
        self._open_image = open_image
        self.graders = (self._metrics,)

    def grading(self) -> Grading:
        """The grader of the metrics and the judge's score, with the limits of the judge's calls."""
        if self._judge is None:
            return super().grading()
        assert self._open_image is not None, "a judge sees the pictures"
        client = JudgeClient(self._judge, CAPTION_PROMPT)
        opinion = JudgeScores(client.score, self._open_image, self._metrics.references)
        grader, calls = JudgedCaptionGrader(self._metrics, opinion), LimitedCalls(limits_of(self._judge))
        return Grading(graders=(grader,), calls=calls, clients=(client,))


class CaptionGrader:
    """The grader of `caption` without a judge."""

    def __init__(
        self,
        config: CaptionEnvironment,
        tasks: Callable[[Split], Sequence[Task]],
        reward_model: ScoresAnswers | None = None,
    ) -> None:
        """`tasks` returns the rows of a split, whose references give the document frequencies."""
        self._config = config
        self._tasks = tasks
        self._reward_model = reward_model
        self._cider_of_split: dict[str, CiderD] = {}
        self._lock = Lock()

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return self.weighted(self.parts(task, caption_of(turns[-1].text)))

    def parts(self, task: Task, caption: str) -> dict[str, float]:
        """The metrics that need no judge, and CIDEr-D's unscaled value."""
        references, metrics = self.references(task), self._config.metric_weights
        parts: dict[str, float] = {}
        if "cider" in metrics:
            parts |= cider_parts(self._cider(task), caption, references)
        parts |= {name: score(caption, references) for name, score in OVERLAPS.items() if name in metrics}
        if self._reward_model is not None:
            parts["reward_model"] = self._reward_model.score(question_of(task), caption, ())
        return parts

    def weighted(self, parts: Mapping[str, float]) -> Score:
        """The score of an answer: the weighted mean of its metrics."""
        weights: Mapping[CaptionMetric, float] = self._config.metric_weights
        reward = sum(weight * parts[name] for name, weight in weights.items()) / sum(weights.values())
        return Score(reward=reward, accuracy=reward, parts=parts)

    def references(self, task: Task) -> list[str]:
        """The references of a task's image, repetitions included, from their column or from an answer with a list."""
        key = self._config.references_key
        cell = task.row.get(key or self._config.answer_key or ANSWER_KEYS[0])
        is_there = cell is not None if key else isinstance(cell, list | tuple)
        captions = captions_of(cell, task.id) if is_there else []
        return captions if task.answer in captions else [task.answer, *captions]

    def _cider(self, task: Task) -> CiderD:
        """CIDEr-D with the document frequencies of the task's own split, so that test rows do not affect dev scores."""
        split = task.id.partition("/")[0]
        with self._lock:
            if split not in self._cider_of_split:
                self._cider_of_split[split] = CiderD(self._reference_sets(cast(Split, split)))
            return self._cider_of_split[split]

    def _reference_sets(self, split: Split) -> Iterator[list[str]]:
        tasks = self._tasks(split)
        for index in range(min(len(tasks), IDF_ROWS)):
            with suppress(DataError):  # bad rows are counted when the run reaches them
                yield self.references(tasks[index])


class JudgedCaptionGrader:
    """The grader of `caption` with a judge: the metrics of a `CaptionGrader`, and the judge's score."""

    def __init__(self, metrics: CaptionGrader, judge: Grader) -> None:
        self._metrics = metrics
        self._judge = judge

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """The weighted metrics and the judge's score; NoScoreError if the judge gives none."""
        caption = replace(turns[-1], text=caption_of(turns[-1].text))
        # in a thread, so that the metrics do not delay the replies to other calls
        parts = await asyncio.to_thread(self._metrics.parts, task, caption.text)
        judged = await self._judge.score(task, [caption])
        return self._metrics.weighted(parts | {"judge": judged.reward})


def grade(prediction: str, truth: str | Sequence[str], *, cider: CiderD | None = None) -> Grade:
    """Grade a response against references: by CIDEr-D if `cider`, with document frequencies, is given, else by chrF."""
    references = [truth] if isinstance(truth, str) else list(truth)
    caption = caption_of(prediction)
    parts = {name: score(caption, references) for name, score in OVERLAPS.items()}
    if cider is not None:
        parts |= cider_parts(cider, caption, references)
    name = "chrf" if cider is None else "cider"
    figures = ", ".join(f"{part} {value:.3g}" for part, value in parts.items())
    return Grade(score=parts[name], parts=parts, reason=f"{shown(caption)}: {figures}; the score is {name}")


def cider_parts(cider: CiderD, caption: str, references: Sequence[str]) -> dict[str, float]:
    """CIDEr-D divided by the score of the first reference, at most 1, and the unscaled value."""
    plain, of_reference = cider.score(caption, references), cider.score(references[0], references)
    if of_reference == 0:  # all words of the reference are in every image's references: score equality instead
        return {"cider": float(words_of(caption) == words_of(references[0])), "cider_d": plain}
    return {"cider": min(plain / of_reference, 1.0), "cider_d": plain}


def chrf(caption: str, references: Sequence[str]) -> float:
    """The character n-gram F-score with the best reference (Popovic, W15-3049), by sacrebleu."""
    return _share(_CHRF.sentence_score(caption, references).score)


def bleu(caption: str, references: Sequence[str]) -> float:
    """Smoothed sentence BLEU, with an order of at most the number of words (Papineni, P02-1040), by sacrebleu."""
    return _share(_BLEU.sentence_score(caption, references).score)


OVERLAPS: Mapping[str, Callable[[str, Sequence[str]], float]] = {"chrf": chrf, "bleu": bleu}


def _share(percent: float) -> float:
    # sacrebleu computes with logarithms, so a perfect match gives 100.00000000000004
    return min(max(round(percent / 100, 12), 0.0), 1.0)


def first_caption(cell: object, where: str) -> str:
    """The true answer of a cell with one caption, or the first of several."""
    return captions_of(cell, where)[0] if isinstance(cell, list | tuple) and cell else plain_answer(cell, where)


def captions_of(cell: object, where: str) -> list[str]:
    """The captions of a cell: a text, or a list of texts or of {caption}."""
    several = cell if isinstance(cell, list | tuple) else [cell]
    return [plain_answer(one.get("caption") if isinstance(one, Mapping) else one, where) for one in several]


def caption_of(response: str) -> str:
    """The caption in a response: the text after the reasoning."""
    return response.rpartition("</think>")[2].strip()[:MAX_CHARS]


def words_of(text: str) -> list[str]:
    """The words of a caption: [a, dog's, ball] in `A dog's ball.`"""
    return _WORD.findall(text.casefold())


class CiderD:
    """The metric CIDEr-D, with the document frequencies of one set of references.

    Vedantam et al., arXiv 1411.5726, sections 4 and 5: n-grams of 1 to 4 words weighted by TF-IDF, a cosine whose
    counts are clipped to the reference's, a Gaussian penalty (sigma 6) on the difference in length, times 10. As in
    the authors' evaluation code, TF is the plain count. Words are runs of letters and digits in lower case; that code
    uses the Penn Treebank tokenizer, which differs in contractions and hyphens.
    """

    def __init__(self, reference_sets: Iterable[Sequence[str]]) -> None:
        """`reference_sets` holds the references of each image; an n-gram counts once per image."""
        self._frequencies: Counter[_Ngram] = Counter()
        num_images = 0
        for references in reference_sets:
            num_images += 1
            self._frequencies.update({ngram for text in references for ngram in _ngrams(words_of(text))})
        self._log_num_images = math.log(max(num_images, 1))

    def score(self, caption: str, references: Sequence[str]) -> float:
        """The mean over the references, 0..10: a sole reference scores 10 if none of its n-grams is in all images."""
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
        """The inverse document frequency; an n-gram that is in no reference counts as if one image had it."""
        return self._log_num_images - math.log(max(self._frequencies[ngram], 1))


def _ngrams(words: Sequence[str]) -> list[_Ngram]:
    return [tuple(words[start : start + n]) for n in range(1, MAX_N + 1) for start in range(len(words) - n + 1)]


def _clipped_cosine(given: dict[_Ngram, float], reference: dict[_Ngram, float]) -> float:
    product = sum(min(weight, reference.get(ngram, 0.0)) * reference.get(ngram, 0.0) for ngram, weight in given.items())
    norms = math.hypot(*given.values()) * math.hypot(*reference.values())
    return product / norms if norms else 0.0
