"""Model card (README.md) of an exported folder; text from a data set cannot end a table or code block in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from fovea import __version__
from fovea.config.loading import dump_config
from fovea.config.run import Config
from fovea.evaluation.statistics import percent, percent_text
from fovea.report.summary import SummaryJson, by_type_at

REPOSITORY_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The facts that a model card states."""

    name: str
    step: int
    config: Config
    summary: SummaryJson | None
    """None unless the run has finished."""
    adapter_only: bool
    model_class: str
    max_logprob_difference: float
    left_out: tuple[str, ...]
    banned_ids: tuple[int, ...]
    """Token ids that training never sampled (`Processor.banned_ids`)."""


def model_card(card: Card) -> str:
    """The model card as Markdown with YAML front matter for the Hub."""
    blocks = [
        _front_matter(card),
        f"# {_plain(card.name)}",
        _description(card),
        _how_to_load(card),
        _results(card),
        "## Recipe\n\nThe settings of the run, which are also in `recipe.yaml`:",
        _fenced(dump_config(card.config), "yaml"),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _front_matter(card: Card) -> str:
    tags = ["fovea", "reinforcement-learning", card.config.algorithm.name]
    fields: dict[str, object] = {"library_name": "peft" if card.adapter_only else "transformers"}
    fields |= {"pipeline_tag": "image-text-to-text", "tags": tags}
    base = card.config.model.path
    if base is not None and REPOSITORY_ID.fullmatch(base) and not Path(base).exists():  # not a local folder
        fields["base_model"] = base
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _description(card: Card) -> str:
    config = card.config
    lines = [
        f"{'A LoRA adapter' if card.adapter_only else 'A vision-language model'} after {card.step} steps of "
        f"{config.algorithm.name.upper()} on the environment `{config.environment.name}`, trained with Fovea "
        f"{__version__}. Base model: {_base(config)}.",
    ]
    if config.model.lora is not None and not card.adapter_only:
        lines.append("It was trained as a LoRA adapter, which is merged into these weights.")
    if card.left_out:
        lines.append(
            f"The checkpoint also holds a value function ({', '.join(card.left_out)}), which only PPO training "
            "needs; it is not exported."
        )
    if kwargs := config.model.chat_template_kwargs:
        given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        where = "pass it to apply_chat_template" if card.adapter_only else "they are defaults of this folder's template"
        lines.append(f"Prompts were made by the chat template with `{given}`: {where}.")
    if not card.adapter_only:
        lines.append(
            f"Training gave {len(card.banned_ids)} token ids, mainly special tokens, probability 0: they are the "
            "`suppress_tokens` of `generation_config.json`, which engines other than transformers need as a setting."
        )
    lines.append(
        "The folder was loaded again after it was written: log-probs of a probe with an image differ from those of the "
        f"checkpoint by {card.max_logprob_difference:.1e} at most."
    )
    return " ".join(lines)


def _base(config: Config) -> str:
    model = config.model
    if model.tiny is not None:
        return f"a tiny {model.tiny.family} with random weights"
    return _plain(str(model.path)) + (f" at revision {_plain(model.revision)}" if model.revision else "")


def _how_to_load(card: Card) -> str:
    folder = json.dumps(card.name)  # a JSON string is a Python literal too, on one line
    load = f'model = {card.model_class}.from_pretrained({folder}, dtype="auto")'
    if card.adapter_only:
        load = (
            f'base = {card.model_class}.from_pretrained({json.dumps(card.config.model.path)}, dtype="auto")\n'
            f"base.generation_config.suppress_tokens = {list(card.banned_ids)}  # never sampled in training\n"
            f"model = PeftModel.from_pretrained(base, {folder})"
        )
    imports = f"from transformers import AutoTokenizer, AutoImageProcessor, {card.model_class}"
    imports += "\nfrom peft import PeftModel" if card.adapter_only else ""
    processors = (
        ""
        if card.adapter_only
        else f"\ntokenizer = AutoTokenizer.from_pretrained({folder})  # holds the chat template"
        f"\nimage_processor = AutoImageProcessor.from_pretrained({folder})"
    )
    return "## Loading it\n\n" + _fenced(f"{imports}\n\n{load}{processors}", "python")


def _results(card: Card) -> str:
    summary = card.summary
    if summary is None:
        return "## Results\n\nThe run had not finished when this step was exported, so there are no final results."
    warmup = {kind: value.mean for kind, value in by_type_at(summary, "warmup").items()}
    rows = [
        f"| {_plain(kind)} | {_percent(warmup.get(kind))} | {percent_text(final)} | {final.n} |"
        for kind, final in by_type_at(summary, "final").items()
    ]
    steps = summary["steps"]
    whose = "" if steps == card.step else f" They are from the run's last step, {steps}, not from this checkpoint."
    accuracy = summary["accuracy"]
    lines = [
        "## Results",
        "",
        "Greedy accuracy on held-out rows in percent, with 95 % intervals, after seed "
        f"{summary['seed']} of the recipe below.{whose} Before training: {_percent(accuracy['before'])}; after: "
        f"{_percent(accuracy['final'])}; with another row's images: {_percent(summary['shuffled_images'])}; with blank "
        f"ones: {_percent(summary['blank_images'])}.",
        "",
        "| question type | after warm-up | after RL | rows |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "not evaluated" if value is None else percent(value)


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~!&$])", r"\\\1", " ".join(text.split()))


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
