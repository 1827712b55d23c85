"""Conversations that an agent sends whole with every request: ids that only grow, and episodes that begin anew."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fovea.models.render import Renderer
from fovea.rollout.agent_conversations import AgentConversations, AgentTurn
from fovea.types import Sampling
from fovea_gym.errors import BadRowError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef, Message, Role
from fovea_gym.utils.event_loop import wait_for
from gym_tests.images import encoded, noise
from tests.reference import reference_logprobs
from tests.rollout.drawing import make_engine
from tests.tiny_models import tiny

PARTS = tiny("qwen3_vl")
QUESTION = "What colour?"


def said(role: Role, *parts: str | ImageRef) -> Message:
    return Message(role=role, parts=parts)


def picture(seed: int) -> ImageRef:
    return ImageRef(source=encoded(noise(seed)))


def renderer(max_new_tokens: int = 5) -> Renderer:
    return Renderer(
        PARTS.processor, ImageOpener(max_image_mib=1, max_image_megapixels=1), max_new_tokens=max_new_tokens
    )


def made(max_new_tokens: int = 5) -> AgentConversations:
    return AgentConversations(make_engine(PARTS, 9000), renderer(max_new_tokens), "agents")


def ask(conversations: AgentConversations, *messages: Message) -> AgentTurn:
    return wait_for(conversations.answer(messages, Sampling(max_new_tokens=5, seed=3)))


def test_a_conversation_continues_with_the_ids_that_were_sampled() -> None:
    conversations, messages, turns = made(), list[Message](), list[AgentTurn]()
    for seed in (1, 2, 3):
        messages.append(said("user", picture(seed), "How many circles are here?"))
        turns.append(ask(conversations, *messages))
        messages.append(said("assistant", turns[-1].completion.text))
    assert [turn.number for turn in turns] == [1, 2, 3]
    assert {turn.episode for turn in turns} == {turns[0].completion.id}
    assert [turn.continues for turn in turns] == [None, *(turn.completion.id for turn in turns[:2])]
    assert conversations.num_unmatched == 0
    keys = [image.key for seed in (1, 2, 3) for image in renderer().prompt([said("user", picture(seed))]).images]
    assert [image.key for image in turns[-1].prompt.images] == keys
    for before, turn in pairwise(turns):
        ids = np.concatenate([before.prompt.token_ids_L, before.completion.token_ids_T])
        assert turn.prompt.token_ids_L[: len(ids)].tolist() == ids.tolist()
    for turn in turns:  # the log-probs are transformers' on the ids of the whole conversation
        expected = reference_logprobs(PARTS, turn.prompt, turn.completion.token_ids_T)
        np.testing.assert_allclose(turn.completion.logprobs_T, expected.detach().numpy(), atol=2e-5)


def test_a_changed_conversation_begins_a_new_episode_and_is_counted() -> None:
    conversations, question = made(), said("user", QUESTION)
    first = ask(conversations, question)
    answer = first.completion.text
    for changed in (f"{answer}!", "red"):
        assert ask(conversations, question, said("assistant", changed), question).continues is None
    assert conversations.num_unmatched == 2
    for _ in range(2):  # two branches of one conversation
        branch = ask(conversations, question, said("assistant", answer), question)
        assert branch.continues == first.completion.id
    assert conversations.num_unmatched == 2


def test_what_cannot_be_rendered_is_one_line() -> None:
    damaged = said("user", ImageRef(source=b"hello", where="a picture of the request"))
    for conversations, message, error in (
        (made(), damaged, "a picture of the request"),
        (made(), said("user", "<|im_end|>"), r"its text contains <\|im_end\|>"),
        (made(PARTS.processor.max_positions - 4), said("user", QUESTION), "the model has positions for only 4 before"),
    ):
        with pytest.raises(BadRowError, match=error):
            ask(conversations, message)
