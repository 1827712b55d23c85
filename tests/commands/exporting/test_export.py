"""A trained model as a folder: plain transformers and peft load it, it answers as in training, and its card says so."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.commands import targets
from fovea.commands.evaluate import EvalSet, compare
from fovea.commands.exporting import export as export_module
from fovea.commands.exporting.export import (
    VIDEO_PROCESSOR_FILE,
    beyond_rounding,
    check,
    check_repo,
    export,
    make_probe,
    push,
    reload_model,
    write_model,
)
from fovea.commands.exporting.model_card import Card, model_card
from fovea.commands.targets import find_checkpoint, open_checkpoint, parse_target, shared_settings
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.evaluation.json_file import read_answers
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.tiny import TinyParts
from fovea.report.summary import SummaryJson
from fovea.run import checkpoint
from fovea.types import Evaluation
from fovea.wiring.run import build
from fovea_gym.errors import ConfigError, DataError
from tests.policies import weights_of
from tests.reference import model_inputs, reference_logprobs
from tests.report.folders import summary_of
from tests.saved import saved_tensors
from tests.tiny_models import image, renderer, save, tiny, user

SETTINGS: dict[str, Any] = {
    "threads": 1,
    "max_steps": 4,
    "environment": {"name": "shapes", "train_size": 64, "dev_size": 24, "test_size": 32},
    "warmup": {"max_steps": 12, "check_every_steps": 12, "learning_rate": 0.01},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
    "train": {"learning_rate": 0.01},
    "algorithm": {"name": "grpo", "entropy_coef": 0.1, "max_groups_without_signal": 4},
    "evaluate": {"every_steps": 2, "dev_size": 24},
    "checkpoint": {"every_steps": 2, "keep": 5},
    "log": {"tensorboard": False, "progress": False},
}


def trained(folder: Path, **model: object) -> Path:
    train(build(Config.model_validate({**SETTINGS, "run_dir": str(folder / "run"), "model": model})))
    return folder / "run"


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a Qwen3-VL from a folder, ../base, with adapters, and images held to a separate size."""
    folder = tmp_path_factory.mktemp("lora")
    adapters = {"rank": 4, "parts": ["language_model", "vision_tower", "projector"]}
    return trained(folder, path=str(save(tiny("qwen3_vl"), folder / "base")), lora=adapters, max_pixels=1600)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights of a Qwen2.5-VL, in bfloat16 with float32 copies in the checkpoint."""
    return trained(tmp_path_factory.mktemp("full"), tiny={"family": "qwen2_5_vl"}, dtype="bfloat16")


@pytest.fixture(scope="module")
def merged(lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged") / "model"
    done = export(lora, folder)
    assert done.max_logprob_difference < 1e-4
    return folder


Texts = list[tuple[str, str, float]]


def recorded(run: Path, name: str) -> Texts:
    """Ids, texts and accuracies of an evaluation in training."""
    return [(row.id, row.answers[0].text, row.answers[0].accuracy) for row in read_answers(run, name, sys.maxsize)]


def read(target: Path, split: str) -> Texts:
    """The same by the command's own way."""
    found = parse_target(str(target))
    rows = EvalSet.of(shared_settings([found], None, []), split)  # type: ignore[arg-type]
    answered = compare([found], rows, [], lambda _: None).targets[0].greedy.values()
    return [(row.id, answer.text, answer.accuracy) for row in answered for answer in row.answers]


def logits(parts: TinyParts, network: Any) -> Tensor:
    """Of a prompt with two images, by the network's own forward."""
    prompt = renderer(parts).prompt(user(image(1), "How many circles?", image(2, 64, 96), "And here?"))
    with torch.no_grad():
        return network(**model_inputs(parts, prompt, np.array([5, 6, 7])), use_cache=False).logits[0]


def test_a_merged_export_has_the_adapter_models_logits(lora: Path, merged: Path) -> None:
    """The adapter model: transformers' own forward through peft's layers, weights from the checkpoint."""
    model = open_checkpoint(find_checkpoint(lora))
    adapted = model.vlm.network
    adapted.set_attn_implementation("sdpa")
    plain = AutoModelForImageTextToText.from_pretrained(merged)
    assert type(plain).__name__ == "Qwen3VLForConditionalGeneration"
    parts = tiny("qwen3_vl")
    torch.testing.assert_close(logits(parts, plain), logits(parts, adapted), atol=1e-4, rtol=0)
    base = AutoModelForImageTextToText.from_pretrained(lora.parent / "base")
    assert (logits(parts, base) - logits(parts, plain)).abs().max() > 0.1, "the adapter has learned nothing"


