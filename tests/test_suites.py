"""Which long suites `.ci/run` runs whole, and of which their smoke test is enough."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runs import ROOT, run_program

SUITES = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci/suites.py")))
WITHOUT_SMOKE = {"oldest", "newest"}
"""Suites whose environments are too large for a smoke test: .ci/run runs the whole or nothing."""
EVERYTHING = {"vllm", "sglang", "megatron", "kill", "browser", "talk", *WITHOUT_SMOKE}
MORE = b"\nmore = 1\n"
MARKED = {"vllm": "tests/rollout/vllm", "sglang": "tests/rollout/sglang", "megatron": "tests/train/megatron"}
"""Suites whose folder has a conftest that marks its tests."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("suites") / "tree"
    for name in ("fovea", "gym", "tests", "examples", "requirements", ".ci"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for suite in EVERYTHING:
        assert suites(root, "run", suite, "true") == 0
    assert to_be_run(root) == set()
    return root


@pytest.fixture
def tree(whole: Path) -> Iterator[Path]:
    """The same copy, whose record a test may change."""
    record = (whole / ".ci/passed").read_text()
    yield whole
    (whole / ".ci/passed").write_text(record)


def suites(root: Path, *words: str) -> int:
    return subprocess.run([sys.executable, ".ci/suites.py", *words], cwd=root, check=False).returncode


def to_be_run(root: Path) -> set[str]:
    # in this process, where files that did not change need not be read into tokens again
    return {suite for suite in SUITES.COVERS if not SUITES.is_unchanged(suite, root)}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("fovea/rollout/vllm/engine.py", {"vllm"}),
        ("fovea/rollout/sglang/host.py", {"sglang"}),
        ("fovea/train/megatron/policy.py", {"megatron"}),
        ("fovea/cluster/ray.py", {"vllm", "sglang", "megatron", "kill"}),
        ("fovea/types.py", {"vllm", "sglang", "megatron", "kill"}),
        ("gym/fovea_gym/types.py", {"vllm", "sglang", "megatron", "kill"}),
        ("gym/fovea_gym/processes/child.py", {"vllm", "sglang", "megatron", "kill"}),
        ("gym/fovea_gym/environments/sessions.py", {"kill"}),
        ("fovea/view/server.py", {"browser"}),
        ("examples/talk/network.py", {"talk"}),
        ("fovea/algorithms/kl.py", set()),
        ("fovea/models/torch_versions.py", {"oldest", "newest"}),
        ("requirements/oldest.txt", {"oldest"}),
        ("requirements/sglang-cpu.lock", {"sglang"}),
        ("tests/rollout/engines/test_weights.py", {"vllm", "sglang"}),
    ],
)
def test_a_change_runs_exactly_the_suites_that_cover_it(tree: Path, changed: str, expected: set[str]) -> None:
    file = tree / changed
    before = file.read_bytes()
    file.write_bytes(before + MORE)
    assert to_be_run(tree) == expected
    file.write_bytes(before)
    assert to_be_run(tree) == set()


def test_comments_and_docstrings_change_nothing_and_other_strings_do(tree: Path) -> None:
    file = tree / "fovea/view/server.py"
    before = file.read_bytes()
    file.write_bytes(b'"""Other words.\n\n# of two lines\n"""\n' + before.partition(b'"""\n')[2] + b"\n\n# a remark\n")
    assert to_be_run(tree) == set()
    file.write_bytes(before + b"\n\ndef added():\n    pass\n")
    assert to_be_run(tree) == {"browser"}
    assert suites(tree, "run", "browser", "true") == 0
    file.write_bytes(before + b'\n\ndef added():\n    """Do nothing."""\n    # nothing\n    pass\n')
    assert to_be_run(tree) == set()
    file.write_bytes(before + b'\n\ndef added():\n    raise ValueError("words")\n')
    assert suites(tree, "run", "browser", "true") == 0
    file.write_bytes(before + b'\n\ndef added():\n    raise ValueError("other words")\n')
    assert to_be_run(tree) == {"browser"}
    file.write_bytes(before)


def test_a_new_and_a_renamed_file_are_changes_and_the_command_lists_what_is_to_be_run(tree: Path) -> None:
    (tree / "fovea/view/new.py").touch()
    listed = run_program([sys.executable, ".ci/suites.py"], cwd=tree).stdout.splitlines()
    (tree / "fovea/view/new.py").unlink()
    states = dict.fromkeys(EVERYTHING, "unchanged since it passed") | {"browser": "changed"}
    assert dict(line.split(": ") for line in listed) == states
    (tree / "fovea/view/server.py").rename(tree / "fovea/view/renamed.py")
    assert to_be_run(tree) == {"browser"}
    (tree / "fovea/view/renamed.py").rename(tree / "fovea/view/server.py")


