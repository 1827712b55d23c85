"""The three packages as a user installs them: wheels of `python -m build`, in environments without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fovea

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {"fovea_rl_gym": ROOT / "gym", "fovea_rl_tools": ROOT / "tools", "fovea_rl": ROOT}
WHERE = """
import fovea, fovea_gym, fovea_tools, importlib.metadata as m
for package in (fovea_gym, fovea_tools, fovea):
    print(package.__file__)
print(*(m.version(name) for name in ("fovea-rl-gym", "fovea-rl-tools", "fovea-rl")))
"""
SMALL = ["max_steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "parity.prompts=1"]
SMALL += ["environment.dev_size=8", "environment.test_size=8", "warmup.max_steps=2"]


def run(*command: str, folder: Path, seconds: float = 300) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, timeout=seconds, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution of each package, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    for project in DISTRIBUTIONS.values():
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(project), folder=folder)
    names = {f"{name}-{fovea.__version__}{end}" for name in DISTRIBUTIONS for end in (".tar.gz", "-py3-none-any.whl")}
    assert {file.name for file in folder.iterdir()} == names
    return folder


def environment_with(folder: Path, *wheels: Path) -> tuple[Path, Path]:
    """Programs and packages of a new environment with these wheels and nothing that they need."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), folder=folder.parent)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run(*pip, *map(str, wheels), folder=folder)
    site = run(python, "-c", "import site; print(*site.getsitepackages())", folder=folder)
    return folder / "bin", Path(site.strip())


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """The programs of an environment with the three wheels, and with this one's packages for what they need."""
    programs, site = environment_with(built / "all", *built.glob("*.whl"))
    # a path in a .pth file is not searched for more of them, so that an editable Fovea there is not seen
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return programs


@pytest.mark.slow
def test_recipes_train_by_name_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    *files, versions = run(str(installed / "python"), "-c", WHERE, folder=tmp_path).splitlines()
    assert all(Path(file).is_relative_to(installed.parent) for file in files)
    assert versions.split() == [fovea.__version__] * 3
    assert run(str(installed / "fovea"), "--version", folder=tmp_path) == f"fovea {fovea.__version__}\n"
    package = Path(files[-1]).parent
    assert f"files: {package / 'recipes'}\n" in run(str(installed / "fovea"), "recipes", folder=tmp_path)
    shipped, ours = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.yaml")}
        for folder in (package / "recipes", ROOT / "recipes")
    )
    assert shipped == ours
    run(str(installed / "fovea"), "train", "frozen_lake", "run_dir=first", *SMALL, folder=tmp_path)
    assert (tmp_path / "first" / "report.html").is_file()
    run(str(installed / "fovea"), "view", "first", "--export", "shown.html", folder=tmp_path)
    assert (tmp_path / "shown.html").is_file()
    assert "GiB of each process" in run(str(installed / "fovea"), "plan", "frozen_lake", folder=tmp_path)


def needed_by(
    wanted: Requirement, packages: Mapping[str, metadata.Distribution], seen: set[str]
) -> Iterator[metadata.Distribution]:
    """The package that a requirement names, and those that it needs with these extras."""
    if str(wanted) in seen:
        return
    seen.add(str(wanted))
    yield (package := packages[canonicalize_name(wanted.name)])
    for needed in map(Requirement, package.requires or ()):
        if needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in ("", *wanted.extras)):
            yield from needed_by(needed, packages, seen)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gym_tests/rows", pytest.param("gym_tests", marks=pytest.mark.long)])
def test_the_suite_of_the_gym_passes_where_only_the_gym_is(part: str, built: Path, tmp_path: Path) -> None:
    """Of this environment's packages it sees those that the gym and its tests need: neither torch nor Fovea."""
    (wheel,) = built.glob("fovea_rl_gym-*.whl")
    programs, site = environment_with(tmp_path / "bare", wheel)
    here = metadata.distributions(path=[sysconfig.get_path("purelib"), str(site)])
    packages = {canonicalize_name(each.name): each for each in here}
    for package in needed_by(Requirement("fovea-rl-gym[test]"), packages, set()):
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(str(package.locate_file(name)))
    absent = "from importlib.util import find_spec as f; print(*map(f, ('torch', 'transformers', 'fovea')))"
    assert run(str(programs / "python"), "-c", absent, folder=tmp_path) == "None None None\n"
    # the suite of the source distribution, on the wheel
    (source,) = built.glob("fovea_rl_gym-*.tar.gz")
    with tarfile.open(source) as packed:
        packed.extractall(tmp_path, filter="data")
    suite = tmp_path / source.name.removesuffix(".tar.gz")
    shutil.rmtree(suite / "fovea_gym")
    pytest_here = [str(programs / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run(*pytest_here, "--collect-only", folder=suite)
    ended = run(*pytest_here, "-n", "2", "-m", "not slow and not kill", part, folder=suite, seconds=400)
    assert " passed" in ended.splitlines()[-1]
