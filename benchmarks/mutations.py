"""Counts how many random small faults (mutants) of the code the tests notice.

    python -m benchmarks.mutations before.json --count 200 --seed 0
    python -m benchmarks.mutations after.json --earlier before.json

Writes all mutants into a copy of the tree (benchmarks/mutants.py) and runs the tests once to record which tests reach
which mutant. Then runs, for each mutant, the tests that reach it until one fails; tests of the mutant's folder and
short tests come first. `--earlier` tests the mutants of an earlier result again, starting with the tests that noticed
them, to show what a change of the tests has lost. A mutant has survived if no test reaches it, or if all tests that
fit into `--seconds` pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue
from xml.etree import ElementTree

from benchmarks.mutants import Mutant, drawn, found_again, mutants_of, write_switches
from benchmarks.printing import as_table, show

ROOT = Path(__file__).parents[1]
COPIED = (
    *(".ci", "fovea", "gym", "tools", "tests", "benchmarks", "recipes", "docs", "notebooks", "requirements"),
    *("docker", "examples", "workflows"),
)
TESTS_OF = {"gym/fovea_gym": "gym/gym_tests", "tools/fovea_tools": "tests/tools", "fovea": "tests"}
"""The packages, each with the folder of its tests, which has the same subfolders."""
MARKERS = "not long and not gpu and not browser and not vllm and not sglang and not megatron"
MAX_TESTS = 250
QUIET = ("-q", "-p", "no:cacheprovider")
EXIT_CODE = "exit code"
HANG_SECONDS = 60
"""Time limit of one test with an active mutant; a test that takes longer counts as hanging."""
FORK = """
import builtins, importlib, json, os, signal, sys, time
import pytest

for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    request = json.loads(line)
    if (child := os.fork()) == 0:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(log, 1), os.dup2(log, 2)
        if request["number"] is not None:
            builtins._mutant_.active = request["number"]
            os.environ["FOVEA_MUTANT"] = str(request["number"])
        code = int(pytest.main(request["words"]))
        sys.stdout.flush()
        os._exit(code)
    end, code = time.monotonic() + request["limit"], None
    while code is None:
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        if code is None and time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)  # processes that it has left behind
    except ProcessLookupError:
        pass
    print(code, flush=True)
"""
"""The program of a process that forks for each request; a new process would spend five seconds on imports."""
PRODUCT = ("fovea.wiring.run", "fovea.cli.main", "fovea.loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one mutant."""

    mutant: Mutant
    ended: str
    """`killed`, `survived`, `unreached`, or `gone` if its code no longer exists."""
    by: str = ""
    """The test that failed."""
    tests: int = 0
    """Number of tests that reach the mutant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The results of a run of all tests without an active mutant."""

    tests_of: Mapping[int, Sequence[str]]
    """The tests that reach each mutant, by the mutant's number."""
    seconds: Mapping[str, float]
    """Time of each test that passed; only these are run against mutants."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the JSON file to write")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--earlier", type=Path, help="an earlier result: test its mutants again")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to mutate and test")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutations", help="folder for the copy")
    parser.add_argument("--markers", default=MARKERS, help="which tests to run, as for pytest's -m")
    parser.add_argument("--again", action="store_true", help="use the copy that an interrupted call has left there")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="maximum seconds of tests for one mutant")
    options = parser.parse_args(arguments)

    earlier = read(options.earlier) if options.earlier else []
    mutants = chosen(options.tree, earlier, options.count, options.seed)
    copy = options.folder / options.tree.name  # keep the name: some tests look at folders next to the checkout
    if not options.again:
        copy_tree(options.tree, copy)
        write_switches(copy, "gym/fovea_gym", mutants)  # all other packages import this one
        run_all(copy, options.markers, options.processes)
    reached = read_reached(copy)
    first = {number: outcome.by for number, outcome in enumerate(earlier)}
    warm = Queue[Tests]()
    for _ in range(options.processes):
        warm.put(Tests(copy, PRODUCT))

    def judged(number: int) -> Outcome:
        process = warm.get()
        try:
            return judge(process, number, mutants[number], earlier, reached, first.get(number, ""), options.seconds)
        finally:
            warm.put(process)

    with ThreadPoolExecutor(options.processes) as pool:
        outcomes = list(pool.map(judged, range(len(mutants))))
    options.result.write_text(json.dumps([asdict(each) for each in outcomes], indent=1), encoding="utf-8")
    report(outcomes, earlier)


def read(file: Path) -> list[Outcome]:
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [Outcome(**{**row, "mutant": Mutant(**row["mutant"])}) for row in rows]


def chosen(tree: Path, earlier: Sequence[Outcome], count: int, seed: int) -> list[Mutant | None]:
    mutants = [mutant for package in TESTS_OF for mutant in mutants_of(tree, package)]
    if earlier:
        return found_again([each.mutant for each in earlier], mutants)
    return [*drawn(mutants, count, seed)]


def copy_tree(tree: Path, folder: Path) -> None:
    """Copy the files that the tests need, and link to the checkout's environments."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in tree.iterdir():
        if source.is_file():
            shutil.copy(source, folder)
        elif source.name in COPIED:
            shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.name.startswith(".venv"):
            (folder / source.name).symlink_to(source.resolve())
    if (tree.parent / "shared").is_dir():
        (folder.parent / "shared").symlink_to((tree.parent / "shared").resolve())


