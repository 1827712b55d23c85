"""README and docs: each command is read by the real command line, and run or marked; what they name is there.

A mark is a comment, `# needs a GPU`, behind a command or on the first line of its block.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
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
from fovea_gym.errors import ConfigError
from fovea_tools.importer.docs import page
from fovea_tools.importer.elsewhere import systems
from gym_tests.tables import table
from tests.runs import ROOT, run_program
from tests.warm import run_warm

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {file.name: file.read_text(encoding="utf-8") for file in FILES if file.name != "log.md"}
PAGES |= {f"from-{name}.md": page(system) for name, system in systems().items()}
"""The text of each page by its name, with the generated pages that have commands."""
RUN_BY = {
    ("README.md", "Use it"): "test_docs.py",
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
    assert not [x for x in COMMANDS if not (x.marked or x.run_by or x.runs_here or x.words[0] == "export")]


@pytest.mark.parametrize(
    "command",
    [each for each in OURS if each.runs_here and not each.run_by],
    ids=lambda each: f"{each.page}: {' '.join(each.words)}"[:90],
)
def test_a_short_one_works(command: Command) -> None:
    result = CliRunner().invoke(cli.app, command.fovea or [])
    assert result.exit_code == 0, result.output


def test_a_command_is_taken_apart() -> None:
    line = "node1$ a/fovea data vqa --rows 3 && torchrun -m fovea train x.yaml 'a=[1]' > out.txt &"
    assert list(map(" ".join, split(line))) == ["a/fovea data vqa --rows 3", "torchrun -m fovea train x.yaml a=[1]"]
    command = Command("", "", line, list(split(line))[1], False)
    assert command.fovea == ["train", "x.yaml", "a=[1]"]
    with pytest.raises(Exception, match="No such option: --row"):
        parsed(typer.main.get_command(cli.app), ["data", "vqa", "--row", "3"])


PACKAGES = (ROOT / "fovea", ROOT / "gym/fovea_gym", ROOT / "tools/fovea_tools")
ALL_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = {setting.key.partition(".")[0] for setting in describe() if "." in setting.key}
SETTING = re.compile(r"`(?P<key>[a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`\n]*)?`")
NO_SETTING = re.compile(r"\.(?:py|json|parquet|safetensors)$|\.engine_args\.|^reward_model\.ground_truth$")
"""Names of files, an engine's own arguments, and a column of verl's."""
FILE = re.compile(r"`(?P<path>[\w./-]+/[\w.-]+\.(?:py|yaml|md|lock))(?:::(?P<test>\w+))?`")
LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?:#[^)\s]*)?\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PLACEHOLDERS = ("NAME", "path/to/", "docs/from-")


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


@cache
def functions_of(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def place(path: str, page: Path) -> Path | None:
    """The file that a page names from the root, from the package or from its own folder; None if there is none."""
    return next((root / path for root in (ROOT, *PACKAGES, page.parent) if (root / path).exists()), None)


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """But for the log, which names files and settings of its dates."""
    missing = []
    for found in FILE.finditer(prose(page)):
        file = place(found["path"], page)
        if any(word in found["path"] for word in PLACEHOLDERS):
            continue
        if file is None or (found["test"] is not None and found["test"] not in functions_of(file)):
            missing.append(found.group())
    for key in sorted({found["key"] for found in SETTING.finditer(prose(page))}):
        if key.partition(".")[0] in SECTIONS and not NO_SETTING.search(key):
            try:
                describe(key)
            except ConfigError as error:
                missing.append(str(error))
    assert missing == []


def test_every_fault_names_a_test() -> None:
    text = (ROOT / "docs/faults.md").read_text()
    rows = re.findall(r"^\| (?!fault|out of memory in|code|---|\d).*$", text, re.MULTILINE)
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+` \|$", row)] == []


def test_the_documents_are_short_and_every_page_is_in_the_menu_and_linked_from_another() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in ALL_PAGES}
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert [page.name for page in (ROOT / "docs/decisions").glob("*.md") if words[page] > 250] == []
    assert words[ROOT / "README.md"] <= 900
    assert sum(words[page] for page in pages if page.name != "log.md") <= 40_000
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    links = [(page, page.parent / found["path"]) for page in ALL_PAGES for found in LINK.finditer(prose(page))]
    assert [(page.name, path.name) for page, path in links if not path.exists()] == []
    linked = {path.resolve() for _, path in links}
    assert [page.name for page in pages if not re.search(rf"\b{re.escape(page.name)}$", menu, re.MULTILINE)] == []
    assert [page.name for page in pages if page not in linked] == []


def test_the_list_of_files_for_a_new_part_names_what_they_hold() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w* ?\| `(fovea/[a-z_/]+\.py)` \| (.*) \|$", page, re.MULTILINE)
    named = [(path, name) for path, change in rows for name in re.findall(r"`([\w.]+)`", change)]
    assert len(named) > 5
    assert [pair for pair in named if pair[1] not in (ROOT / pair[0]).read_text(encoding="utf-8")] == []


def lines_below(heading: str) -> list[str]:
    """The lines of the README's blocks below a heading, each whole."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", readme.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    return [line for line in "".join(blocks).replace("\\\n", " ").splitlines() if line]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def paste(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command, *words = shlex.split(line, comments=True)
    if command == ".venv/bin/fovea":
        return run_warm(["tests.readme_command", *words], environment, timeout=300, cwd=folder)
    return run_program(["sh", "-c", line], environment, seconds=300, cwd=folder)


@pytest.mark.slow
def test_the_demo_ends_with_commands_that_work(folder: Path) -> None:
    # without make's messages about folders where the tests themselves run under make
    planned = run_program(["make", "--dry-run", "--no-print-directory", "demo"])
    done = paste(planned.stdout.splitlines()[-1], folder)
    commands = done.stdout.partition("next:\n")[2].splitlines()
    assert len(commands) == 3, done.stdout + done.stderr
    assert [line for line in commands if paste(line, folder).returncode != 0] == []


@pytest.mark.slow
def test_every_line_works_after_those_above_it(folder: Path) -> None:
    """In the README's order and in one folder, as a newcomer pastes them; only sizes are smaller."""
    done = [paste(line, folder) for line in lines_below("Use it")]
    assert len(done) > 15
    assert [each for each in done if each.returncode or "Traceback" in each.stderr] == []


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "notebooks/own_reward.ipynb"])
def test_the_first_reward_that_a_page_shows_is_exact(page: str) -> None:
    """A model learns to write all answers in a row where the right one among them is enough."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "text.strip() == task.answer" in text
    assert not re.search(r"float\(task\.answer in text|images: task\.answer in text", text)


def test_the_commands_for_a_real_model_have_settings_that_there_are(folder: Path) -> None:
    (train,) = [line for line in lines_below("A real model on Geometry3K") if " train " in line]
    done = paste(train.replace(" train ", " config "), folder)
    assert done.returncode == 0, done.stderr
