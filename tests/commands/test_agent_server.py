"""The endpoint of `fovea serve --for-agents`, called by the `openai` client: ids that only grow, and their record."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from fovea.data.images import ImageOpener
from fovea.models.render import Renderer
from fovea.types import ImageRef, Message, Prompt
from tests.commands.agent_serving import PARTS, Served
from tests.images import encoded, noise
from tests.reference import reference_logprobs
from tests.tables import table


def with_picture(text: str, seed: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(encoded(noise(seed))).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("episodes"))
    yield made
    made.server.should_exit = True


def test_a_conversation_continues_with_the_ids_that_were_drawn(served: Served) -> None:
    before = len(served.turns()) if (served.folder / "turns.jsonl").exists() else 0
    chat: list[dict[str, Any]] = [with_picture("How many circles are there?", 1)]
    for seed in (2, 3):
        answer = served.ask(chat).choices[0]
        chat += [{"role": "assistant", "content": answer.message.content}, with_picture("And here?", seed)]
    served.ask(chat)
    first, second, third = turns = served.turns()[before:]
    assert [each["turn"] for each in turns] == [1, 2, 3]
    assert {each["episode"] for each in turns} == {first["id"]}
    assert [each["continues"] for each in turns] == [None, first["id"], second["id"]]
    assert [len(each["image_keys"]) for each in turns] == [1, 1, 1]
    assert {each["version"] for each in turns} == {7}
    for number, each in enumerate(turns, 1):
        (message,) = each["messages"]
        name = message["parts"][0]["image"]
        assert (served.folder / name).read_bytes() == encoded(noise(number))

    # the log-probs are transformers' on the ids of the whole conversation, as recorded
    renderer = Renderer(PARTS.processor, ImageOpener(max_mib=1, max_megapixels=1))
    images = tuple(
        image
        for seed in (1, 2, 3)
        for image in renderer.prompt([Message(role="user", parts=(ImageRef(source=encoded(noise(seed))),))]).images
    )
    assert [image.key for image in images] == [key for each in turns for key in each["image_keys"]]
    ids = [np.array(part) for each in turns for part in (each["observation_ids"], each["token_ids"])]
    whole = np.concatenate(ids[:-1])
    expected = reference_logprobs(
        PARTS, Prompt(token_ids_L=whole, unexpanded_ids_U=whole, images=images), np.array(third["token_ids"])
    )
    np.testing.assert_allclose(third["logprobs"], expected.detach().numpy(), atol=2e-5)


def test_the_answer_has_ids_and_logprobs(served: Served) -> None:
    answer = served.ask([{"role": "user", "content": "What colour?"}], temperature=0)
    (choice,) = answer.choices
    turn = served.turns()[-1]
    assert answer.id == turn["id"]
    assert choice.token_ids == turn["token_ids"]
    assert [each.logprob for each in choice.logprobs.content] == pytest.approx(turn["logprobs"])
    assert choice.message.content == turn["text"]
    assert answer.usage.completion_tokens == len(turn["token_ids"]) <= 5
    assert answer.usage.prompt_tokens == len(turn["observation_ids"])
    assert served.ask([{"role": "user", "content": "What colour?"}], max_tokens=500).usage.completion_tokens <= 12


def test_a_changed_conversation_begins_a_new_episode_and_is_counted(served: Served) -> None:
    asked = {"role": "user", "content": "What colour?"}
    first = served.ask([asked])
    before = served.conversations.num_unmatched
    for said in (f"{first.choices[0].message.content}!", "red"):
        served.ask([asked, {"role": "assistant", "content": said}, asked])
        assert served.turns()[-1]["continues"] is None
    assert served.conversations.num_unmatched == before + 2
    answered = {"role": "assistant", "content": first.choices[0].message.content}
    for _ in range(2):  # two branches of one conversation
        served.ask([asked, answered, asked])
        assert served.turns()[-1]["continues"] == first.id
    assert served.conversations.num_unmatched == before + 2


def test_an_answer_may_be_streamed(served: Served) -> None:
    chunks = list(served.ask([{"role": "user", "content": "What colour?"}], stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == served.turns()[-1]["text"]
    assert chunks[-1].choices[0].finish_reason == served.turns()[-1]["finish"]


def test_the_key_is_required(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    for key in ("wrong", ""):
        with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
            openai.OpenAI(base_url=served.url, api_key=key or "x", max_retries=0).models.list()


USER = {"role": "user", "content": "What?"}


def of_picture(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


@table(
    ("request_", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [USER], "n": 2}, "n: "),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: "),
        ({"messages": [USER], "temperature": -1}, "temperature"),
        (of_picture("http://a/b.png"), "the picture 'http://a/b.png' is not a data URI"),
        (of_picture("data:image/png;base64,$"), "is not base64"),
        (of_picture("data:image/png;base64,aGVsbG8="), "a picture of the request"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, "its text contains <|im_end|>"),
    ],
)
def test_what_cannot_be_answered_is_one_line(served: Served, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.ask(**request_)
    said = caught.value.body["message"]  # type: ignore[index]
    assert message in said
    assert "\n" not in said
