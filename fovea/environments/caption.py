"""Descriptions of images: compared with references, judged by a model, or both.

A metric is between 0 and 1, and 1 is what a reference itself gets: CIDEr-D is divided by the score of the true
answer (its plain value is the part `cider_d`), chrF and BLEU by 100. A judge's scores are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Protocol

from PIL.Image import Image
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from fovea.config.environments import CaptionMetric
from fovea.config.run import CaptionEnvironment
from fovea.data.images import OpenImage
from fovea.data.rows import RowAccess
from fovea.environments.base import Split
from fovea.environments.dataset_prompts import IMAGE_MARK, plain_answer
from fovea.environments.dataset_tasks import ANSWER_KEYS, FileTasks
from fovea.environments.graders.base import Grade, shown
from fovea.environments.graders.cider import CiderD, words_of
from fovea.errors import DataError
from fovea.types import Message, Score, Task, Turn

MAX_CHARS = 10_000
"""Of a caption that is compared; n-grams beyond would only cost time."""
_CHRF, _BLEU = CHRF(), BLEU(effective_order=True)


class SeesImages(Protocol):
    """`judge.JudgeClient`, or a stand-in."""

    def score(self, images: Sequence[Image], question: str, answer: str, references: Sequence[str]) -> float: ...


class ReadsText(Protocol):
    """`reward_model.RewardScorer`, or a stand-in."""

    def score(self, question: str, answer: str) -> float: ...


class Caption:
    """The environment `caption` without a model that scores; see `config.CaptionEnvironment`."""

    def __init__(
        self,
        config: CaptionEnvironment,
        reward_model: ReadsText | None = None,
        access: RowAccess | None = None,
    ) -> None:
        self._config = config
        self._reward_model = reward_model
        self._files = FileTasks(config, access, read_answer=first_caption)
        self._lock = Lock()

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._files.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self._files.prompt(task)

    def target(self, task: Task) -> str:
        return task.answer

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return self.weighed(self.parts(task, caption_of(turns[-1].text)))

    def parts(self, task: Task, caption: str) -> dict[str, float]:
        """The metrics that need no judge, and CIDEr-D's plain value."""
        references, metrics = self.references(task), self._config.metric_weights
        parts: dict[str, float] = {}
        if "cider" in metrics:
            parts |= cider_parts(self._cider(task), caption, references)
        parts |= {name: score(caption, references) for name, score in OVERLAPS.items() if name in metrics}
        if self._reward_model is not None:
            parts["reward_model"] = self._reward_model.score(question_of(task), caption)
        return parts

    def weighed(self, parts: Mapping[str, float]) -> Score:
        """The mean of the metrics by their weights."""
        weights: Mapping[CaptionMetric, float] = self._config.metric_weights
        reward = sum(weight * parts[name] for name, weight in weights.items()) / sum(weights.values())
        return Score(reward=reward, accuracy=reward, parts=parts)

    def references(self, task: Task) -> list[str]:
        """All references of a task's image, the true answer first."""
        cell = self._reference_cell(task)
        return list(dict.fromkeys([task.answer, *(captions_of(cell, task.id) if cell is not None else [])]))

    def _reference_cell(self, task: Task) -> object:
        """Of the column that holds them; without one, an answer that is a list is all of them."""
        if self._config.references_key is not None:
            return task.row.get(self._config.references_key)
        cell = task.row.get(self._config.answer_key or ANSWER_KEYS[0])
        return cell if isinstance(cell, list | tuple) else None

    def _cider(self, task: Task) -> CiderD:
        with self._lock:
            return self._train_cider if task.id.startswith("train/") else self._test_cider

    @cached_property
    def _train_cider(self) -> CiderD:
        return CiderD(self._reference_sets("train"))

    @cached_property
    def _test_cider(self) -> CiderD:
        return CiderD(self._reference_sets("test"))

    def _reference_sets(self, split: Split) -> Iterator[list[str]]:
        tasks = self.tasks(split)
        for index in range(min(len(tasks), self._config.idf_rows)):
            try:
                references = self.references(tasks[index])
            except DataError:
                continue  # a bad row is counted when the run comes to it
            yield references