def environment(copy: Path, **more: str) -> dict[str, str]:
    # the copy must come before the installed checkout
    path = os.pathsep.join(map(str, (copy, copy / "gym", copy / "tools")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run_all(copy: Path, markers: str, processes: int) -> None:
    """Run all tests once without an active mutant, and record which tests reach which mutants."""
    hits = copy.parent / "hits"
    hits.mkdir()
    patience = "faulthandler_timeout=1200"  # long enough for a busy machine
    words = ["-n", str(processes), "--dist", "loadfile", "-o", patience, "-m", markers]
    with (copy.parent / "all.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *QUIET, *words, f"--junitxml={copy.parent / 'all.xml'}"],
            cwd=copy,
            env=environment(copy, FOVEA_MUTANT_HITS=str(hits)),
            stdout=log,
            stderr=log,
            check=False,
        )


def read_reached(copy: Path) -> Reached:
    seconds = dict(passed(copy.parent / "all.xml", copy))
    tests: dict[int, set[str]] = {}
    for file in (copy.parent / "hits").iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition("\t")
            name, _, phase = test.rpartition(" (")
            module = name.partition("::")[0]
            # a mutant that a module's fixture reaches counts as reached by all of the module's tests
            names = [name] if phase != "setup)" else [each for each in seconds if each.startswith(module)]
            tests.setdefault(int(number), set()).update(names)
    return Reached(
        tests_of={number: sorted(names & seconds.keys()) for number, names in tests.items()}, seconds=seconds
    )


def passed(report: Path, copy: Path) -> Iterator[tuple[str, float]]:
    """Yield the names, as pytest accepts them, and the seconds of the tests that passed."""
    for case in ElementTree.parse(report).iter("testcase"):
        if not list(case):
            parts = case.attrib["classname"].split(".")
            cut = next(at for at in range(len(parts), 0, -1) if (copy / Path(*parts[:at])).with_suffix(".py").is_file())
            file = Path(*parts[:cut]).with_suffix(".py").as_posix()
            yield "::".join([file, *parts[cut:], case.attrib["name"]]), float(case.attrib["time"])


def judge(
    process: Tests,
    number: int,
    mutant: Mutant | None,
    earlier: Sequence[Outcome],
    reached: Reached,
    first: str,
    seconds: float,
) -> Outcome:
    """Run the tests that reach a mutant with this mutant active; returns the outcome."""
    if mutant is None:
        return replace(earlier[number], ended="gone", by="")
    tests = reached.tests_of.get(number, [])
    if not tests:
        return Outcome(mutant=mutant, ended="unreached")
    package = next(each for each in TESTS_OF if mutant.file.startswith(f"{each}/"))
    folder = mutant.file.replace(package, TESTS_OF[package], 1).rpartition("/")[0]
    order = sorted(tests, key=lambda x: (x != first, not x.startswith(folder), reached.seconds[x]))
    taken: list[str] = []
    total = 0.0
    for test in order[:MAX_TESTS]:
        total += reached.seconds[test]
        if taken and total > seconds:
            break
        taken.append(test)
    patience, log = f"faulthandler_timeout={HANG_SECONDS}", f"mutant-{number}.log"
    by = process.first_failure(["-o", patience, *taken], log, limit_seconds=60 + 4 * total, number=number)
    return Outcome(mutant=mutant, ended="killed" if by else "survived", by=by, tests=len(tests))


class Tests:
    """Runs tests of the copy in a process that imports these modules once and forks for each call."""

    def __init__(self, copy: Path, modules: Sequence[str], python: str = sys.executable) -> None:
        self._folder = copy.parent
        self._process = subprocess.Popen(
            [python, "-c", FORK, *modules],
            cwd=copy,
            env=environment(copy),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def first_failure(
        self, words: Sequence[str], log_name: str, *, limit_seconds: float, number: int | None = None
    ) -> str:
        """Run tests with mutant `number` active; returns the first that fails or hangs, empty if all pass."""
        log = self._folder / log_name
        words = [*QUIET, "-x", "--tb=no", "-rfE", *words]
        request = {"number": number, "words": words, "log": str(log), "limit": limit_seconds}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        if code == 0:
            return ""
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        # ids may contain spaces; the message follows after " - "
        return failed[0].partition(" - ")[0] if failed else f"{EXIT_CODE} {code}"


def report(outcomes: Sequence[Outcome], earlier: Sequence[Outcome]) -> None:
    """Print the counts, the survivors, and the mutants that were noticed earlier but are not noticed any more."""
    ends = Counter(each.ended for each in outcomes)
    counts = ((ended, str(ends[ended])) for ended in ("killed", "survived", "unreached", "gone"))
    survivors = (
        (f"{each.mutant.file}:{each.mutant.line}", each.mutant.original[:60], each.mutant.mutated[:60], str(each.tests))
        for each in outcomes
        if each.ended in ("survived", "unreached")
    )
    show(as_table("mutants", ("ended", "mutants"), counts))
    show(as_table("survivors", ("place", "original", "mutant", "tests"), survivors, num_left=3))
    lost = [
        f"{now.mutant.file}:{now.mutant.line} {now.mutant.mutated}: was noticed by {before.by}"
        for before, now in zip(earlier, outcomes, strict=False)
        if before.ended == "killed" and now.ended in ("survived", "unreached")
    ]
    print(f"noticed earlier but not now: {len(lost)}", *lost, sep="\n")


if __name__ == "__main__":
    main()
