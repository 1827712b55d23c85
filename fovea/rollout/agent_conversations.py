"""Conversations of an agent that sends its whole message history with every request, continued from sampled token ids.

The history is looked up by its content, up to the last answer that was sampled here, and the prompt continues from the
ids of that answer: sampled text is never tokenized again. A conversation with answers that were not sampled here, or
were changed, begins a new episode and is counted in `num_unmatched`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fovea.data.prompt_source import RendersPrompts
from fovea.rollout.base import Engine
from fovea.rollout.collect import extended
from fovea.types import Completion, Prompt, Request, Sampling
from fovea_gym.errors import BadRowError
from fovea_gym.types import ImageRef, Message
from fovea_gym.utils.lru_cache import LRUCache

MAX_REMEMBERED_BYTES = 1 << 30
"""Memory for conversations that may continue. The least recently used are evicted, and then begin a new episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """A conversation up to and including an answer that was sampled here."""

    episode: str
    """Id of the first turn's completion."""
    number: int
    """Number of the turn, counted from 1."""
    prompt: Prompt
    completion: Completion
    continues: str | None
    """Id of the previous turn's completion; None in the first turn."""

    @property
    def num_bytes(self) -> int:
        pixels = sum(image.num_bytes for image in self.prompt.images)
        return self.prompt.token_ids_L.nbytes * 2 + self.completion.token_ids_T.nbytes * 2 + pixels


class AgentConversations:
    """Answers conversations with an engine."""

    def __init__(self, engine: Engine, renderer: RendersPrompts, name: str) -> None:
        """`name` is the prefix of completion ids."""
        self._engine = engine
        self._renderer = renderer
        self._name = name
        self._turns: LRUCache[str, AgentTurn] = LRUCache(MAX_REMEMBERED_BYTES)
        self._num_requests = 0
        self.num_unmatched = 0
        """Number of conversations with earlier answers that were not sampled here, or were changed."""

    async def answer(self, messages: Sequence[Message], sampling: Sampling) -> AgentTurn:
        """Sample the answer to a conversation with encoded images; BadRowError if it cannot be rendered."""
        self._num_requests += 1
        request_id = f"{self._name}/{self._num_requests}"
        before, new = self._known(messages)
        if before is None:
            prompt = self._renderer.prompt(new, where=request_id)
        else:
            after = int(before.completion.token_ids_T[-1])
            observation = self._renderer.observation(new, after=after, where=request_id)
            prompt = extended(before.prompt, before.completion.token_ids_T, observation)
        self._check_length(prompt)
        (completion,) = await self._engine.generate(Request(id=request_id, prompt=prompt, sampling=sampling))
        turn = AgentTurn(
            episode=completion.id if before is None else before.episode,
            number=1 if before is None else before.number + 1,
            prompt=prompt,
            completion=completion,
            continues=None if before is None else before.completion.id,
        )
        *_, key = _keys((*messages, Message(role="assistant", parts=(completion.text,))))
        self._turns.put(key, turn, turn.num_bytes)
        return turn

    def _check_length(self, prompt: Prompt) -> None:
        most_tokens = self._renderer.most_tokens
        if most_tokens is not None and prompt.num_tokens > most_tokens:
            raise BadRowError(
                f"the conversation has {prompt.num_tokens} tokens, images included, but the model has positions for "
                f"only {most_tokens} before an answer; start a new conversation",
                "prompt_too_long",
            )

    def _known(self, messages: Sequence[Message]) -> tuple[AgentTurn | None, Sequence[Message]]:
        """Look up the conversation up to its last answer, if that was sampled here; also returns the later messages."""
        ends = [number for number, message in enumerate(messages, 1) if message.role == "assistant"]
        if not ends:
            return None, messages
        before = self._turns.get(list(_keys(messages))[ends[-1] - 1])
        if before is None or ends[-1] == len(messages):
            self.num_unmatched += 1
            return None, messages
        return before, messages[ends[-1] :]


def _keys(messages: Sequence[Message]) -> Iterator[str]:
    """Yield for each message a hash of the conversation up to and including it."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(f"{message.role}\0{len(message.parts)}\0".encode())
        for part in message.parts:
            source = part.source if isinstance(part, ImageRef) else part.encode("utf-8", "surrogatepass")
            assert isinstance(source, bytes), "images in requests are encoded bytes"
            digest.update(f"{type(part).__name__}\0{len(source)}\0".encode() + source)
        yield digest.hexdigest()
