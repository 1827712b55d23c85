"""What the user's files import: modules beside them, whoever else has one of the same name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea_gym.environments.custom.loading import load_named

IMPORTS = "from beside import NAME\ndef name(): return NAME\n"


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Paths and modules of this process are put back, those that the tests import included."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def written(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def name_in(spec: str) -> str:
    function = load_named(spec, "reward")
    assert callable(function)
    name = function()
    assert isinstance(name, str)
    return name


def test_a_module_of_the_working_directory_is_found(tmp_path: Path) -> None:
    written(Path("sub/mine.py"), "from parts.names import NAME\ndef name(): return NAME\n")
    written(Path("parts/names.py"), "NAME = 'work'")
    assert name_in("sub/mine.py:name") == "work"


def test_the_folder_of_the_file_comes_first(tmp_path: Path) -> None:
    for folder in ("sub", "../elsewhere"):
        written(Path(folder, "mine.py"), IMPORTS)
        written(Path(folder, "beside.py"), f"NAME = '{folder}'")
        written(Path("beside.py"), "NAME = 'work'")
        assert name_in(f"{folder}/mine.py:name") == folder


def test_an_import_within_a_function_is_found_later() -> None:
    written(Path("sub/mine.py"), "def name():\n    from late_name import NAME\n    return NAME\n")
    written(Path("sub/late_name.py"), "NAME = 'late'")
    assert name_in("sub/mine.py:name") == "late"


def test_files_of_two_folders_have_their_own_modules_of_one_name() -> None:
    for folder in ("one", "two"):
        written(Path(folder) / "mine.py", "import parts.more\n" + IMPORTS)
        written(Path(folder) / "beside.py", f"NAME = '{folder}'")
        written(Path(folder) / "parts" / "__init__.py", "")
        written(Path(folder) / "parts" / "more.py", "")
    for folder in ("one", "two", "two", "one"):
        assert name_in(f"{folder}/mine.py:name") == folder
    assert {sys.modules[name].__file__ for name in ("beside", "parts", "parts.more")} == {
        str(Path("one", name).resolve()) for name in ("beside.py", "parts/__init__.py", "parts/more.py")
    }


def test_the_modules_of_the_program_stay_its_own(tmp_path: Path) -> None:
    written(tmp_path / "program" / "beside.py", "NAME = 'program'")
    sys.path.insert(0, str(tmp_path / "program"))
    import beside  # type: ignore[import-not-found]  # noqa: PLC0415

    written(Path("sub/mine.py"), IMPORTS)
    written(Path("sub/beside.py"), "NAME = 'sub'")
    assert name_in("sub/mine.py:name") == "sub"
    assert sys.modules["beside"] is beside


def test_installed_packages_stay_what_they_are() -> None:
    written(Path("sub/mine.py"), "import json, numpy, fovea_gym\ndef name(): return numpy.__name__ + json.__name__\n")
    for name in ("json", "numpy", "fovea_gym"):
        written(Path(f"sub/{name}.py"), "raise AssertionError")
    packages = [sys.modules[name] for name in ("json", "numpy", "fovea_gym")]
    assert name_in("sub/mine.py:name") == "numpyjson"
    assert [sys.modules[name] for name in ("json", "numpy", "fovea_gym")] == packages


def test_the_search_path_does_not_grow_and_stays_in_order_after_an_error() -> None:
    written(Path("sub/mine.py"), "def name(): return 'sub'")
    written(Path("mine.py"), "import nowhere_at_all")
    before = list(sys.path)
    problem = r"it raised ModuleNotFoundError: No module named 'nowhere_at_all' at mine.py:1"
    with pytest.raises(ValueError, match=problem):
        name_in("mine.py:name")
    assert sys.path == [*before, str(Path.cwd())]
    for _ in range(3):
        name_in("sub/mine.py:name")
    assert sys.path == [*before, str(Path.cwd()), str(Path("sub").resolve())]