def test_an_exported_model_answers_as_it_did_in_training(lora: Path, merged: Path, tmp_path: Path) -> None:
    """Texts and accuracies of every row, of two steps, and of the checkpoints themselves."""
    dev_of_2, dev_of_4, test = (recorded(lora, name) for name in ("dev-step-000002", "dev-step-000004", "test-final"))
    assert dev_of_2 != dev_of_4, "steps change answers, or this test could not fail"
    step_2 = lora / "checkpoints" / "step-2"
    export(step_2, tmp_path / "step-2")
    assert read(tmp_path / "step-2", "dev") == dev_of_2 == read(step_2, "dev")
    assert read(merged, "dev") == dev_of_4
    assert read(merged, "test") == test == read(lora, "test")
    by_step = {row["step"]: row["accuracy/dev"] for row in read_metrics(lora) if "accuracy/dev" in row}
    assert list(by_step.values()) == [sum(x for _, _, x in dev) / 24 for dev in (dev_of_2, dev_of_4)]


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_named(lora: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """While the model is loaded, and between the listing of checkpoints and the reading of the newest."""
    run = shutil.copytree(lora, tmp_path / "run")
    first, second, third = (run / "checkpoints" / f"step-{step}" for step in (0, 2, 4))
    load_processor = targets.load_processor

    def rotated(settings: Any) -> Any:
        shutil.rmtree(first)
        return load_processor(settings)

    monkeypatch.setattr(targets, "load_processor", rotated)
    with pytest.raises(DataError, match=rf"^{first}\b"):
        export(first, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    newer = third.rename(tmp_path / "newer")
    damage = checkpoint.damage

    def rotated_again(folder: Path) -> str | None:
        if folder == second and newer.exists():
            newer.rename(third)
            shutil.rmtree(second)
        return damage(folder)

    monkeypatch.setattr(checkpoint, "damage", rotated_again)
    assert find_checkpoint(run).folder == third


def test_the_adapter_alone_goes_on_its_base(lora: Path, merged: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    done = export(lora, out, adapter_only=True)
    assert done.max_logprob_difference < 1e-4
    assert not list(out.glob("model*.safetensors"))
    base = AutoModelForImageTextToText.from_pretrained(lora.parent / "base")
    adapted = PeftModel.from_pretrained(base, out)
    whole = AutoModelForImageTextToText.from_pretrained(merged)
    parts = tiny("qwen3_vl")
    torch.testing.assert_close(logits(parts, adapted), logits(parts, whole), atol=1e-4, rtol=0)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(lora.parent / "base")
    assert read(out, "dev") == recorded(lora, "dev-step-000004")


def test_a_fully_trained_model_of_another_family(full: Path, tmp_path: Path) -> None:
    """Every weight to the last bit, log-probs only by transformers, tokenizer, template, images."""
    out = tmp_path / "model"
    export(full, out)
    plain = AutoModelForImageTextToText.from_pretrained(out, dtype="auto")
    assert (type(plain).__name__, plain.dtype) == ("Qwen2_5_VLForConditionalGeneration", torch.bfloat16)
    saved = saved_tensors(full / "checkpoints" / "step-4" / "trainable")
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, saved[f"network.{name}"].bfloat16()), name
    model = open_checkpoint(find_checkpoint(full))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == model.processor.chat_template
    assert tokenizer.eos_token_id == model.processor.tokenizer.eos_token_id
    assert AutoImageProcessor.from_pretrained(out).patch_size == model.processor.image_processor.patch_size
    trained = TinyParts(network=model.vlm.network, processor=model.processor)
    prompt, answer = renderer(trained).prompt(user(image(1), "How many circles?")), np.array([9, 8, 7])
    # bfloat16 would round other logits alike
    again = TinyParts(network=plain.float(), processor=replace(model.processor, tokenizer=tokenizer))
    trained.network.float()
    exported, of_the_run = (reference_logprobs(each, prompt, answer) for each in (again, trained))
    torch.testing.assert_close(exported, of_the_run, atol=1e-5, rtol=0)
    assert read(out, "test") == recorded(full, "test-final")
    assert model.config.model.dtype == "bfloat16"


def test_the_processors_are_those_of_the_settings_and_the_family_or_the_base(
    full: Path, merged: Path, tmp_path: Path
) -> None:
    images, videos = (
        json.loads((merged / name).read_text()) for name in ("preprocessor_config.json", VIDEO_PROCESSOR_FILE)
    )
    assert videos.pop("video_processor_type") == "Qwen3VLVideoProcessor"
    assert videos == {key: images[key] for key in videos}
    assert "size" not in videos, "one image's pixels are not limit for a video"
    base, out = Path(shutil.copytree(merged, tmp_path / "base")), tmp_path / "out"
    (base / VIDEO_PROCESSOR_FILE).write_text('{"fps": 3}')
    model = open_checkpoint(find_checkpoint(full))
    settings = model.config.model.model_copy(update={"tiny": None, "path": str(base)})
    model = replace(model, config=model.config.model_copy(update={"model": settings}))
    out.mkdir()
    write_model(out, model)
    assert (out / VIDEO_PROCESSOR_FILE).read_text() == '{"fps": 3}'
    (tmp_path / "private.json").write_text("{}")
    (base / VIDEO_PROCESSOR_FILE).unlink()
    (base / VIDEO_PROCESSOR_FILE).symlink_to(tmp_path / "private.json")
    with pytest.raises(DataError, match=r"leads out of"):
        write_model(out, model)
    # limits on pixels go with the model
    size = AutoImageProcessor.from_pretrained(merged).size
    assert (size["longest_edge"], size["shortest_edge"]) == (1600, 256)


def test_the_card_tells_recipe_and_figures(lora: Path, merged: Path, tmp_path: Path) -> None:
    card = (merged / "README.md").read_text()
    summary = json.loads((lora / "summary.json").read_text())
    assert "after 4 steps of GRPO on the environment `shapes`" in card
    assert f"after: {100 * summary['accuracy']['final']:.1f};" in card
    assert "| counting |" in card
    assert "It was trained as a LoRA adapter, which is merged into these weights." in card
    assert "samples_per_prompt: 4" in card
    export(lora / "checkpoints" / "step-2", tmp_path / "early")
    assert "from the run's last step, 4, not from this checkpoint" in (tmp_path / "early" / "README.md").read_text()


def test_a_value_function_is_left_out_and_named(tmp_path: Path) -> None:
    """Of a real step of PPO, with a head on the policy's own trunk."""
    small = {"max_steps": 1, "warmup": None, "evaluate": {"image_controls": False, "test_size": 4}}
    chosen = {"run_dir": str(tmp_path / "run"), "model": {"tiny": {}}, "algorithm": {"name": "ppo"}}
    run = build(Config.model_validate({**SETTINGS, **small, **chosen}))
    train(run)
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.left_out == ("value",)
    assert "value function (value)" in (tmp_path / "out" / "README.md").read_text()
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in saved if "value" in name]
    trained = weights_of(run.policy.trained)
    assert all(torch.equal(saved[name], trained[name]) for name in saved)


def test_a_folder_that_differs_is_refused(lora: Path, merged: Path) -> None:
    model = open_checkpoint(find_checkpoint(lora))
    probe = make_probe(model.processor, model.config.model)
    broken = reload_model(merged, model)
    assert check(model, broken, probe, merged=True) < 1e-4
    name, parameter = next(iter(broken.network.named_parameters()))
    with torch.no_grad():
        parameter.view(-1)[0] += 0.5
    with pytest.raises(ModelError, match=rf"\b{name}\b"):
        check(model, broken, probe, merged=True)
    suppressed = json.loads((merged / "generation_config.json").read_text())["suppress_tokens"]
    assert suppressed == list(model.processor.banned_ids) != []
    free = reload_model(merged, model)
    free.network.generation_config.suppress_tokens = None
    with pytest.raises(ModelError, match="its generation config suppresses different token ids than the run"):
        check(model, free, probe, merged=True)
    right = reload_model(merged, model)
    other_template = replace(right.processor, chat_template="{{ messages[0].role }}<|image_pad|>")
    with pytest.raises(ModelError, match="the tokens of a prompt differ"):
        check(model, replace(right, processor=other_template), probe, merged=True)
    with torch.no_grad():
        broken.network.get_input_embeddings().weight.mul_(-1)
    with pytest.raises(ModelError, match="the log-probs of the probe differ by"):
        check(model, broken, probe, merged=False)


# SmolVL after RL in bfloat16, against transformers with the same weights; and with two projections of it exchanged
ROUNDED = [0.080, 0.061, 0.108, -0.023, -0.013, -0.161, -0.081, 0.267, -0.135, -0.060, 0.016, 0.129, 0.133, -0.001]
EXCHANGED_RMS = 0.918


def test_rounding_is_no_difference() -> None:
    rounded_T = torch.tensor(ROUNDED)
    assert beyond_rounding(rounded_T, torch.bfloat16) is None
    assert beyond_rounding(rounded_T * 1e-4, torch.float32) is None
    assert beyond_rounding(rounded_T, torch.float32) is not None
    exchanged_T = rounded_T * EXCHANGED_RMS / rounded_T.square().mean().sqrt()
    told = "the log-probs of the probe differ by 0.918 (root mean square)"
    assert beyond_rounding(exchanged_T, torch.bfloat16) == told
    assert beyond_rounding(torch.tensor([0.0, math.nan]), torch.bfloat16) is not None


def test_nothing_is_left_when_the_check_fails(lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> float:
        raise ModelError("not the same")

    monkeypatch.setattr(export_module, "check", refuse)
    with pytest.raises(ModelError, match="not the same"):
        export(lora, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_said_in_a_line(lora: Path, full: Path, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(ConfigError, match=r"exists and is not an empty folder; export to another one"):
        export(lora, tmp_path)
    with pytest.raises(ConfigError, match=r"\bmodel\.lora\b"):
        export(full, tmp_path / "out", adapter_only=True)
    with pytest.raises(ConfigError, match="neither a run with a checkpoint, nor a checkpoint"):
        export(lora.parent, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^--push a/b/c: "):
        check_repo("a/b/c")
    # a hub out of reach
    with pytest.raises(ModelError, match=f"^--push me/model: .*{tmp_path}.*`hf upload"):
        push(tmp_path, "me/model")


def test_push_is_one_upload_to_a_private_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself is out of reach here: what it is asked is kept."""
    asked: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, repo: str, **options: Any) -> str:
            asked.append((repo, options))
            return f"hub/{repo}"

        def upload_folder(self, **options: Any) -> None:
            asked.append(("upload", options))

    monkeypatch.setattr(export_module, "HfApi", Hub)
    assert push(tmp_path, "me/model") == "hub/me/model"
    assert asked[0] == ("me/model", {"private": True, "exist_ok": True})
    ((name, options),) = asked[1:]
    assert (name, options["repo_id"], options["folder_path"]) == ("upload", "me/model", tmp_path)


def test_an_evaluation_beside_baselines(lora: Path, merged: Path, tmp_path: Path) -> None:
    page, file = tmp_path / "eval.html", tmp_path / "eval.json"
    words = [str(lora), str(merged), "majority", "gold", "evaluate.test_size=12", "evaluate.samples_per_prompt=3"]
    done = CliRunner().invoke(app, ["eval", *words, "--json", str(file), "--html", str(page), "--debug"])
    assert done.exit_code == 0, done.output
    assert "Image ablation" in done.stdout
    content = json.loads(file.read_text())
    run, exported, majority, gold = content["targets"]
    # log-probs of merged weights are equal up to rounding
    of_run, of_export = run.pop("picture_dependence"), exported.pop("picture_dependence")
    for control in ("shuffled", "blank"):
        assert of_run[control] == pytest.approx(of_export[control], abs=1e-4)
    assert (of_run["shuffled"]["n"], of_run["blank"]["mean"] != 0.0) == (12, True)
    assert {**run, "target": ""} == {**exported, "target": "", "versus_first": None, "versus_first_by_kind": {}}
    assert set(run["pass_at"]) == {"1", "2", "3"}
    of_run, of_export = content["banned_tokens"].values()
    assert of_run == of_export
    assert (of_run["count"], of_run["num_beyond_tokenizer"]) == (7, 0), "the special tokens but the end of a turn"
    assert "<|image_pad|>" in of_run["special"]
    assert "<|im_end|>" not in of_run["special"]
    assert run["image_ablation"]["shuffled"]["n"] == 12
    assert majority["picture_dependence"] is None
    assert (gold["accuracy"]["mean"], majority["image_ablation"], len(content["rows"])) == (1.0, None, 12)
    assert "data:image/png;base64," in page.read_text()


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


def test_the_front_matter_is_what_the_hub_reads_and_the_text_says_how_to_load_it() -> None:
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
    # arguments of the chat template
    config = Config.model_validate({"model": {"path": "a/b", "chat_template_kwargs": {"enable_thinking": False}}})
    assert "with `enable_thinking=False`: they are defaults of this folder's template" in card(config=config)
    assert "`enable_thinking=False`: pass it to apply_chat_template" in card(config=config, adapter_only=True)
    # an adapter
    text = card(adapter_only=True)
    assert "library_name: peft" in text
    assert 'PeftModel.from_pretrained(base, "model")' in text
    assert "base.generation_config.suppress_tokens = [3, 7]" in text


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
