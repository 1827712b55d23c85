"""The protocol of a published benchmark: its files, the prompt of a row, the grade of an answer, the scores.

A benchmark reads its published files as they are. Its prompts are equal to lmms-eval's, and its verdicts to those of
its official script where that decides by rules (tests/evaluation/benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from fovea_gym.benchmarks.estimates import Estimate, estimate
from fovea_gym.graders.vqa_claim import found_answer

Row: TypeAlias = Mapping[str, object]
ACCURACY = "accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published figure of a model."""

    percent: float
    model: str
    source: str
    score: str = ACCURACY
    """Name of the score, as in `Benchmark.scores`."""


def of_qwen(percent: float, source: str = "hf.co/Qwen/Qwen2.5-VL-7B-Instruct") -> Published:
    """A published figure of Qwen2.5-VL 7B, from its model card unless another source is given."""
    return Published(percent=percent, model="Qwen2.5-VL-7B-Instruct", source=source)


class Benchmark(Protocol):
    """A published benchmark. Stateless: everything that a method needs is in its arguments."""

    name: str
    hub: str
    """Name of its data set on the Hugging Face hub."""
    files: tuple[str, ...]
    """Patterns of its files in a downloaded folder; the files of the first pattern that matches are read."""
    columns: tuple[str, ...]
    """Columns that every row has."""
    published: tuple[Published, ...]

    def rows(self, row: Row) -> Sequence[Row]:
        """The rows that a row of the files stands for: usually the row itself."""
        return (row,)

    def question(self, row: Row) -> str:
        """The text of the prompt; `<image>` marks the place of an image, and without marks the images come first."""
        ...

    def images(self, row: Row) -> list[object]:
        """The cells of the images."""
        return [row.get("decoded_image") or row.get("image")]

    def answer(self, row: Row) -> str:
        """The gold answer."""
        return str(row["answer"])

    def target(self, row: Row) -> str:
        """A response that is graded as right."""
        return self.answer(row)

    def kind(self, row: Row) -> str:
        """The question type of a row, by which accuracies are listed."""
        ...

    def is_right(self, row: Row, response: str) -> bool:
        """The verdict on a response."""
        ...

    def scores(self, graded: Iterable[tuple[Row, float]]) -> dict[str, Estimate]:
        """The scores by name, computed from all rows with their accuracies; the main score comes first."""
        return {ACCURACY: estimate([accuracy for _, accuracy in graded])}


def texts(cell: object) -> list[str]:
    """The items of a cell that holds a list, as texts; an empty list for any other cell."""
    return [str(each) for each in cell] if isinstance(cell, list | tuple) else []


def letters(options: Sequence[str]) -> str:
    """The letters of these options, such as `ABCD`."""
    return "".join(chr(ord("A") + place) for place in range(len(options)))


def lettered(options: Sequence[str], pattern: str) -> str:
    """The options on separate lines, each formatted by a pattern such as `({letter}) {option}`."""
    pairs = zip(letters(options), options, strict=True)
    return "\n".join(pattern.format(letter=letter, option=option) for letter, option in pairs)


def final_answer(response: str) -> str:
    """The answer at the end of a response, without the full stop; used where the official script asks GPT for it."""
    return found_answer(response).strip().removesuffix(".").strip("*$ ")