def test_a_missing_and_a_forged_line_run_the_suite(tree: Path) -> None:
    record = tree / ".ci/passed"
    lines = record.read_text().splitlines(keepends=True)
    vllm = next(line for line in lines if line.startswith("vllm "))
    others = [line for line in lines if line != vllm]
    sglang = next(line for line in lines if line.startswith("sglang "))
    zeros = f"vllm {'0' * 64}\n"
    for forged in ("", "vllm passed\n", zeros, sglang.replace("sglang", "vllm"), vllm + zeros):
        record.write_text("".join([*others, forged]))
        assert to_be_run(tree) == {"vllm"}, forged
    record.unlink()
    assert to_be_run(tree) == EVERYTHING


def test_a_suite_that_fails_or_whose_files_change_meanwhile_is_not_noted(tree: Path) -> None:
    file = tree / "fovea/view/server.py"
    before = file.read_bytes()
    file.write_bytes(before + MORE)
    assert suites(tree, "run", "browser", "false") == 1
    assert to_be_run(tree) == {"browser"}
    assert suites(tree, "run", "browser", "sh", "-c", f"echo meanwhile = 1 >> {file}") == 0
    assert to_be_run(tree) == {"browser"}
    assert suites(tree, "run", "browser", "true") == 0
    assert to_be_run(tree) == set()
    file.write_bytes(before)


def test_every_test_of_a_suite_is_among_its_files(tree: Path) -> None:
    marked = {
        (suite, file)
        for folder in ("tests", "gym/gym_tests")
        for file in (tree / folder).rglob("test_*.py")
        for suite in EVERYTHING
        if re.search(rf"pytest\.mark\.{suite}\b", file.read_text()) or (suite in MARKED and MARKED[suite] in str(file))
    }
    assert {suite for suite, _ in marked} == EVERYTHING - {"talk", *WITHOUT_SMOKE}
    covered = {suite: SUITES.files_of(suite, tree) for suite in EVERYTHING}
    left_out = [(suite, str(file)) for suite, file in sorted(marked) if file not in covered[suite]]
    assert left_out == []


def test_a_name_that_finds_no_file_is_an_error(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tree / "examples/talk").rename(tree / "fovea/moved")
    assert suites(tree, "unchanged", "talk") == 1
    assert "suite talk covers examples/talk, which does not match any file" in capfd.readouterr().err
    (tree / "fovea/moved").rename(tree / "examples/talk")
    assert suites(tree, "unchanged", "speech") == 1
    assert "unknown suite 'speech'; choose from vllm," in capfd.readouterr().err


def test_ci_runs_smoke_tests_of_what_has_not_changed(tree: Path, tmp_path: Path) -> None:
    """With a `make` that notes its targets."""
    for name, script in {"make": f'echo "$*" >> {tmp_path}/made', "chromium": "", "apt-get": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tree / ".ci/passed").write_text(re.sub(r"(?m)^(sglang|oldest) .*\n", "", (tree / ".ci/passed").read_text()))
    done = run_program([tree / ".ci/run"], {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout
    made = (tmp_path / "made").read_text().splitlines()
    assert {"test", "lint", "test-slow", "test-sglang", "test-oldest"} <= set(made)
    smoke = {f"test-{suite} SMOKE=1" for suite in EVERYTHING - WITHOUT_SMOKE - {"sglang"}}
    assert {line for line in made if "SMOKE=1" in line} == smoke
    assert not {f"test-{suite}" for suite in EVERYTHING - {"sglang", "oldest"}} & set(made)
    assert "vllm (smoke): passed" in done.stdout
    assert "newest: not run: unchanged since it passed" in done.stdout


def test_the_oldest_and_newest_versions_are_the_bounds_of_the_package() -> None:
    """Whoever moves a bound of torch moves a file that the suites cover."""
    (bounds,) = re.findall(r'"torch>=(\d+\.\d+),<(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())
    oldest, newest = (
        re.findall(r"(?m)^torch==(\d+)\.(\d+)", (ROOT / "requirements" / f"{name}.txt").read_text())[0]
        for name in ("oldest", "newest")
    )
    assert bounds == (".".join(oldest), f"{newest[0]}.{int(newest[1]) + 1}")
