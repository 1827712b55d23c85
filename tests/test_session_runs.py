"""A run with sessions that is killed amid an episode."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fovea_gym.processes.ending import running
from tests.runs import environment, final_weights, untimed
from tests.warm import run_warm

pytestmark = pytest.mark.kill

GAME = """\
import os, random, signal, subprocess, time
from pathlib import Path

from fovea.metrics.log import read_metrics
from fovea.processes.session_processes import session_environment
from fovea.run.run_dir import newest_step
from fovea_gym.types import Message, Score, Task

HERE = Path(__file__).parent

class Game:
    def __init__(self, seed):
        self.random = random.Random(seed)
        # without this run's pipes: whoever reads them would wait for this process after the run has been killed
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["sleep", "600"], env=session_environment(), start_new_session=True, **quiet)

    def reply(self, turns):
        death = HERE / "death"
        if death.exists() and len(read_metrics(HERE / "killed")) >= 2:
            while newest_step(HERE / "killed") < 2:  # it is written beside the next step
                time.sleep(0.01)
            death.rename(HERE / str(self.process.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.uniform(0, 0.02))
        return [Message(role="user", parts=(str(self.random.randint(1, 9)),))]

    def score(self, turns):
        return Score(reward=self.random.random() + len(turns[-1].text) / 32, accuracy=0.0)

    def close(self):
        self.process.kill()
        self.process.wait()

class Games:
    max_turns = 2

    def tasks(self, split):
        return [Task(id=f"{split}/{number}", question="Guess.", answer="5") for number in range(16)]

    def prompt(self, task):
        return [Message(role="user", parts=(f"{task.question} {task.id}",))]

    def open(self, task, seed):
        return Game(seed)

    def target(self, task):
        return task.answer
"""
RECIPE = """\
model: {tiny: {}}
max_steps: 4
checkpoint: {every_steps: 2}
rollout: {prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 4}
evaluate: {image_controls: false, dev_size: 2}
parity: {prompts: 0}
log: {tensorboard: false}
"""


def test_a_run_killed_amid_an_episode_leaves_no_process_and_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(GAME)
    (tmp_path / "games.yaml").write_text(RECIPE)
    game = f"environment={{name: own, file: '{tmp_path / 'games.py'}:Games', session: {{max_concurrent: 2}}}}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def train(run_dir: Path, *settings: str) -> int:
        command = ["fovea", "train", str(tmp_path / "games.yaml"), f"run_dir={run_dir}", game, *settings]
        return run_warm(command, environment(), timeout=600).returncode

    assert train(whole) == 0
    (tmp_path / "death").touch()
    assert train(killed) == -signal.SIGKILL
    assert train(killed, "resume=auto") == 0
    (left,) = (int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert left not in {process.pid for process in running()}
    assert untimed(killed) == untimed(whole)
    assert final_weights(killed, 4) == final_weights(whole, 4)
