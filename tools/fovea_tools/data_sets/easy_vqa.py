"""easy-VQA as files, from the package `easy-vqa`: each picture shows one coloured shape and has about ten questions.

The package's test images become the test split, and a tenth of its training images the dev split, so no held-out
question is about a training picture. All pictures of the package differ (tests/tools/data_sets/test_easy_vqa.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from fovea.utils.installing import pip_install
from fovea_gym.environments.base import Split
from fovea_gym.environments.dataset_prompts import IMAGE_MARK
from fovea_gym.errors import MissingExtraError
from fovea_gym.rows.writing import IMAGE_TYPE, image_cell, write_rows

try:
    import easy_vqa
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "easy-VQA's pictures and questions come from the package easy-vqa (3 MB), which is not installed; "
        f"{pip_install('talk')}"
    ) from error

Contents: TypeAlias = tuple[str, str]
"""Colour and shape in a picture."""
QuestionType: TypeAlias = Literal["colour", "shape", "presence", "absence"]
COLOURS = frozenset(("black", "blue", "brown", "gray", "green", "red", "teal", "yellow"))
SHAPES = frozenset(("circle", "rectangle", "triangle"))
_DEV_SHARE = 0.1
"""Share of training images in the dev split, and number of dev and of test rows relative to training rows."""
_STREAMS = {"train": 0, "dev": 1, "test": 2, "images": 3}
_TEXTS = ("problem", "answer", "question_type", "image_id")
_SCHEMA = pa.schema([("images", pa.list_(IMAGE_TYPE)), *((name, pa.string()) for name in _TEXTS)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of the package, unchanged, and its one-word answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EasyVqaPicture:
    """An image of 64x64 pixels with all of its questions."""

    id: str
    """`train/17` or `test/17`, with the package's number."""
    file: Path
    questions: tuple[Question, ...]

    @property
    def contents(self) -> Contents | None:
        """Colour and shape, if the questions that are not answered by yes or no tell both; else None."""
        words = [word for each in self.questions if _is_open(each) for word in _words(f"{each.text} {each.answer}")]
        colour = next((word for word in words if word in COLOURS), None)
        shape = next((word for word in words if word in SHAPES), None)
        return None if colour is None or shape is None else (colour, shape)


def write_easy_vqa(folder: Path, *, num_rows: int, seed: int) -> Iterator[Path]:
    """Write `train.parquet`, `dev.parquet` and `test.parquet`, equal for equal arguments; yield each when finished.

    There are at most `num_rows` training rows, and a tenth as many dev and test rows, in random order.
    """
    sizes = {"train": num_rows, "dev": _tenth(num_rows), "test": _tenth(num_rows)}
    for split, pictures in split_pictures(seed).items():
        asked = [(picture, question) for picture in pictures for question in picture.questions]
        order = np.random.default_rng([seed, _STREAMS[split]]).permutation(len(asked))[: sizes[split]]
        yield write_rows(folder / f"{split}.parquet", _SCHEMA, (_row(*asked[index]) for index in order))


def split_pictures(seed: int) -> Mapping[Split, Sequence[EasyVqaPicture]]:
    """The pictures of each split; `seed` decides which training pictures are in the dev split."""
    test = _pictures("test", easy_vqa.get_test_image_paths(), easy_vqa.get_test_questions())
    given = _pictures("train", easy_vqa.get_train_image_paths(), easy_vqa.get_train_questions())
    order = np.random.default_rng([seed, _STREAMS["images"]]).permutation(len(given))
    shuffled, num_dev = [given[index] for index in order], _tenth(len(given))
    return {"train": shuffled[num_dev:], "dev": shuffled[:num_dev], "test": test}


def question_type(question: Question) -> QuestionType:
    """The type of a question; `absence` if yes means that something is not there."""
    words = _words(question.text)
    if _is_open(question):
        return "colour" if "color" in words else "shape"
    return "absence" if {"no", "not"} & set(words) else "presence"


def _pictures(
    part: str, files: Mapping[int, str], questions: tuple[Sequence[str], Sequence[str], Sequence[int]]
) -> list[EasyVqaPicture]:
    """The pictures of one part of the package that have questions, in order of their numbers."""
    asked: dict[int, list[Question]] = {}
    for text, answer, number in zip(*questions, strict=True):
        asked.setdefault(number, []).append(Question(text=text, answer=answer))
    return [
        EasyVqaPicture(id=f"{part}/{number}", file=Path(files[number]), questions=tuple(asked[number]))
        for number in sorted(asked)
    ]


def _row(picture: EasyVqaPicture, question: Question) -> dict[str, object]:
    return {
        "images": [image_cell(picture.file.read_bytes())],
        "problem": f"{IMAGE_MARK}{question.text}",
        "answer": question.answer,
        "question_type": question_type(question),
        "image_id": picture.id,
    }


def _is_open(question: Question) -> bool:
    return question.answer not in ("yes", "no")


def _words(text: str) -> list[str]:
    return text.replace("?", "").split()


def _tenth(count: int) -> int:
    return max(int(count * _DEV_SHARE), 1)
