"""The commands of the gym: `python -m fovea_gym grade geo3k answers.jsonl` and `python -m fovea_gym show shapes`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fovea_gym.errors import FoveaError
from fovea_gym.utils.shown_text import printable, without_secrets


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; a FoveaError is printed in one line on stderr."""
    options = _parser().parse_args(words)
    command = _grade if options.command == "grade" else _show
    try:
        command(options)
        sys.stdout.flush()
    except FoveaError as error:
        return _failed(" ".join(str(error).split()), error.exit_code)
    except BrokenPipeError:  # a reader such as `head` has closed the pipe: discard the rest of the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _failed(f"{error.filename or 'a file'}: {error.strerror or error}", 2)
    except KeyboardInterrupt:
        return _failed("stopped", 130)
    return 0


def _failed(text: str, exit_code: int) -> int:
    print(f"error: {printable(without_secrets(text))}", file=sys.stderr)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fovea_gym", description="Visual tasks without a trainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "Score a JSONL file of rows with `prediction` (the whole completion) and `truth`, line by line."
    grade = commands.add_parser("grade", help="score a file of answers", description=text)
    grade.add_argument("environment", help="a grader, such as geo3k; an unknown name lists all graders")
    grade.add_argument("file", type=Path, metavar="FILE", help="rows in JSONL; - is stdin")
    grade.add_argument("--out", type=Path, metavar="FILE", help="write rows here, and the summary to stdout")
    text = "Write rows of an environment as a page of HTML: pictures, prompts and gold answers."
    show = commands.add_parser("show", help="show rows of an environment on a page", description=text)
    show.add_argument("environment", help="an environment, such as shapes or geo3k")
    show.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the environment, such as level=2")
    show.add_argument("--split", choices=("train", "dev", "test"), default="train")
    show.add_argument("--rows", type=int, default=12, help="maximum number of rows; default 12")
    show.add_argument("--seed", type=int, default=0, help="seed of environments that generate their rows")
    show.add_argument("--out", type=Path, metavar="FILE", help="default: ENVIRONMENT.html")
    return parser


def _grade(options: argparse.Namespace) -> None:
    from fovea_gym.commands.grade import check_files, grade_file
    from fovea_gym.graders.by_name import check_grader

    check_grader(options.environment)
    file = Path("/dev/stdin") if str(options.file) == "-" else options.file
    check_files(options.environment, file, options.out)
    if options.out is None:
        summary = grade_file(options.environment, file, sys.stdout.buffer.write)
        sys.stdout.flush()
        print(json.dumps(asdict(summary)), file=sys.stderr)
    else:
        with options.out.open("wb") as lines:
            summary = grade_file(options.environment, file, lines.write)
        print(json.dumps(asdict(summary)))


def _show(options: argparse.Namespace) -> None:
    # pydantic would search the metadata of every installed package for plugins, which takes time
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from fovea_gym.commands.show import page_of
    from fovea_gym.making import make, settings_of
    from fovea_gym.rows.opening import default_opener

    settings = settings_of(options.settings) if options.settings else {}
    environment = make(options.environment, seed=options.seed, **settings)
    title = " ".join([options.environment, *options.settings])
    out = options.out or Path(f"{options.environment}.html")
    out.write_text(page_of(environment, title, options.split, options.rows, default_opener()), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    sys.exit(main())
