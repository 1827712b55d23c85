"""Fovea as a user installs it: a wheel that `python -m build` makes, in an environment without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["max_steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "parity.prompts=1"]
SMALL += ["environment.train_size=40", "environment.dev_size=8", "environment.test_size=8", "warmup.max_steps=2"]


def run(*command: str, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, and with this one's packages for what Fovea needs."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), folder=folder)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("fovea_rl-")
    run(sys.executable, "-m", "venv", "--without-pip", "env", folder=folder)
    programs = folder / "env" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", str(wheel)]
    run(*pip, folder=folder)
    site = Path(
        run(str(programs / "python"), "-c", "import site; print(*site.getsitepackages())", folder=folder).strip()
    )
    # a path in a .pth file is not searched for more of them, so that an editable Fovea there is not seen
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return programs


@pytest.mark.slow
def test_the_demo_trains_by_name_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    about = "import fovea, importlib.metadata as m; print(fovea.__file__, m.version('fovea-rl'))"
    where, version = run(str(installed / "python"), "-c", about, folder=tmp_path).split()
    assert Path(where).is_relative_to(installed.parent)
    assert run(str(installed / "fovea"), "--version", folder=tmp_path) == f"fovea {version}\n"
    listed = run(str(installed / "fovea"), "recipes", folder=tmp_path)
    assert f"files: {Path(where).parent / 'recipes'}\n" in listed
    shipped, ours = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.yaml")}
        for folder in (Path(where).parent / "recipes", ROOT / "recipes")
    )
    assert shipped == ours
    run(str(installed / "fovea"), "train", "shapes", "run_dir=first", *SMALL, folder=tmp_path)
    assert (tmp_path / "first" / "report.html").is_file()
    run(str(installed / "fovea"), "view", "first", "--export", "shown.html", folder=tmp_path)
    assert (tmp_path / "shown.html").is_file()
