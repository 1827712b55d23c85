"""Prompts and positions against transformers: its processors token for token, its templates, its rotary index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from fovea.config.model import Model
from fovea.data.prompt_source import PromptSource
from fovea.errors import ModelError
from fovea.models.families.qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL, QwenVL
from fovea.models.processor import Processor, load_processor, template_with_defaults
from fovea.models.render import Renderer
from fovea.models.tiny import CHAT_TEMPLATE, TinyParts
from fovea.types import PromptImage
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import ImageRef, Message, Task
from gym_tests.images import encoded, from_array, png
from gym_tests.tables import table
from tests.reference import chat_of
from tests.tiny_models import PROCESSORS, image, processor_of, renderer, save, tiny, user

CHATS = {
    "no image": user("How many circles are there?"),
    "one image": user(image(1), "How many circles are there?"),
    "image last": user("How many circles are there?", image(1, 80, 64)),
    "three images and a system prompt": [
        Message(role="system", parts=("Think first.\n",)),
        *user(image(1), " and ", image(2, 64, 48), image(3, 33, 90), "\nWhich is \\boxed{red}?"),
    ],
}


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("chat", CHATS)
def test_equal_to_the_processor(family: str, chat: str) -> None:
    parts, messages = tiny(family), CHATS[chat]
    processor = processor_of(parts, family)
    images = [from_array(part) for message in messages for part in message.parts if isinstance(part, ImageRef)]
    content = chat_of(messages)
    text = processor.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
    expected = processor(text=[text], images=images or None, return_tensors="np")
    prompt = renderer(parts).prompt(messages)
    np.testing.assert_array_equal(prompt.token_ids_L, expected["input_ids"][0])
    if images:
        pixels = np.concatenate([each.tensors["pixel_values"] for each in prompt.images])
        np.testing.assert_array_equal(pixels, expected["pixel_values"])
        assert [i.tensors["image_grid_thw"].tolist() for i in prompt.images] == expected["image_grid_thw"].tolist()


def test_equal_pixels_have_equal_keys(parts: TinyParts) -> None:
    first, second, third = (renderer(parts).prompt(user(image(seed), "x")).images[0].key for seed in (1, 1, 2))
    assert first == second != third


def test_pixel_limits_are_obeyed(parts: TinyParts) -> None:
    small = Renderer(parts.processor, from_array, max_pixels=32 * 32)
    assert small.prompt(user(image(1, 96, 96), "x")).images[0].tensors["image_grid_thw"].tolist() == [1, 4, 4]
    large = Renderer(parts.processor, from_array, min_pixels=96 * 96)
    assert large.prompt(user(image(1, 48, 48), "x")).images[0].tensors["image_grid_thw"].tolist() == [1, 12, 12]


def test_target_ends_with_the_stop_token(parts: TinyParts) -> None:
    ids = renderer(parts).target("\\boxed{3}")
    assert ids[-1] == parts.processor.tokenizer.eos_token_id
    assert parts.processor.tokenizer.decode(ids[:-1]) == "\\boxed{3}"


@table(
    ("answer", "reason"),
    [
        ("<|vision_start|>", r"it contains <\|vision_start\|>, which is never sampled"),
        ("3<|im_end|>4", r".*<\|im_end\|>"),
    ],
)
def test_an_answer_with_a_special_token_is_refused(answer: str, reason: str, parts: TinyParts) -> None:
    with pytest.raises(DataError, match=rf"row 7: {reason}"):
        renderer(parts).target(answer, where="row 7")


@pytest.mark.parametrize(("limit", "side"), [({"max_pixels": 32 * 32}, 32), ({"min_pixels": 160 * 160}, 160)])
def test_a_limit_beyond_the_models_own_other_limit_holds(limit: dict[str, int], side: int) -> None:
    """Qwen3-VL's smallest image has 65,536 pixels: a lower max_pixels must not be overruled by it."""
    parts = tiny("qwen3_vl")
    parts.processor.image_processor.size = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
    render = Renderer(parts.processor, from_array, **limit)
    grid = render.prompt(user(image(1, 96, 96), "x")).images[0].tensors["image_grid_thw"]
    assert (grid[1] * 8, grid[2] * 8) == (side, side)


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("limits", [{}, {"min_pixels": 96 * 96}, {"max_pixels": 40 * 40}])
def test_tokens_are_counted_before_images_are_processed(family: str, limits: dict[str, int]) -> None:
    """The count by sizes is that of the processed prompt, for sizes that are rounded up, down and to the limits."""
    render = Renderer(tiny(family).processor, from_array, **limits)
    for chat in CHATS.values():
        assert render.fewest_tokens(chat) == _visual_tokens(render, chat)
    for seed, size in enumerate([(1, 100), (17, 23), (200, 333), (333, 200), (56, 56), (640, 20)]):
        one = user(image(seed, *size), "How many?")
        assert render.fewest_tokens(one) == _visual_tokens(render, one)


