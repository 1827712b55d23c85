"""Makes occlusion maps of answers, as pictures and as numbers, and stores them with their run."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fovea.commands.evaluate import EvalSet, Say, called_by, engine_of, renderer_of, source_of
from fovea.commands.targets import (
    Baseline,
    CheckpointTarget,
    ModelTarget,
    OpenedModel,
    ServerTarget,
    open_model,
    parse_target,
    shared_settings,
)
from fovea.config.loading import keys_of
from fovea.config.recipes import Override
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.evaluation.answer_logprobs import answer_logprobs
from fovea.evaluation.json_file import answer_files, read_answers
from fovea.report.samples import read_step
from fovea.run.sampling import rollout_sampling
from fovea.types import Request
from fovea_gym.environments.base import Split
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.types import ImageRef, PixelChange
from fovea_gym.utils.bounded import check_inside
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.files import write_atomically
from fovea_tools.saliency.maps import (
    FOLDER,
    MAX_MAPS,
    MAX_PATCHES,
    AnswerMap,
    SamplePlace,
    map_files,
    map_path,
    sample_place,
    write_map,
)
from fovea_tools.saliency.occlusion import OcclusionMap, Patch, patches
from fovea_tools.saliency.page import write_page

PATCHES_PER_SIDE = 16
"""Number of patches along the longer side, unless their size is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An answer to make a map of."""

    row: int | None = None
    """Number of the row in its split, from 0; None: the row is found by its id."""
    id: str | None = None
    """Task id, if the answer was recorded."""
    answer: str | None = None
    """Text of the answer; None for the model's greedy answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The maps to make: which answers, and which picture of the prompt is hidden patch by patch."""

    rows: Sequence[int] = ()
    split: Split = "test"
    answer: str | None = None
    recorded: str | None = None
    """An evaluation of the run, or STEP:GROUP:ANSWER of a sample, which also decides the split."""
    image: int = 1
    """Number of the picture in the prompt."""
    patch_px: int | None = None
    """Side of a hidden patch; None: 1/16 of the picture's longer side."""


