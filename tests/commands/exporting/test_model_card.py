"""README.md of an exported folder: what others wrote ends no table, no code block and no front matter."""

from __future__ import annotations

import re
from typing import Any

import yaml

from fovea.commands.exporting.model_card import Card, model_card
from fovea.config.run import Config
from fovea.report.summary import SummaryJson
from fovea.types import Evaluation
from tests.report.folders import summary_of

NASTY = "a | b\n```\n<script>alert(1)</script> [x](javascript:1)\n---"


def summary(kind: str) -> SummaryJson:
    final = Evaluation(accuracies={kind: (1.0, 0.0, 1.0, 0.0)})
    shuffled = Evaluation(accuracies={kind: (1.0, 0.0, 0.0, 0.0)})
    return summary_of(final, shuffled_images=shuffled, duplicates_across_splits=0, steps=7, seed=3).to_json()


def card(**changes: object) -> str:
    model = {"path": "Qwen/Qwen3-VL-2B-Instruct", "revision": "abc"}
    fields: dict[str, Any] = {
        **{"name": "model", "step": 7, "summary": None, "adapter_only": False, "left_out": (), "banned_ids": (3, 7)},
        **{"model_class": "Qwen3VLForConditionalGeneration", "max_logprob_difference": 1e-6},
        "config": Config.model_validate({"model": model, "run_dir": f"runs/{NASTY}"}),
    }
    return model_card(Card(**(fields | changes)))


def test_the_front_matter_is_what_the_hub_reads() -> None:
    text = card()
    _, front, rest = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["fovea", "reinforcement-learning", "grpo"],
        "base_model": "Qwen/Qwen3-VL-2B-Instruct",
    }
    assert "at revision abc" in rest
    assert "had not finished when this step was exported" in rest


def test_arguments_of_the_chat_template_are_named() -> None:
    config = Config.model_validate({"model": {"path": "a/b", "chat_template_kwargs": {"enable_thinking": False}}})
    assert "with `enable_thinking=False`: they are defaults of this folder's template" in card(config=config)
    assert "`enable_thinking=False`: pass it to apply_chat_template" in card(config=config, adapter_only=True)


def test_figures_of_the_run() -> None:
    text = card(summary=summary("counting"))
    assert "| counting | not evaluated | 50.0 [15, 85] | 4 |" in text
    assert "not evaluated; after: 50.0; with another row's images: 25.0; with blank ones: not evaluated." in text
    assert "step 7, not from this step" not in text
    assert "are from the run's last step, 7, not from this checkpoint" in card(summary=summary("counting"), step=5)


def test_nothing_that_others_wrote_is_markdown() -> None:
    text = card(summary=summary(NASTY), name=NASTY)
    (line,) = [line for line in text.splitlines() if "not evaluated | 50.0" in line]
    assert line.replace("\\|", "").count("|") == 5
    loading = re.search(r"^````python\n(.*?)^````$", text, re.DOTALL | re.MULTILINE)
    assert loading is not None, "a fence that is longer than the one in the name"
    outside = text[: text.index("## Recipe")].replace(loading[0], "")
    assert "<script>" not in outside.replace("\\<", "")
    assert "```" not in outside.replace("\\`", "")
    # the recipe holds the fence of three, in a fence of four
    recipe = text[text.index("## Recipe") :]
    assert recipe.count("````") == 2
    assert recipe.rstrip().endswith("````")


def test_an_adapter_says_where_it_goes() -> None:
    text = card(adapter_only=True)
    assert "library_name: peft" in text
    assert 'PeftModel.from_pretrained(base, "model")' in text
    assert "base.generation_config.suppress_tokens = [3, 7]" in text
