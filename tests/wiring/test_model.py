"""Where a tiny model is kept: written into the run folder once, read from there by all that come later."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from fovea.commands.exporting.export import export
from fovea.commands.targets import find_checkpoint, open_checkpoint
from fovea.config.run import Config
from fovea.environments.base import Environment
from fovea.environments.shapes.environment import Shapes
from fovea.loop import train
from fovea.models.tiny import TinyParts, make_tiny
from fovea.wiring.model import MODEL_FOLDER, locate_model, tokenizer_corpus
from tests.saved import make_checkpoint
from tests.wiring.small import run_of

RUN = {
    "max_steps": 1,
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 3},
    "evaluate": {"image_controls": False, "shared_images": "ignore"},
    "parity": {"prompts": 0},
}


def settings(**model: object) -> Config:
    return Config.model_validate({"model": {"tiny": model}, "environment": {"name": "shapes", "train_size": 12}})


def shapes(config: Config) -> Environment:
    return Shapes(config.environment, config.seed)  # type: ignore[arg-type]


def never() -> Environment:
    raise AssertionError("the environment is asked for only when the model is made")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_folder_is_the_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    """As transformers loads it, against the network and tokenizer that were made."""
    config = settings(family=family)
    located = locate_model(config, tmp_path, lambda: shapes(config))
    assert (located.path, located.tiny) == (str(tmp_path / MODEL_FOLDER), None)
    made = _made(config)
    network = AutoModelForImageTextToText.from_pretrained(tmp_path / MODEL_FOLDER, dtype="float32")
    for (name, ours), (other, found) in zip(made.network.named_parameters(), network.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, found), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / MODEL_FOLDER)
    assert tokenizer.get_vocab() == made.processor.tokenizer.get_vocab()
    assert tokenizer.chat_template == made.processor.chat_template


def _made(config: Config) -> TinyParts:
    assert config.model.tiny is not None
    return make_tiny(config.model.tiny, tokenizer_corpus(shapes(config), "error"), config.seed)


def test_a_start_without_a_checkpoint_makes_the_model_of_its_own_settings(tmp_path: Path) -> None:
    """An earlier start with other settings may have failed before it took a step."""
    for width in (64, 32):
        config = settings(intermediate_size=width)
        locate_model(config, tmp_path, lambda config=config: shapes(config))
        network = AutoModelForImageTextToText.from_pretrained(tmp_path / MODEL_FOLDER)
        assert network.config.text_config.intermediate_size == width
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_FOLDER], "nothing half-written is left beside it"


def test_a_run_with_a_checkpoint_keeps_its_model(tmp_path: Path) -> None:
    config = settings()
    locate_model(config, tmp_path, lambda: shapes(config))
    make_checkpoint(tmp_path, 1)
    weights = tmp_path / MODEL_FOLDER / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert locate_model(config, tmp_path, never).path == str(tmp_path / MODEL_FOLDER)
    assert weights.stat().st_mtime_ns == before


def test_resume_and_export_read_the_folder_or_make_that_of_an_old_run(tmp_path: Path) -> None:
    """A run folder from before models were kept in it gets the same model on first use."""
    run = tmp_path / "run"
    train(run_of(run, **RUN))
    kept = open_checkpoint(find_checkpoint(run)).vlm.state_dict()
    shutil.rmtree(run / MODEL_FOLDER)
    again = open_checkpoint(find_checkpoint(run)).vlm.state_dict()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert (run / MODEL_FOLDER / "config.json").is_file()
    assert export(run, tmp_path / "exported").max_logprob_difference < 1e-4
    weights = run / MODEL_FOLDER / "model.safetensors"
    before = weights.stat().st_mtime_ns
    train(run_of(run, **RUN | {"max_steps": 2, "resume": "auto"}))
    assert weights.stat().st_mtime_ns == before
