"""A trial call of the user's reward, and remarks on the rows, before anything large is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from fovea.config.run import Config
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.custom.grader import SeveralRewards, UserGrader
from fovea_gym.environments.custom.processes import RewardProcesses
from fovea_gym.environments.dataset_tasks import OwnRows
from fovea_gym.errors import DataError, ScoreError, UnscoredError
from fovea_gym.graders.base import shown
from fovea_gym.graders.reward_models import WithToolBonus
from fovea_gym.rows.images import ImageOpener, is_url
from fovea_gym.rows.readers.base import listed
from fovea_gym.settings.splits import ANSWER_KEYS, SplitFiles
from fovea_gym.types import Task, Turn
from fovea_gym.utils.event_loop import wait_for

ALLOWED_EXCESS = 1.5
"""Largest ratio of held-out rows to the requested share for which nothing is printed."""
NUM_LOOKED_AT = 64
"""Number of training rows whose images are checked for an EXIF rotation."""
MAX_ROWS_TRIED = 10
"""Number of training rows that are searched for a usable one; the run itself reports bad rows."""


def try_reward(graded: GradedEnvironment, opener: ImageOpener) -> list[str]:
    """Let the user's code score the right answer of a training row; returns remarks, ScoreError if it fails.

    Episodes of several turns are not tried, since their course depends on the model. A failure that the settings
    tolerate (`reward_on_failure: drop`) becomes a remark.
    """
    try:
        return [remark for each in (*graded.parts.values(), graded) for remark in _try(each, opener)]
    except BaseException:
        graded.grading.close()
        raise


def _try(graded: GradedEnvironment, opener: ImageOpener) -> Iterator[str]:
    environment, grading = graded.environment, graded.grading
    grader = grading.graders[-1]
    grader = grader.own if isinstance(grader, WithToolBonus) else grader
    if environment.max_turns > 1 or not isinstance(grader, UserGrader | SeveralRewards | RewardProcesses):
        return
    found = _answered_row(graded, opener)
    if found is None:
        yield "your reward was not tried before the run: none of the training rows looked at can be used"
        return
    task, answer = found

    def reward_of(text: str) -> float:
        turn = Turn(messages=tuple(environment.prompt(task)), text=text)
        return wait_for(grading.scores(task, [[turn]]))[0].reward

    try:
        reward = reward_of(answer)
    except UnscoredError as error:
        yield f"your reward gives the gold answer no score: {error}"
        return
    if not answer or reward > 0:
        return
    # the reward may parse another form of the answer than the environment's, or give 0 at best
    failures: list[ScoreError] = []
    for form in (rf"\boxed{{{task.answer}}}", f"<answer>{task.answer}</answer>"):
        try:
            reward = max(reward, reward_of(f"<think>I know.</think>{form}"))
        except ScoreError as error:
            failures.append(error)
    nothing = reward
    with suppress(ScoreError):
        nothing = reward_of("I do not know.")
    if reward <= min(0.0, nothing):
        gold = f"your reward gives the gold answer {reward:g} ({task.id}: {shown(answer)}"
        if failures:
            yield f"{gold}), and fails on it in a box or in answer tags: {failures[0]}"
            return
        column = ", or the column of the answer (environment.answer_key)" if hasattr(environment, "answer_key") else ""
        yield f"{gold}, also in a box and in answer tags), no more than a wrong answer; fix what it parses{column}"


def remarks_on_answers(graded: GradedEnvironment) -> Iterator[str]:
    """Remarks on rows without a column of correct answers, for each part of a mixture."""
    for each in (*graded.parts.values(), graded):
        if not isinstance(each.environment, OwnRows) or each.environment.answer_key is not None:
            continue
        found = _answered_row(each)
        columns = [] if found is None else list(found[0].row)
        if found is not None and not found[0].answer and not set(ANSWER_KEYS) & set(columns):
            yield (
                f"no column of the training rows is called {' or '.join(ANSWER_KEYS)}, so task.answer is empty in the "
                f"reward (the columns are {listed(columns)}); set environment.answer_key if one of them holds the "
                "correct answer"
            )


def remarks_on_shares(config: Config, graded: GradedEnvironment) -> Iterator[str]:
    """Remarks on held-out splits larger than their share, since rows that share an image stay together."""
    for name, part in {"": graded, **graded.parts}.items():
        key = f"environment.parts.{name}.environment" if name else "environment"
        settings = config.environments.get(key)
        if isinstance(settings, SplitFiles):
            yield from _remarks_on_shares(key, settings, part.environment)


def _remarks_on_shares(key: str, settings: SplitFiles, environment: Environment) -> Iterator[str]:
    shares: dict[Split, float] = {"test": 0.0 if settings.test_files is not None else settings.test_share}
    shares["dev"] = 0.0 if settings.dev_files is not None else settings.dev_share
    held_out = {split: len(environment.tasks(split)) for split, share in shares.items() if share}
    num_train = len(environment.tasks("train"))
    total = num_train + sum(held_out.values())
    for split, num_rows in held_out.items():
        if num_rows > ALLOWED_EXCESS * max(1.0, shares[split] * total):
            yield (
                f"{key}.{split}_share={shares[split]:g} of {total} rows holds out {num_rows} and leaves {num_train} to "
                f"train on, since rows that share an image stay together and there are few images; set "
                f"{key}.{split}_files, or add pictures"
            )


def remarks_on_images(tasks: Sequence[Task], opener: ImageOpener) -> Iterator[str]:
    """Yield a line with the number of images rotated by EXIF in a sample of rows, if any, without images at URLs."""
    seen, turned, looked_at = 0, 0, spread(len(tasks), NUM_LOOKED_AT)
    for index in looked_at:
        with suppress(DataError):  # the run itself reports bad rows
            for ref in tasks[index].images:
                if not isinstance(ref.source, str) or not is_url(ref.source):
                    turned += opener.is_turned(ref)
                    seen += 1
    if turned and "rotated" in opener.convert_images:
        yield f"{turned} of {seen} images turned by EXIF ({len(looked_at)} of {len(tasks):,} training rows looked at)"


def spread(num_rows: int, num_chosen: int) -> Sequence[int]:
    """Indices of `num_chosen` evenly spaced rows, or of all rows if there are fewer."""
    num_chosen = min(num_rows, num_chosen)
    return [index * num_rows // num_chosen for index in range(num_chosen)]


def _answered_row(graded: GradedEnvironment, opener: ImageOpener | None = None) -> tuple[Task, str] | None:
    """A usable training row, whose images can be opened by `opener`, and its right answer; None if none is found."""
    environment = graded.environment
    tasks = environment.tasks("train")
    for index in spread(len(tasks), MAX_ROWS_TRIED):
        with suppress(DataError):
            task = tasks[index]
            environment.prompt(task)
            if opener is not None:
                for ref in task.images:
                    opener(ref)
            return task, environment.target(task)
    return None
