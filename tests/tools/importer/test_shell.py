"""Scripts are read as bash reads them; bash itself is asked where it is there."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fovea.tools.importer.shell import words_of

SCRIPTS = {
    "quotes": """a.b='x "y" $Z' a.c="q 'r'" a.d=[\\'console\\',\\'wandb\\']""",
    "line breaks": "a.b=1 \\\n  a.c=2 \\\n  a.d=3",
    "variables": 'ENGINE=vllm\nROOT="/data"; a.b=$ENGINE a.c=${ROOT}/x a.d="$ROOT"/y',
    "defaults": 'a.b=${1:-vllm} a.c=${NOT_SET_HERE:-"${ALSO_NOT:-deep}/model"} a.d=${NOT_SET-}',
    "sums": "LONGEST=$((1024 * 4))\na.b=$LONGEST a.c=$((LONGEST + 2048)) a.d=$(( ($LONGEST - 96) / 2 ))",
    "regular expressions": "a.b='.*visual.*' a.c=\\$name",
    "all arguments": "a.b=1 $@",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_words_are_those_of_bash(script: str) -> None:
    """The settings of a script, which bash prints one a line in the place of running a command with them."""
    lines = script.replace("\\\n", " ").splitlines()
    shown = [f"printf '%s\\n' {line}" if line.lstrip().startswith("a.b") else line for line in lines]
    shown = [line.replace("; a.b", "; printf '%s\\n' a.b") for line in shown]
    done = subprocess.run(["bash", "-c", "\n".join(shown)], capture_output=True, text=True, check=True)
    assert [word.text for word in words_of(script) if word.text.startswith("a.")] == done.stdout.splitlines()


def test_words_know_their_lines() -> None:
    script = "set -x\n# a.b=0 is a remark\npython3 -m main \\\n  a.b=1 \\\n  a.c=2  # the last\n"
    found = {word.text: word.line for word in words_of(script)}
    assert (found["a.b=1"], found["a.c=2"]) == (4, 5)
    assert "a.b=0" not in found


def test_settings_of_an_array_are_read_where_it_is_written() -> None:
    script = 'DATA=(\n  data.train_batch_size=8\n)\npython3 -m main "${DATA[@]}" trainer.nnodes=1\n'
    settings = [word.text for word in words_of(script) if "." in word.text.partition("=")[0] and "=" in word.text]
    assert settings == ["data.train_batch_size=8", "trainer.nnodes=1"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("a.b=$NOT_SET_ANYWHERE", "$NOT_SET_ANYWHERE is set nowhere"),
        ("a.b=$A_KEY", "$A_KEY is set only in the environment, which a recipe does not show"),
        ("a.b=$(nproc)", "$(nproc) is a command, and none is run"),
        ("a.b=`nproc`", "`nproc` is a command, and none is run"),
        ("if true; then N=1; else N=2; fi; a.b=$N", "$N is set to different values"),
        ("N=$(nproc)\na.b=$N", "$(nproc) is a command, and none is run"),
        ("a.b=$((2 ** 9))", "$((2 ** 9)) is not a sum of known numbers"),
        ("a.b=${NAME//x/y}", "${NAME//x/y} is unread"),
    ],
)
def test_what_only_running_it_would_tell_is_unread(script: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "hunter2")
    (word,) = [word for word in words_of(script) if word.text.startswith("a.b=")]
    assert word.unread == reason
    assert "hunter2" not in word.text


def test_the_environment_gives_folders_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("A_KEY", "hunter2")
    assert [word.text for word in words_of("a.b=$HOME/data a.c=${A_KEY:-none}")] == ["a.b=/home/ann/data", "a.c=none"]


@pytest.mark.parametrize("script", ["a.b='x", 'a.b="x', "a.b=${x", "a.b=$((1", "a.b=$(x", "a.b=\\", "a.b=$", "a.b=`x"])
def test_a_script_that_breaks_off_is_read_to_its_end(script: str) -> None:
    assert words_of(script)
