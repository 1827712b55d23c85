"""Runs over epochs: which rows are trained on, to the last one, through a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from fovea.config.loading import load_config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.run import build
from tests.data.small import SMALL
from tests.runs import ROOT

REWARD = """
from pathlib import Path

def score(task, text, images):
    with Path(__file__).with_name("scored").open("a") as file:
        file.write(f"{task.row['n']}\\n")
    return 0.5
"""


def trained(folder: Path, *settings: str) -> list[str]:
    """The rows of which completions were scored in training; each has two."""
    rows = [{"n": n, "problem": f"How many {n}?", "answer": "1"} for n in range(5)]
    # the last row is bad: its image is not there
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "image": "no"}]))
    (folder / "test.jsonl").write_text('{"n": "test", "problem": "How many?", "answer": "1"}\n' * 2)
    (folder / "reward.py").write_text(REWARD)
    files = [f"environment.{split}_files=['{folder}/{split}.jsonl']" for split in ("train", "test")]
    own = [f"run_dir={folder}/run", f"reward={folder}/reward.py:score", "data.on_bad_row=skip", "max_steps=100"]
    own.append(f"environment.dev_files=['{folder}/test.jsonl']")
    train(build(load_config([ROOT / "recipes" / "geo3k.yaml"], [*SMALL, *files, *own, *settings])))
    scored = (folder / "scored").read_text().split()
    (folder / "scored").unlink()
    return [row for row in scored if row != "test"]


def test_a_run_in_the_order_of_its_file(tmp_path: Path) -> None:
    scored = trained(tmp_path, "max_epochs=2", "data.shuffle=false", "rollout.prompts_per_step=2")
    # the first score is a trial of the reward, on a row of its choice
    assert scored[1:] == [row for row in "0123401234" for _ in range(2)]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_every_row_is_trained_on_once_an_epoch_through_a_resume(tmp_path: Path) -> None:
    settings = ("max_epochs=2", "rollout.prompts_per_step=4", "checkpoint.every_steps=1")
    scored = trained(tmp_path, *settings, "max_steps=2")[1:]
    scored += trained(tmp_path, *settings, "resume=auto")[1:]
    assert Counter(scored) == dict.fromkeys("01234", 4)
    # the last step takes what is left of ten usable rows
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
