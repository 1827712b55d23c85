"""`fovea.evaluate` on rows in memory, and what wrong arguments of Python functions are told in terms of Python."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

import fovea
from gym_tests.bandit import BanditEnvironment
from tests.api.small import PHOTOS, of_rows, rows, score

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "DataFrame": pd.DataFrame,
    "Dataset": datasets.Dataset.from_list,
    "list": list,
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_asked_without_a_recipe_or_a_run(form: str) -> None:
    seen = []

    def look(task: fovea.Task, text: str, images: Any) -> float:
        seen.append((task.question, task.answer, images[0].getpixel((0, 0))))
        return float(text == "red")

    before = set(Path().iterdir())
    given = {"rows": FORMS[form](rows(6)), "reward": look, "environment": PHOTOS}
    (metrics,) = fovea.evaluate("constant:red", **given, settings={"data.cache_dir": "cache"}, quiet=True)
    assert (metrics.accuracy.n, metrics.accuracy.mean) == (6, 1)
    wanted = [(row["question"], row["answer"], row["photo"].getpixel((0, 0))) for row in rows(6)]
    assert [each for each in seen if each in wanted][-6:] == wanted
    assert set(Path().iterdir()) - before <= {Path("cache")}
    assert [file for file in Path("cache").rglob("*") if file.is_file()] == [], "the rows do not stay behind"


def test_rows_may_be_graded_by_an_environment() -> None:
    by_vqa = {"rows": rows(5), "environment": {"name": "vqa", **PHOTOS}, "settings": {"data.cache_dir": "cache"}}
    gold, red = fovea.evaluate("gold", "constant:red", quiet=True, **by_vqa)  # type: ignore[arg-type]
    assert (gold.accuracy.mean, red.accuracy.mean) == (1, 0.2)


def test_a_run_answers_other_rows_than_its_own() -> None:
    trainer = of_rows()
    run = trainer.train()
    settings = {"evaluate.test_size": None}
    own, constant = trainer.evaluate("constant:pink", rows=rows(10)[4:], settings=settings, quiet=True)
    assert own.accuracy.n == constant.accuracy.n == 6
    assert constant.accuracy.mean == pytest.approx(1 / 6)
    (again,) = fovea.evaluate(run, rows=rows(10)[4:], reward=score, settings=settings, quiet=True)
    assert again.accuracy.mean == own.accuracy.mean


def test_a_run_is_compared_with_another_on_its_rows_and_with_one_of_equal_rows() -> None:
    """The rows lie in the folders of the first and the third; the second names those of the first."""
    first = of_rows(run_dir="first", max_steps=1).train()
    second = fovea.GRPO(recipe=first.config_file, reward=score, run_dir="second", seed=1).train()
    third = of_rows(run_dir="third", max_steps=1).train()
    for targets in ((first, second, third), (second, first)):
        compared = fovea.evaluate(*targets, reward=score, quiet=True)
        assert [each.accuracy.n for each in compared] == [1] * len(targets)
    changes = [("rows-", "rows-0", "train_files"), ("test_share: 0.1", "test_share: 0.2", "test_share")]
    for before, after, difference in changes:
        other = Path(shutil.copytree("third", difference))
        (other / "config.yaml").write_text(third.config_file.read_text().replace(before, after))
        with pytest.raises(fovea.FoveaError, match=rf"different environments \(environment\.{difference}: "):
            fovea.evaluate(second, other, reward=score)


def test_what_wrong_arguments_are_told_names_arguments_of_python(tmp_path: Path) -> None:
    run = of_rows().train()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "stranger.py").write_text("def score(task, text, images):\n    return 1.0\n")
    with pytest.raises(fovea.FoveaError, match=r"reward=python:tests\.api\.small\.score\b"):
        fovea.evaluate("run")
    own = run.config_file.read_text().replace("python:tests.api.small.score", "stranger.py:score")
    run.config_file.write_text(own)
    wrong: list[tuple[Callable[[], object], str]] = [
        (fovea.evaluate, "nothing to evaluate; give a run, a checkpoint, a model, a server or a baseline such as"),
        (lambda: fovea.evaluate("majority"), "no target says which rows to evaluate on; give a recipe that does"),
        (lambda: fovea.evaluate("gold", rows=rows(3), environment=PHOTOS), "grades no answers; set reward to"),
        (lambda: fovea.evaluate("gold", split="validation"), "split='validation' is not a split; give"),
        (lambda: fovea.evaluate("gold", rows=rows(3), reward=score, split="dev"), "split='dev' names rows, but rows"),
        (lambda: fovea.evaluate("run"), "add trust=True if the folder is your own"),
        (lambda: fovea.evaluate("http://a:9#x", recipe="recipe.yaml", api_key_env="NO_KEY"), "api_key_env=NO_KEY"),
        (lambda: fovea.export(run, "full"), "full: exists and is not an empty folder"),
        (lambda: fovea.export(run, "new", adapter_only=True), "has no adapter"),
        (lambda: fovea.export("nowhere", "new"), "nowhere: neither a run"),
    ]
    with pytest.raises(fovea.FoveaError, match=r"^rows\b"):  # not test_rows
        fovea.evaluate("gold", rows=[], reward=score)
    Path("recipe.yaml").write_text("model: {tiny: {}}\n")
    for call, message in wrong:
        with pytest.raises(fovea.FoveaError) as error:
            call()
        assert message in str(error.value)
        assert "--" not in str(error.value)


class OfOneId(Sequence[fovea.Task]):
    """Rows that are made on access, and are found to have one id when they are asked."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return fovea.Task(id="x", question="Which?", answer=range(3)[index] * "a")


class AsksThem(BanditEnvironment):
    def tasks(self, split: str) -> Any:
        return OfOneId()

    def score(self, task: fovea.Task, turns: Sequence[Any]) -> float:
        return 1.0


def test_rows_of_one_id_an_object_that_is_no_target_and_several_recipes_are_refused() -> None:
    with pytest.raises(fovea.FoveaError, match=r"\bid 'x'"):
        fovea.evaluate("gold", recipe="shapes", environment=AsksThem(), quiet=True)
    trainer = fovea.GRPO(recipe="shapes")
    told = r"fovea\.{0} is given an object of type GRPO; give the run that train\(\) returned, .* call its own {0}\(\)"
    for function, arguments in ((fovea.evaluate, [trainer]), (fovea.export, [trainer, "out"])):
        with pytest.raises(fovea.FoveaError, match=told.format(function.__name__)):
            function(*arguments)  # type: ignore[operator]
    with pytest.raises(fovea.FoveaError, match=r"^recipe\b.*\bfovea\.evaluate\b"):
        fovea.evaluate("gold", recipe=["shapes", "tiny"])  # type: ignore[arg-type]