@pytest.mark.parametrize("family", PROCESSORS)
def test_an_image_that_is_shown_turned_has_as_many_tokens_as_it_is_stored(family: str) -> None:
    note = Image.Exif()
    note[0x0112] = 6
    content = encoded(Image.new("RGB", (333, 90), "blue"), "JPEG", exif=note)
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=1, convert_images=["rotated"])
    chat = user(ImageRef(source=content), "How many?")
    render = Renderer(tiny(family).processor, opener)
    assert opener(ImageRef(source=content)).size == (90, 333)
    assert render.fewest_tokens(chat) == _visual_tokens(render, chat)


UNCACHED = {"max_prompt_tokens": 2048, "on_bad_row": "error", "cache_gib": 0}


def _visual_tokens(render: Renderer, messages: Sequence[Message]) -> int:
    return sum(image.num_tokens for image in render.prompt(messages).images)


def test_text_is_tokenized_once_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass over template and tokenizer would take a sixth of the time of a step of the demo."""
    processor, texts, shapes = tiny("qwen3_vl").processor, list[object](), Shapes(ShapesEnvironment(), 0)
    source = PromptSource([], shapes, Renderer(processor, from_array), **UNCACHED)
    write = processor.tokenizer.apply_chat_template
    noted = lambda chat, **given: texts.append(chat) or write(chat, **given)  # noqa: E731
    monkeypatch.setattr(processor.tokenizer, "apply_chat_template", noted)
    first, *others = shapes.tasks("train")[:9]
    assert source.render(first).prompt.num_tokens > 0
    assert len(texts) == 2, "once for all prompts of its form, to find the template's own special tokens"
    for task in others:
        source.render(task)
    assert len(texts) == 2 + len(others)


def test_a_row_over_its_limit_is_refused_before_any_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight small files that decode and process to gigabytes."""
    content = png("blue", 4000)
    assert len(content) < 100_000
    images = tuple(ImageRef(source=content) for _ in range(8))
    task = Task(id="row 7", question="How many?", answer="1", images=images)
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=64)
    render = Renderer(tiny("qwen3_vl").processor, opener, max_pixels=2**24)
    source = PromptSource([task], Shapes(ShapesEnvironment(), 0), render, **UNCACHED)

    def decoded(_: ImageFile.ImageFile) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    with pytest.raises(BadRowError, match=r"row 7: the prompt has at least \d+ tokens, images included") as error:
        source.get(0)
    assert error.value.reason == "prompt_too_long"


STRETCHES: dict[str, list[list[Message]]] = {name: [messages] for name, messages in CHATS.items()} | {
    "text only": [user("How many circles?"), user("Look again.")],
    "an image in the first": [user(image(1), "How many?"), user("Look again.")],
    "an image in the second": [user("How many?"), user("Here is a crop: ", image(2, 64, 96), " and now?")],
    "images in all": [
        user(image(1), " and ", image(2, 64, 48), image(3, 33, 90), "Which?"),
        user(image(4, 96, 32)),
        user("Here: ", image(5), image(5), "?"),
    ],
}


def whole_conversation(parts: TinyParts, ids: np.ndarray, images: Sequence[PromptImage]) -> tuple[np.ndarray, int]:
    """transformers' positions [3, L], and that of the next token."""
    ids_1L = torch.from_numpy(ids)[None]
    grids = torch.tensor([each.tensors["image_grid_thw"].tolist() for each in images]) if images else None
    pads = (ids_1L == parts.processor.family.image_token_id).int()
    positions, delta = parts.network.model.get_rope_index(
        ids_1L, mm_token_type_ids=pads, image_grid_thw=grids, attention_mask=torch.ones_like(ids_1L)
    )
    return positions[:, 0].numpy(), len(ids) + int(delta)


@pytest.mark.parametrize("conversation", STRETCHES)
def test_stretches_compose_to_the_positions_of_transformers(parts: TinyParts, conversation: str) -> None:
    """A completion follows each observation, and every stretch begins where the one before it ended."""
    family, render = parts.processor.family, renderer(parts)
    prompts = [render.prompt(messages) for messages in STRETCHES[conversation]]
    completion = np.arange(7)
    ids, found, position = [], [], 0
    for prompt in prompts:
        for stretch, images in ((prompt.token_ids_L, prompt.images), (completion, ())):
            positions_3L, position = family.positions(stretch, images, position)
            ids.append(stretch)
            found.append(positions_3L)
    images = [each for prompt in prompts for each in prompt.images]
    expected, next_position = whole_conversation(parts, np.concatenate(ids), images)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)
    assert position == next_position