def row_numbers(text: str) -> list[int]:
    """The rows that a text such as 3, 0-9 or 3,5,8 names; ConfigError for other text or over MAX_MAPS rows."""
    rows: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,15})(?:-([0-9]{1,15}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < first + MAX_MAPS:
            raise ConfigError(
                f"--rows {text}: give numbers from 0, such as 3, 0-9 or 3,5,8, of at most {MAX_MAPS} rows"
            )
        rows += range(first, last + 1)
    return list(dict.fromkeys(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saliency:
    """A map, with its row and its picture."""

    row: int
    numbers: AnswerMap
    map: OcclusionMap
    picture: Image.Image

    def write(self, picture_file: Path) -> None:
        """Write the lit picture, and its numbers as JSON next to it."""
        buffer = io.BytesIO()
        self.map.over(self.picture).save(buffer, format="PNG")
        write_atomically(picture_file, buffer.getvalue())  # replaces a link, which could lead to any file
        write_map(picture_file.with_suffix(".json"), self.numbers)


def write_maps(
    word: str,
    wanted: Wanted,
    overrides: Sequence[Override],
    say: Say,
    *,
    recipe: Path | None,
    out: Path | None = None,
    trust: bool = False,
) -> Iterator[tuple[AnswerMap, Path]]:
    """Write maps of a target's answers, and the page of a run's maps; yield each map with its picture's file."""
    target = parse_target(word)
    if isinstance(target, Baseline | ServerTarget):
        raise ConfigError(f"{word} has no weights here to make maps with; name a run, a checkpoint or a model folder")
    _check(target, wanted, out)
    if out is None and isinstance(target, CheckpointTarget):
        _check_rows(target, overrides, recipe)
    split, asked = _asked(target, wanted)
    with Occluder.of(target, overrides, say, recipe=recipe, split=split, trust=trust) as occluder:
        for found in occluder.maps(asked, wanted, say):
            file = out or _file(target, split, found)
            found.write(file)
            yield found.numbers, file
    if out is None and isinstance(target, CheckpointTarget):
        say(f"all maps of this run: {write_page(target.run)}")


def _check(target: CheckpointTarget | ModelTarget, wanted: Wanted, out: Path | None) -> None:
    """Raise ConfigError for options that contradict each other, or if the run would have too many maps."""
    number = len(wanted.rows)
    if out is not None and out.suffix != ".png":
        raise ConfigError(f"--out {out}: the file is a PNG picture; name it {out.with_suffix('.png')}")
    if wanted.answer is not None and wanted.recorded is not None:
        raise ConfigError("--answer and --recorded both name the answer; drop one of them")
    if out is not None or isinstance(target, ModelTarget):
        if number > 1:
            of_what = f"--out {out} takes one map" if out else f"{target.name} is not a run and stores no maps"
            raise ConfigError(f"{number} rows, but {of_what}; ask for one row")
        return
    if (kept := len(map_files(target.run))) + number > MAX_MAPS:
        raise ConfigError(
            f"{target.run / FOLDER} has {kept} maps, and {number} more exceed the limit of {MAX_MAPS}; delete some"
        )


def _check_rows(target: CheckpointTarget, overrides: Sequence[Override], recipe: Path | None) -> None:
    """Raise ConfigError for other rows than the run's, since maps are stored by the run's ids; files may have moved."""
    changed = [key for key in sorted(keys_of(overrides)) if key == "seed" or key.startswith("environment.")]
    given = ["--recipe"] * (recipe is not None) + [key for key in changed if not key.endswith("_files")]
    if given:
        raise ConfigError(
            f"{given[0]} changes the rows, and {target.run} stores maps only of its own rows; give --out FILE"
        )


def _file(target: CheckpointTarget | ModelTarget, split: Split, found: Saliency) -> Path:
    """The picture's default file: in the run's folder, or else in the working directory."""
    if not isinstance(target, CheckpointTarget):
        return Path("saliency.png")
    path = map_path(target.run, split, found.row, found.numbers).with_suffix(".png")
    check_inside(path.parent, target.run)
    return path


def _asked(target: CheckpointTarget | ModelTarget, wanted: Wanted) -> tuple[Split, list[Asked]]:
    name = wanted.recorded
    if name is None:
        return wanted.split, [Asked(row=row, answer=wanted.answer) for row in wanted.rows]
    if isinstance(target, ModelTarget):
        raise ConfigError(f"--recorded {name}: {target.name} is not a run, so it has no recorded answers; name a run")
    if place := sample_place(name):
        if len(wanted.rows) > 1:
            raise ConfigError(f"--recorded {name} is a single answer with a known row; drop --rows")
        return "train", [_sample(target.run, place)]
    if name not in (kept := answer_files(target.run)):
        raise ConfigError(
            f"--recorded {name}: {target.run} has no answers of that name; give one of {', '.join(kept) or 'none'}, or "
            "STEP:GROUP:ANSWER of a training sample"
        )
    answers = {each.index: each for each in read_answers(target.run, name, sys.maxsize)}
    if missing := [row for row in wanted.rows if row not in answers]:
        raise ConfigError(f"--row {missing[0]}: {name} has no answer to this row, only to {len(answers)} others")
    found = [answers[row] for row in wanted.rows]
    # the first turn is the only one whose context is just the prompt with its pictures
    asked = [Asked(row=each.index, id=each.id, answer=each.answers[0].turns[0].text) for each in found]
    return ("test" if name.startswith("test-") else "dev"), asked


def _sample(run: Path, place: SamplePlace) -> Asked:
    where = f"--recorded {place.step}:{place.group}:{place.answer}"
    try:
        groups = read_step(run, place.step)
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: {run} has no samples of step {place.step}; `fovea view` lists them") from error
    group = next(iter(groups[place.group - 1 : place.group]), None)
    answer = next(iter(group.answers[place.answer - 1 : place.answer]), None) if group else None
    if group is None or answer is None:
        of_what = f"answers 1 to {len(group.answers)} in that group" if group else f"groups 1 to {len(groups)}"
        raise ConfigError(f"{where}: step {place.step} has {of_what}")
    return Asked(id=group.id, answer=answer.turns[0].text)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the model, or one that the user gives."""

    text: str
    token_ids_T: NDArray[np.int64]


class Occluder:
    """Makes maps of answers, with a model and the rows of a split."""

    def __init__(self, weights: str, model: OpenedModel, eval_set: EvalSet, source: PromptSource, split: Split) -> None:
        self._weights, self._split = weights, split
        self._model, self.eval_set, self._source = model, eval_set, source

    @staticmethod
    @contextmanager
    def of(
        target: CheckpointTarget | ModelTarget,
        overrides: Sequence[Override],
        say: Say,
        *,
        recipe: Path | None,
        split: Split,
        trust: bool = False,
    ) -> Iterator[Occluder]:
        """Open the model of a target for the rows of a split, until the block ends."""
        rows = EvalSet.of(shared_settings([target], recipe, overrides, trust=trust), split)
        with closing(rows.grading):
            say("loading the model")
            model = open_model(target, rows.config, overrides, trust=trust)
            eval_set = called_by(model, rows, say)
            weights = target.folder.name if isinstance(target, CheckpointTarget) else target.name
            yield Occluder(weights, model, eval_set, source_of(eval_set, renderer_of(eval_set, model)), split)

    def maps(self, asked: Sequence[Asked], wanted: Wanted, say: Say) -> Iterator[Saliency]:
        """Yield the maps of these answers one by one; ConfigError for a row that the split does not have."""
        rows = list(map(self._row, asked))
        for row, answer in zip(rows, self._answers(rows, asked), strict=True):
            yield self._saliency(row, answer, wanted, say)

    def _row(self, asked: Asked) -> int:
        tasks = self.eval_set.tasks
        if asked.row is None:
            return self._row_of(asked.id or "")
        if not asked.row < len(tasks):
            raise ConfigError(f"--row {asked.row}: the {self._split} split has rows 0 to {len(tasks) - 1}")
        if asked.id is not None and tasks[asked.row].id != asked.id:
            raise DataError(f"row {asked.row} of the {self._split} split is not {asked.id}; use the data of the run")
        return asked.row

    def _row_of(self, task_id: str) -> int:
        """The number of the task with this id."""
        tasks = self.eval_set.tasks
        last = task_id.rpartition("/")[2]
        likely = int(last) if re.fullmatch("[0-9]{1,15}", last) else len(tasks)
        for row in chain(range(likely, len(tasks))[:1], range(len(tasks))):
            with suppress(DataError):  # a bad row, for which there is no answer
                if tasks[row].id == task_id:
                    return row
        raise DataError(f"no row of the {self._split} split has the id {task_id!r}; use the data of the run")

    def _answers(self, rows: Sequence[int], asked: Sequence[Asked]) -> list[Answer]:
        missing = [row for row, each in zip(rows, asked, strict=True) if each.answer is None]
        drawn = iter(wait_for(self._greedy(missing)))
        return [next(drawn) if each.answer is None else self._given(each.answer) for each in asked]

    def _given(self, text: str) -> Answer:
        ids = self._model.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError("the answer has no tokens; give a text with --answer, or drop it for the model's answer")
        return Answer(text, np.array(ids, dtype=np.int64))

    async def _greedy(self, rows: Sequence[int]) -> list[Answer]:
        if not rows:
            return []
        config, drawn = self.eval_set.config, list[Answer]()
        engine = engine_of(self._model, config)
        sampling = replace(rollout_sampling(config, self.eval_set.environment), temperature=0.0)
        try:
            for row in rows:
                request = Request(id=f"saliency-{row}", prompt=self._item(row).prompt, sampling=sampling)
                (completion,) = await engine.generate(request)
                drawn.append(Answer(completion.text, completion.token_ids_T))
            return drawn
        finally:
            await engine.close()

    def _item(self, row: int) -> PromptedTask:
        return self._source.render(self.eval_set.tasks[row])

    def _saliency(self, row: int, answer: Answer, wanted: Wanted, say: Say) -> Saliency:
        item = self._item(row)
        picture = self._picture(wanted.image, item)
        grid = _grid(wanted.patch_px, picture.size)
        say(f"{item.task.id}: {sum(map(len, grid))} patches of {grid[0][0].side} px")
        found = self._map(wanted.image, item, answer.token_ids_T, grid)
        if not np.isfinite([found.logprob, *found.falls_RC.flat]).all():
            raise DataError(
                f"{item.task.id}: the answer has a token that this model never samples; give another answer"
            )
        numbers = AnswerMap(
            id=item.task.id,
            question=item.task.question,
            answer=answer.text,
            image=wanted.image,
            weights=self._weights,
            logprob=found.logprob,
            patch_px=found.side_px,
            size=picture.size,
            falls=tuple(tuple(float(f"{fall:.4g}") for fall in falls_C) for falls_C in found.falls_RC),
        )
        return Saliency(row=row, numbers=numbers, map=found, picture=picture)

    def _picture(self, image: int, item: PromptedTask) -> Image.Image:
        messages = self.eval_set.environment.prompt(item.task)
        refs = [part for message in messages for part in message.parts if isinstance(part, ImageRef)]
        if not 1 <= image <= len(refs):
            raise ConfigError(f"--image {image}: the prompt of {item.task.id} has {len(refs)} picture(s)")
        return self.eval_set.open_image(refs[image - 1])

    def _map(
        self, image: int, item: PromptedTask, answer_T: NDArray[np.int64], grid: list[list[Patch]]
    ) -> OcclusionMap:
        train, temperature = self._model.config.train, self._model.config.rollout.temperature
        # one by one, since the processed pictures of all patches together may not fit in memory
        views = (self._source.augmented(item, _only(image, patch))() for row in grid for patch in row)
        whole, *hidden = answer_logprobs(
            self._model.vlm,
            ((prompt, answer_T) for prompt in chain([item.prompt], views)),
            max_tokens=train.max_tokens_per_microbatch,
            temperature=temperature,
        )
        falls_RC = (whole - np.array(hidden, np.float32)).reshape(len(grid), -1)
        return OcclusionMap(logprob=whole, falls_RC=falls_RC, side_px=grid[0][0].side)


def _grid(patch_px: int | None, size: tuple[int, int]) -> list[list[Patch]]:
    side_px = patch_px or -(-max(size) // PATCHES_PER_SIDE)
    grid = patches(size, side_px)
    if (number := sum(map(len, grid))) > MAX_PATCHES:
        raise ConfigError(
            f"--patch-px {side_px}: a picture of {size[0]} x {size[1]} px has {number} patches, above the limit of "
            f"{MAX_PATCHES}; set a larger patch"
        )
    return grid


def _only(image: int, patch: Patch) -> Callable[[int], PixelChange]:
    """The change of each picture of a prompt, counted from 0: the patch for one, no change for the others."""
    return lambda number: patch if number == image - 1 else lambda pixels_YXC: pixels_YXC
