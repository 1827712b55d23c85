"""Rewards in processes, of a file that behaves in many ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea_gym.graders.grading import Grading
from fovea_gym.types import ImageRef
from gym_tests.bandit import BanditEnvironment

REWARDS = """
import os, re, subprocess, sys, time
from pathlib import Path
from fovea_gym.types import Mark

def pid(task, text, images):
    return os.getpid()

def slow_pid(task, text, images):
    time.sleep(0.3)
    return os.getpid()

def whole(task, text, images):
    shown = images[0].getpixel((0, 0))[0]
    marks = [Mark(image=1, xy=(0.25, 0.5), label="caf\\u00e9")]
    return {"shown": shown, "size": len(text), "image_parts": [{"x": task.row["box"][1]}], "marks": marks}

async def later(task, text, images):
    return 0.5

def misbehaves(task, text, images):
    if text == "hold":
        return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))
    if text == "start":
        started = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(__file__).with_name("started").write_text(str(started.pid))
    if text == "die":
        os.kill(os.getpid(), 9)
    if text == "exit slowly":
        os.closerange(3, 256)
        time.sleep(1)
    if text.startswith("exit"):
        os._exit(7)
    if text == "raise":
        raise ValueError("too short")
    if text == "leave":
        sys.exit(3)
    if text == "large":
        return {"x" * 2**25: 1.0}
    return os.getpid()

def without_torch(task, text, images):
    return float("torch" not in sys.modules and "numpy" in sys.modules)
"""
TASK = replace(
    BanditEnvironment().tasks("train")[0],
    images=(ImageRef(source=np.full((2, 2, 3), 9, np.uint8)),),
    row={"box": np.asarray([1.5, 2.5]), "picture": Image.new("RGB", (1, 1))},
)


@contextmanager
def graded(folder: Path, function: str, **settings: object) -> Iterator[Grading]:
    (folder / "own.py").write_text(REWARDS)
    given = {"model": {"tiny": {}}, "reward": f"{folder}/own.py:{function}", "run_dir": str(folder / "run")}
    config = load_config([], [{**given, "reward_in": "process", **settings}])
    grading = make_environment(config, BanditEnvironment()).grading
    try:
        yield grading
    finally:
        grading.close()