class JudgedCaption:
    """The environment `caption` with a judge, for which scoring waits (`base.WaitsToScore`)."""

    def __init__(self, caption: Caption, judge: SeesImages, open_image: OpenImage, *, scores_at_once: int) -> None:
        self._caption = caption
        self._judge = judge
        self._open_image = open_image
        self._scores_at_once = scores_at_once

    @property
    def scores_at_once(self) -> int:
        return self._scores_at_once

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._caption.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self._caption.prompt(task)

    def target(self, task: Task) -> str:
        return self._caption.target(task)

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """ScoreError or UnscoredError when the judge gives none."""
        caption = caption_of(turns[-1].text)
        images = [self._open_image(ref) for ref in task.images]
        judged = self._judge.score(images, question_of(task), caption, self._caption.references(task))
        return self._caption.weighed(self._caption.parts(task, caption) | {"judge": judged})


def grade(prediction: str, truth: str | Sequence[str], *, cider: CiderD | None = None) -> Grade:
    """A response against one reference or several.

    The score is CIDEr-D where `cider` knows how rare words are (from all references of a file), else chrF.
    """
    references = [truth] if isinstance(truth, str) else list(truth)
    caption = caption_of(prediction)
    parts = {name: score(caption, references) for name, score in OVERLAPS.items()}
    if cider is not None:
        parts |= cider_parts(cider, caption, references)
    name = "chrf" if cider is None else "cider"
    figures = ", ".join(f"{part} {value:.3g}" for part, value in parts.items())
    return Grade(score=parts[name], parts=parts, reason=f"{shown(caption)}: {figures}; the score is {name}")


def cider_parts(cider: CiderD, caption: str, references: Sequence[str]) -> dict[str, float]:
    """CIDEr-D as a share of what the first reference scores among all, at most 1, and its plain value."""
    plain, of_reference = cider.score(caption, references), cider.score(references[0], references)
    if of_reference == 0:  # every word of the reference is in every image's: all that is left is equality
        return {"cider": float(words_of(caption) == words_of(references[0])), "cider_d": plain}
    return {"cider": min(plain / of_reference, 1.0), "cider_d": plain}


def chrf(caption: str, references: Sequence[str]) -> float:
    """The F-score of character n-grams, of the best reference (Popovic, W15-3049), by sacrebleu."""
    return _share(_CHRF.sentence_score(caption, references).score)


def bleu(caption: str, references: Sequence[str]) -> float:
    """BLEU of one sentence, smoothed, of at most as many orders as it has words (Papineni, P02-1040), by sacrebleu."""
    return _share(_BLEU.sentence_score(caption, references).score)


OVERLAPS: Mapping[str, Callable[[str, Sequence[str]], float]] = {"chrf": chrf, "bleu": bleu}


def _share(percent: float) -> float:
    # products of logarithms make 100.00000000000004 of a perfect match
    return min(max(round(percent / 100, 12), 0.0), 1.0)


def first_caption(cell: object, where: str) -> str:
    """The true answer of a cell with one caption, or the first of several."""
    return captions_of(cell, where)[0] if isinstance(cell, list | tuple) and cell else plain_answer(cell, where)


def captions_of(cell: object, where: str) -> list[str]:
    """The captions of a cell: a text, or a list of texts or of {caption}."""
    several = cell if isinstance(cell, list | tuple) else [cell]
    return [plain_answer(one.get("caption") if isinstance(one, Mapping) else one, where) for one in several]


def caption_of(response: str) -> str:
    """All that follows the reasoning."""
    return response.rpartition("</think>")[2].strip()[:MAX_CHARS]


def question_of(task: Task) -> str:
    """The question without its image marks."""
    return task.question.replace(IMAGE_MARK, "").strip()
