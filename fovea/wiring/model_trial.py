"""Trial of a model folder's tokenizer, processor and chat template, in a child process that can be killed.

A template from a stranger may loop forever, and a tokenizer may expand a text until memory runs out, in code that no
exception can stop. Files that pass the trial are then used in this process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.processor import load_processor
from fovea.models.render import Renderer
from fovea.models.reward_scorer import encoded_answer, load_reward_tokenizer
from fovea_gym.errors import FoveaError, first_line
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef, Message

CPU_SECONDS = 60
"""Limit of CPU time for all steps together; an ordinary folder takes one or two seconds."""
WALL_SECONDS = 300.0
"""Limit of wall time, long enough for a busy machine."""
MEMORY_BYTES = 4 * 2**30
"""Limit of memory that the trial adds to the process; tokenizers of 260,000 entries take a quarter of it."""
MOST_TOKENS, MOST_CHARACTERS = 20_000, 200_000
"""Limits for a question of one line about a small image; tiles and thumbnails take a few thousand tokens."""
FAULT = "fault: "
LOADING = "the tokenizer or the processor (tokenizer.json, preprocessor_config.json)"
WRITING = "the chat template (chat_template.jinja)"
READING = "the tokenizer or the processor, on a question with a picture (tokenizer.json, preprocessor_config.json),"
FIX = "correct that file, download the model again, or give another folder"
QUESTION = f"How many? {''.join(map(chr, range(32, 127))).replace('<', '')} é ß 雪 🙂\n\tIt's 3."


def try_model(settings: Model) -> None:
    """ModelError if the tokenizer, processor or chat template of a model fails on an image, or does not end.

    A process tries a folder once, until its files change.
    """
    _try_model(settings.model_dump_json(), _files_of(str(settings.path)))


def try_scorer(path: str) -> None:
    """ModelError if the tokenizer or chat template of a text reward model fails on an answer, or does not end."""
    _try_scorer(path, _files_of(path))


@lru_cache(maxsize=64)
def _try_model(given: str, _files: tuple[tuple[str, int, int], ...]) -> None:
    settings = Model.model_validate_json(given)
    _in_child(partial(_steps, settings), f"model.path={settings.path}")


@lru_cache(maxsize=64)
def _try_scorer(path: str, _files: tuple[tuple[str, int, int], ...]) -> None:
    _in_child(partial(_steps_of_scorer, path), f"reward_model.path={path}")


def _files_of(path: str) -> tuple[tuple[str, int, int], ...]:
    """Name, modification time and size of each file that a trial reads."""
    return tuple(sorted((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in Path(path).glob("*.j*")))


def _in_child(steps: Callable[[str], Iterator[str]], where: str) -> None:
    """Run all steps in a child process; ModelError, which begins with `where`, if one fails or does not end."""
    # a forked process has all packages already; a new one would take ten seconds to import them
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_trial, args=(steps, where, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads during a fork; the trial needs no threads
        child.start()
    theirs.close()
    try:
        child.join(WALL_SECONDS)
    finally:
        child.kill()
        child.join()
    lines: list[str] = []
    with ours, suppress(EOFError):
        while ours.poll():
            lines.append(ours.recv())
    if faults := [line.removeprefix(FAULT) for line in lines if line.startswith(FAULT)]:
        raise ModelError(faults[-1])
    if child.exitcode == 0:
        return
    step = lines[-1] if lines else "the trial of its files"
    late = child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
    end = f"did not end within {CPU_SECONDS} s" if late else f"ended its process (exit code {child.exitcode})"
    raise ModelError(f"{where}: {step} {end}; {FIX}")


def _trial(steps: Callable[[str], Iterator[str]], where: str, tell: Connection) -> None:
    """In the child: run all steps, and send the name of each step, and a fault if there is one."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    faulthandler.disable()  # the trial expects aborts, so they need no traceback
    torch.set_num_threads(1)  # the threads of the parent do not exist after the fork
    _limit()
    step = LOADING
    try:
        for step in steps(where):
            tell.send(step)
    except FoveaError as error:
        tell.send(FAULT + (str(error) if where in str(error) else f"{where}: {error}"))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        named = WRITING if any(frame.filename == "<template>" for frame in frames) else step
        match error:
            case _LateError():
                fault = f"did not end within {CPU_SECONDS} s"
            case MemoryError():
                fault = f"takes more than {MEMORY_BYTES >> 30} GiB of memory"
            case _:
                fault = f"fails on a question of one line ({first_line(error)})"
        tell.send(f"{FAULT}{where}: {named} {fault}; {FIX}")


def _steps(settings: Model, where: str) -> Iterator[str]:
    """Load and use the files under trial; yields the name of each step before it begins."""
    yield LOADING
    processor = load_processor(settings)
    render = Renderer(processor, ImageOpener(max_image_mib=1, max_image_megapixels=1))
    yield WRITING
    picture = ImageRef(source=np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8))
    asked = [Message(role="user", parts=(picture, "How many?"))]
    text = render.text(asked)
    if len(text) > MOST_CHARACTERS:
        raise ModelError(f"{where}: {WRITING} writes {len(text)} characters for a question of one line; {FIX}")
    yield READING
    prompt = render.prompt(asked, where)
    pads = int((prompt.token_ids_L == processor.family.image_token_id).sum())
    if pads != (wanted := sum(image.num_tokens for image in prompt.images)):
        raise ModelError(
            f"{where}: its prompts have {pads} tokens of image_token_id={processor.family.image_token_id} for a "
            f"picture of {wanted} tokens: config.json does not match tokenizer.json; {FIX}"
        )
    if not all(np.isfinite(x).all() for image in prompt.images for x in image.tensors.values()):
        raise ModelError(f"{where}: its processor makes pixels that are NaN or infinite; {FIX}")
    if prompt.num_tokens > MOST_TOKENS:
        raise ModelError(f"{where}: it makes {prompt.num_tokens} tokens of a question of one line; {FIX}")
    render.prompt([Message(role="user", parts=(picture, QUESTION))], where)
    yield WRITING
    render.observation([Message(role="user", parts=(QUESTION,))], after=processor.stop_ids[-1], where=where)


def _steps_of_scorer(path: str, where: str) -> Iterator[str]:
    """The steps of `_steps` for a reward model that reads only text."""
    yield LOADING
    tokenizer = load_reward_tokenizer(Path(path))
    tokenizer(QUESTION)
    yield WRITING if tokenizer.chat_template is not None else LOADING
    for answer in ("4", QUESTION):
        num_tokens = encoded_answer(tokenizer, "How many?", answer)["input_ids"].shape[1]
        if num_tokens > MOST_TOKENS:
            raise ModelError(f"{where}: it makes {num_tokens} tokens of an answer of one line; {FIX}")


class _LateError(Exception):
    """The CPU time is used up."""


def _raise_late(_signal: int, _frame: object) -> None:
    raise _LateError


def _limit() -> None:
    """Limit the CPU time and memory of this process, beyond what its imports have taken."""
    # Python code gets an exception, whose traceback names the template; compiled code is killed five seconds later
    signal.signal(signal.SIGXCPU, _raise_late)
    seconds = CPU_SECONDS + int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    if (pages := Path("/proc/self/statm")).is_file():
        taken = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
