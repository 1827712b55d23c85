"""Recipes in an installed wheel, built by the project's own backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from fovea.config.recipes import shipped_recipe

ROOT = Path(__file__).parents[2]


def test_a_checkout_has_its_recipes_beside_the_package() -> None:
    assert shipped_recipe("vlm_gym_geospot") == ROOT / "recipes" / "vlm_gym_geospot.yaml"


def test_an_installed_wheel_finds_every_recipe(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    find = "from fovea.config.recipes import shipped_recipe; print(shipped_recipe('shapes').parent)"
    done = subprocess.run(
        [sys.executable, "-c", find],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "site" / "fovea" / "recipes"
    names = {path.name for path in (ROOT / "recipes").iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).read_bytes() == (ROOT / "recipes" / name).read_bytes() for name in names)
