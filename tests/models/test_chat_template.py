"""Arguments of a chat template, against transformers' apply_chat_template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.processor import Processor, load_processor, template_with_defaults
from fovea.models.render import Renderer
from fovea.models.tiny import CHAT_TEMPLATE
from fovea_gym.types import Message
from gym_tests.images import from_array
from tests.tiny_models import save, tiny, user

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
