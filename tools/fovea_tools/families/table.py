"""`fovea doctor --families`: checks tiny models and prints the table of tested model types, docs/models.md."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import numpy as np
import torch

from fovea.commands.exporting.export import export
from fovea.config.model import Model, TinyModel
from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.families.auto import layout_of
from fovea.models.families.hub_processor import HubProcessor, load_hub_processor, processor_class
from fovea.models.families.named import NamedFamily
from fovea.models.families.registry import FAMILIES
from fovea.models.load import load_network
from fovea.models.modules import config_of
from fovea.models.processor import Processor, load_processor
from fovea.models.render import Renderer
from fovea.models.tiny import CLASS_NAME, make_tiny, save_tiny
from fovea.rollout.checks import TESTED_FAMILIES
from fovea.train.model_division import FAMILIES as MEGATRON_FAMILIES
from fovea.train.start_check import Reference, StartCheck
from fovea.wiring.model import make_vlm
from fovea.wiring.run import build
from fovea_gym.errors import ConfigError, FoveaError, first_line
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef, Message, Score, Task, Turn
from fovea_tools.families.tiny import KINDS, save_tiny_kind

COLUMNS = (
    *("path", "ids, tensors, log-probs equal", "gradients equal", "20 GRPO steps raise the reward"),
    *("export reloads", "vLLM", "SGLang", "Megatron"),
)
TOLERANCE = 2e-5
"""Largest difference of log-probs in float32, and of gradients relative to the norm of all gradients."""
ABOUT = (
    "`fovea doctor --families > docs/models.md` writes this page: it makes a tiny model with random weights per type "
    "and checks it on a CPU. Path `fast`: packed rows with shared prompts, and the embedded engine; `plain`: "
    "transformers' own forward of a named family, with the reason; `auto`: the same with `model.family=auto`. For "
    f"prompts with two, one and no images, log-probs equal those of transformers within {TOLERANCE:g}, and gradients "
    f"within {TOLERANCE:g} of their norm. MiMo-VL is a `qwen2_5_vl`, GLM-4.5V a `glm4v_moe`, SmolVLM2 a `smolvlm`. "
    "vLLM, SGLang and Megatron refuse types that they were not tested with ([log](log.md#2026-11-27-named-families))."
)
STEPS, WANTED = 20, "e"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedType:
    """A model type's row of the table."""

    model_type: str
    cells: tuple[str, ...]
    """Cells in the order of `COLUMNS`; `no: ...` with the reason if a check failed."""

    @property
    def passed(self) -> bool:
        return not any(cell.startswith("no:") for cell in self.cells)


def model_types() -> tuple[str, ...]:
    """All `model_type`s of which a tiny model can be made."""
    return (*CLASS_NAME, *KINDS)


def check_types(types: Sequence[str], say: Say) -> Iterator[TestedType]:
    """Check each type and yield its row; `say` gets a line before each check."""
    for model_type in types:
        say(f"checking {model_type}")
        with TemporaryDirectory(prefix="fovea-families-") as folder:
            yield TestedType(model_type=model_type, cells=tuple(_cells(model_type, Path(folder))))


