"""Every command of README and docs is read by the real command line, and run by a test or marked with what it needs.

A mark is a comment, `# needs a GPU`, behind a command or on the first line of its block.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from fovea.cli import main as cli
from fovea.cli.evaluate import BENCHMARK
from fovea.cli.texts import sort_words
from fovea.commands.benchmarks import chosen
from fovea.config.describe import describe
from fovea.config.loading import load_config
from fovea_tools.importer.docs import page
from fovea_tools.importer.elsewhere import systems
from gym_tests.tables import table

ROOT = Path(__file__).parent.parent
HISTORY = {"log.md"}
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {file.name: file.read_text(encoding="utf-8") for file in FILES if file.name not in HISTORY}
PAGES |= {f"from-{name}.md": page(system) for name, system in systems().items()}
"""The text of each page by its name, with the generated pages that have commands."""
RUN_BY = {
    ("README.md", "Use it"): "test_readme.py",
    ("own.md", None): "test_own_runs.py",
    ("turns.md", None): "test_own_runs.py",
    ("agents.md", "gymnasium"): "test_own_runs.py",
    ("gym.md", "See rows, grade answers"): "test_gym_page.py",
}
"""The tests that run all commands below a heading, or of a page."""
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"(?:node\d\$ )?(?:\S*/)?(?P<name>fovea|python3?|pip|make|torchrun|docker|export|printf|jq)\s")
MARK = re.compile(r"(?:^|\s)# .*\bneeds\b")
COMMENT = re.compile(r"(?:^|\s+)#\s.*$")
SHOWN_AT_ONCE = {"config", "recipes", "plan"}
"""Commands that take a second and write nothing."""
HARMLESS = {"export"}
OVER, UNTIL = {"train", "plan", "config", "doctor"}, {"eval", "export"}
"""Commands that take recipes and settings; those that take settings of a run."""


class Command(NamedTuple):
    page: str
    heading: str
    line: str
    """One line of a block, without its comment."""
    words: list[str]
    """One command of that line."""
    marked: bool

    @property
    def fovea(self) -> list[str] | None:
        """The arguments of `fovea`, however it is started."""
        if Path(self.words[0]).name == "fovea":
            return self.words[1:]
        place = next((at for at, pair in enumerate(pairwise(self.words)) if pair == ("-m", "fovea")), None)
        return None if place is None else self.words[place + 2 :]

    @property
    def run_by(self) -> str | None:
        return RUN_BY.get((self.page, self.heading)) or RUN_BY.get((self.page, None))

    @property
    def runs_here(self) -> bool:
        words = self.fovea
        return not self.marked and words is not None and (words[0] in SHOWN_AT_ONCE or "--dry-run" in words)


def commands_of(page: str, text: str) -> Iterator[Command]:
    for block in BLOCK.finditer(text):
        lines = block["text"].replace("\\\n", " ").splitlines()
        first = next((line for line in lines if not line.startswith("#")), "")
        if block["language"] not in ("bash", "sh") and (block["language"] or not PROGRAM.match(first)):
            continue
        heading = re.findall(r"^#+ (.*)$", text[: block.start()], re.MULTILINE)[-1]
        for line in lines:
            bare = COMMENT.sub("", line)
            marked = any(MARK.search(each) for each in (lines[0], line))
            yield from (Command(page, heading, bare, words, marked) for words in split(bare))


def split(line: str) -> Iterator[list[str]]:
    """The commands of a line, without prompt, redirections and what keeps them apart."""
    lexer = shlex.shlex(re.sub(r"^node\d\$ ", "", line), posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    for token in [*lexer, ";"]:
        if token in ("&&", "|", ";", "&"):
            if words:
                yield words[: words.index(">")] if ">" in words else words
            words = []
        else:
            words.append(token)


COMMANDS = [command for name, text in PAGES.items() for command in commands_of(name, text)]
OURS = [command for command in COMMANDS if command.fovea is not None]


def name_of(command: Command) -> str:
    return f"{command.page}: {' '.join(command.words)}"[:90]


def parsed(command: Any, words: list[str], context: Any = None) -> None:
    inner = command.make_context(command.name, list(words), parent=context)
    # one that a package adds makes the context of the package's own command
    command = inner.command
    if isinstance(command, TyperGroup):
        _, found, rest = command.resolve_command(inner, [*inner._protected_args, *inner.args])
        parsed(found, rest, inner)


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@table("command", OURS)
def test_the_command_line_takes_it(command: Command) -> None:
    words = command.fovea
    assert words
    parsed(typer.main.get_command(cli.app), words)
    arguments = [word for word in words[1:] if not word.startswith("-")]
    if words[0] in OVER and command.run_by is None and any("/" in word or "=" in word for word in arguments):
        recipes, overrides = sort_words([word for word in arguments if word != "algorithm"])
        load_config(recipes, overrides)
    if words[0] in UNTIL:
        settings = [word for word in arguments if re.match(r"[a-z_.]+=", word)]
        benchmarks = [word for word in settings if BENCHMARK.match(word)]
        assert not benchmarks or chosen(benchmarks)
        assert all(describe(word.partition("=")[0]) for word in settings if word not in benchmarks)


@table("command", [each for each in COMMANDS if each not in OURS])
def test_what_it_names_of_ours_is_there(command: Command) -> None:
    words = command.words
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:2]) <= set(targets)
    for module in (after for word, after in pairwise(words) if word == "-m" and after.startswith("benchmarks.")):
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        options = [word for word in words[words.index(module) :] if word.startswith("--")]
        assert all(f'"{option}"' in source for option in options)


def test_every_command_is_run_or_says_what_it_needs() -> None:
    loose = [
        name_of(each)
        for each in COMMANDS
        if not (each.marked or each.run_by or each.runs_here or each.words[0] in HARMLESS)
    ]
    assert not loose


@pytest.mark.parametrize("command", [each for each in OURS if each.runs_here and not each.run_by], ids=name_of)
def test_a_short_one_works(command: Command) -> None:
    result = CliRunner().invoke(cli.app, command.fovea or [])
    assert result.exit_code == 0, result.output


def test_a_command_is_taken_apart() -> None:
    line = "node1$ a/fovea data vqa --rows 3 && torchrun -m fovea train x.yaml 'a=[1]' > out.txt &"
    assert list(split(line)) == [
        ["a/fovea", "data", "vqa", "--rows", "3"],
        ["torchrun", "-m", "fovea", "train", "x.yaml", "a=[1]"],
    ]
    command = Command("", "", line, list(split(line))[1], False)
    assert command.fovea == ["train", "x.yaml", "a=[1]"]
    with pytest.raises(Exception, match="No such option: --row"):
        parsed(typer.main.get_command(cli.app), ["data", "vqa", "--row", "3"])