def test_a_servers_ids_hold_one_pad_per_image(parts: TinyParts) -> None:
    """The ids of the text with one mark per image, by the tokenizer itself."""
    render, messages = renderer(parts), user(image(1), " and ", image(2, 64, 48), "?")
    prompt, pad = render.prompt(messages), parts.processor.family.image_token_id
    expected = parts.processor.tokenizer(render.text(messages), add_special_tokens=False)["input_ids"]
    assert prompt.unexpanded_ids_U.tolist() == expected
    assert expected.count(pad) == 2
    assert (prompt.token_ids_L == pad).sum() == sum(each.num_tokens for each in prompt.images)


def test_an_image_without_its_pads_is_refused(parts: TinyParts) -> None:
    prompt = renderer(parts).prompt(user(image(1), "x"))
    with pytest.raises(AssertionError, match="9 pads for 2 images"):
        parts.processor.family.positions(prompt.token_ids_L, prompt.images * 2, 0)


THINKING = (
    "\n"  # which a line of defaults before it must not swallow
    + CHAT_TEMPLATE
    + "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false -%}"
    + "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    + "{%- if effort -%}{{ 'effort ' + effort }}{%- endif -%}"
)
GIVEN: dict[str, Any] = {"enable_thinking": False, "effort": "l'ow\n"}
CHAT = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save(tiny("qwen3_vl"), tmp_path_factory.mktemp("model"))
    (made / "chat_template.jinja").write_text(THINKING)
    return made


def loaded(folder: Path, **given: Any) -> Processor:
    return load_processor(Model(path=str(folder), chat_template_kwargs=given))


@pytest.mark.parametrize("given", [{}, GIVEN, {"enable_thinking": True}], ids=["none", "off", "on"])
def test_prompts_and_later_turns_are_those_of_transformers(folder: Path, given: dict[str, Any]) -> None:
    processor = loaded(folder, **given)
    template: Any = {"chat_template": THINKING, "add_generation_prompt": True, **given}
    expected = processor.tokenizer.apply_chat_template(CHAT, return_dict=False, **template)
    render = Renderer(processor, from_array)
    prompt = render.prompt(user("How many?"))
    assert prompt.token_ids_L.tolist() == expected
    assert ("think" in render.text(user("x"))) is (given == GIVEN)
    end = int(processor.tokenizer.eos_token_id)
    after = render.observation([Message(role="user", parts=("Sure?",))], after=end).token_ids_L.tolist()
    whole = processor.tokenizer.apply_chat_template(ANSWERED, return_dict=False, **template)
    assert whole[-len(after) - 1 :] == [end, *after]


def test_an_exported_template_has_the_arguments_as_defaults(folder: Path) -> None:
    processor = loaded(folder, **GIVEN)
    own: Any = processor.tokenizer.apply_chat_template
    exported = {"chat_template": template_with_defaults(processor), "tokenize": False, "add_generation_prompt": True}
    assert own(CHAT, **exported) == own(CHAT, **exported | {"chat_template": THINKING}, **GIVEN)
    assert "think" not in own(CHAT, **exported, enable_thinking=True)
    assert template_with_defaults(loaded(folder)) == THINKING


@pytest.mark.parametrize(
    ("name", "fix"), [("enable_thinkin", "did you mean enable_thinking"), ("messages", "sets it"), ("x y", "leave")]
)
def test_what_the_template_does_not_read_is_refused(folder: Path, name: str, fix: str) -> None:
    with pytest.raises(ModelError, match=f"model.chat_template_kwargs.{name} is set, .*{fix}"):
        loaded(folder, **{name: 1})


@pytest.mark.parametrize(("family", "frame"), [(Qwen2VL, (1000, 1000)), (Qwen25VL, (112, 56)), (Qwen3VL, (1000, 1000))])
def test_width_and_height_in_which_a_family_points(family: type[QwenVL], frame: tuple[int, int]) -> None:
    vision = SimpleNamespace(spatial_merge_size=2, patch_size=14)
    model = family.of(SimpleNamespace(vision_config=vision, image_token_id=0))
    image = PromptImage(key="", tensors={}, num_tokens=8, grid=(1, 4, 8))
    assert model.box_frame(image) == frame