def as_page(rows: Sequence[TestedType]) -> str:
    """The text of docs/models.md."""
    lines = [
        "# Tested model types",
        "",
        fill(ABOUT, width=150),
        "",
        f"| model type | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
        *(f"| {row.model_type} | {' | '.join(row.cells)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def print_families(types: Sequence[str] | None) -> None:
    """Check tiny models of these types, or of all, and print docs/models.md; ConfigError for an unknown type."""
    if unknown := set(types or ()) - set(model_types()):
        raise ConfigError(f"--families {min(unknown)}: not a tested model type; choose from {', '.join(model_types())}")
    rows = list(check_types(types or model_types(), lambda line: print(line, file=sys.stderr, flush=True)))
    print(as_page(rows), end="")


def _cells(model_type: str, folder: Path) -> Iterator[str]:
    settings = _save(model_type, folder / "model")
    yield _path(settings)
    yield _outcome(lambda: _logprobs(settings))
    yield _outcome(lambda: _gradients(settings))
    yield _outcome(lambda: _reward(settings, folder / "run"))
    yield _outcome(lambda: _export(folder))
    yield from ("yes" if model_type in types else "not tested" for types in TESTED_FAMILIES.values())
    yield "yes" if model_type in MEGATRON_FAMILIES else "not tested"


def _path(settings: Model) -> str:
    family = load_processor(settings).family
    if settings.family == "auto" or family.fast_path is not None:
        return "auto" if settings.family == "auto" else "fast"
    return f"plain: {family.plain_reason}" if isinstance(family, NamedFamily) else "plain"


def _outcome(check: Callable[[], str | None]) -> str:
    """Run a check and return its cell; the check returns None, or the reason of its failure."""
    try:
        reason = check()
    except FoveaError as error:
        reason = first_line(error)
    return "yes" if reason is None else f"no: {reason}"


def _save(model_type: str, folder: Path) -> Model:
    if model_type in CLASS_NAME:
        heads: dict[str, Any] = {"family": model_type}
        save_tiny(make_tiny(TinyModel(**heads), _TEXTS, seed=0), folder)
    else:
        save_tiny_kind(model_type, folder, _TEXTS)
    return Model(path=str(folder), device="cpu", family="named" if model_type in FAMILIES else "auto")


def _check_of(settings: Model) -> tuple[StartCheck, Any, Any]:
    """The check, the trainer's network, and transformers' network."""
    processor, ours, theirs = load_processor(settings), load_network(settings), load_network(settings)
    config = Config.model_validate({"model": settings.model_dump()})
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=1)
    config_theirs = config_of(theirs)
    reference = Reference(
        network=theirs,
        processor=_processor_of(processor, config_theirs, str(settings.path)),
        arguments=layout_of(config_theirs).arguments,
    )
    vlm = make_vlm(config, ours, processor.banned_ids)
    return StartCheck(vlm, processor, Renderer(processor, opener), opener, reference), ours, theirs


def _processor_of(processor: Processor, config: Any, path: str) -> HubProcessor:
    """transformers' processor of the model, or the family's, if it has one that needs fewer packages."""
    if isinstance(processor.image_processor, HubProcessor):
        return processor.image_processor
    return load_hub_processor(processor_class(config, path), path, "main")


def _picture(seed: int, width: int) -> ImageRef:
    return ImageRef(source=np.random.default_rng(seed).integers(0, 256, (48, width, 3), dtype=np.uint8))


_TEXTS = ["How many circles are there?", "Say it again, please."] * 10
_ROWS = [
    [Message(role="user", parts=parts)]
    for parts in (
        ("How many circles are there?",),
        (_picture(1, 48), "How many circles?"),
        ("Compare\n\n", _picture(2, 64), " with ", _picture(3, 40), "\nnow."),
    )
]


def _logprobs(settings: Model) -> str | None:
    check, _, _ = _check_of(settings)
    largest = check.run(_ROWS)
    return None if largest <= TOLERANCE else f"log-probs differ by {largest:.1g}"


def _gradients(settings: Model) -> str | None:
    check, ours, theirs = _check_of(settings)
    for logprobs in check.logprobs(_ROWS):
        logprobs.sum().backward()
    wanted = {name: x.grad for name, x in theirs.named_parameters() if x.grad is not None}
    found = {name: x.grad for name, x in ours.named_parameters() if x.grad is not None}
    if wanted.keys() != found.keys():
        return f"{min(wanted.keys() ^ found.keys())} has a gradient on one side only"
    norm = torch.stack([x.norm() for x in wanted.values()]).norm()
    difference = max(float((found[name] - x).norm() / norm) for name, x in wanted.items())
    return None if difference <= TOLERANCE else f"gradients differ by {difference:.1g}"


class Letters:
    """Rewards the share of one letter in the answer, which a model with random weights writes now and then."""

    max_turns = 1

    def tasks(self, split: str) -> list[Task]:
        return [
            Task(id=f"{split}/{seed}", question="Say it.", answer=WANTED, images=(_picture(seed, 48),))
            for seed in range(8)
        ]

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", parts=(*task.images, task.question))]

    def target(self, task: Task) -> str:
        return task.answer

    def demonstration(self, task: Task) -> Sequence[str]:
        return (task.answer,)

    def score(self, _task: Task, turns: Sequence[Turn]) -> Score:
        text = turns[-1].text
        share = text.count(WANTED) / max(len(text), 1)
        return Score(reward=share, accuracy=share)


def _reward(settings: Model, folder: Path) -> str | None:
    config = Config.model_validate(
        {
            "run_dir": str(folder),
            "model": settings.model_dump(),
            "max_steps": STEPS,
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 6},
            "train": {"learning_rate": 3e-3, "lr_warmup_steps": 0},
            "algorithm": {"name": "grpo"},
            "evaluate": {"before_training": False, "image_controls": False, "dev_size": 4, "every_steps": STEPS},
            "checkpoint": {"every_steps": STEPS},
            "log": {"tensorboard": False, "progress": False},
        }
    )
    train(build(config, Letters()))  # type: ignore[arg-type]
    rewards = [row["reward"] for row in read_metrics(folder)]
    first, last = float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))
    return None if last > first else f"from {first:.2g} to {last:.2g}"


def _export(folder: Path) -> None:
    """Export the run; the export reloads its folder and compares it with the checkpoint."""
    export(folder / "run", folder / "out", trust=True)
