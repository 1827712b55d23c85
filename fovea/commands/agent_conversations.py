"""Conversations of outside agents with a run's engine: ids that only grow, recorded as they were drawn.

An agent sends the whole conversation with every request. Its beginning is looked up by content, down to the last answer
that was drawn here, and the request goes on from the ids of that answer: what was drawn is never tokenised again. A
conversation with answers that were not drawn here, or that have changed, begins a new episode, which is counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fovea.environments.prompt_source import RendersPrompts
from fovea.errors import BadRowError
from fovea.rollout.base import Engine
from fovea.rollout.collect import extended
from fovea.types import Completion, ImageRef, Message, Prompt, Request, Sampling
from fovea.utils.lru_cache import LRUCache

TURNS_FILE = "turns.jsonl"
IMAGES_FOLDER = "images"
MAX_REMEMBERED_BYTES = 1 << 30
"""Of the conversations that may go on; the least recently used are forgotten, and then begin new episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A conversation up to an answer that was drawn here."""

    episode: str
    """Id of the completion of its first turn."""
    number: int
    """Number of the turn, from 1."""
    prompt: Prompt
    completion: Completion

    @property
    def num_bytes(self) -> int:
        pixels = sum(image.num_bytes for image in self.prompt.images)
        return self.prompt.token_ids_L.nbytes * 2 + self.completion.token_ids_T.nbytes * 2 + pixels


class AgentConversations:
    """Answers requests by an engine, and records every turn in a folder."""

    def __init__(self, engine: Engine, renderer: RendersPrompts, folder: Path, name: str) -> None:
        """`name` begins the ids of completions: it must differ between servers that record in one folder."""
        self._engine = engine
        self._renderer = renderer
        self._folder = folder
        self._name = name
        self._spoken: LRUCache[str, Spoken] = LRUCache(MAX_REMEMBERED_BYTES)
        self._num_requests = self.num_turns = 0
        self.num_unmatched = 0
        """Conversations with earlier answers that were not drawn here, or have changed."""
        (folder / IMAGES_FOLDER).mkdir(parents=True, exist_ok=True)

    async def answer(self, messages: Sequence[Message], sampling: Sampling) -> Spoken:
        """Draw the answer to a conversation and record its turn; BadRowError where that cannot be rendered."""
        self._num_requests += 1
        request_id = f"{self._name}/{self._num_requests}"
        before, new = self._known(messages)
        if before is None:
            observation = prompt = self._renderer.prompt(new, where=request_id)
        else:
            after = int(before.completion.token_ids_T[-1])
            observation = self._renderer.observation(new, after=after, where=request_id)
            prompt = extended(before.prompt, before.completion.token_ids_T, observation)
        self._check_length(prompt)
        (completion,) = await self._engine.generate(Request(id=request_id, prompt=prompt, sampling=sampling))
        spoken = Spoken(
            episode=completion.id if before is None else before.episode,
            number=1 if before is None else before.number + 1,
            prompt=prompt,
            completion=completion,
        )
        answered = (*messages, Message(role="assistant", parts=(completion.text,)))
        *_, key = _keys(answered)
        self._spoken.put(key, spoken, spoken.num_bytes)
        self._record(spoken, before, new, observation, sampling)
        return spoken

    def _check_length(self, prompt: Prompt) -> None:
        most_tokens = self._renderer.most_tokens
        if most_tokens is not None and prompt.num_tokens > most_tokens:
            raise BadRowError(
                f"the conversation has {prompt.num_tokens} tokens, images included, and the model has positions for "
                f"{most_tokens} beside an answer; begin another one",
                "prompt_too_long",
            )

    def _known(self, messages: Sequence[Message]) -> tuple[Spoken | None, Sequence[Message]]:
        """The conversation up to the last earlier answer, where it was drawn here, and the messages after it."""
        ends = [number for number, message in enumerate(messages, 1) if message.role == "assistant"]
        if not ends:
            return None, messages
        before = self._spoken.get(list(_keys(messages))[ends[-1] - 1])
        if before is None or ends[-1] == len(messages):
            self.num_unmatched += 1
            return None, messages
        return before, messages[ends[-1] :]

    def _record(
        self, spoken: Spoken, before: Spoken | None, new: Sequence[Message], observation: Prompt, sampling: Sampling
    ) -> None:
        completion = spoken.completion
        line = {
            "episode": spoken.episode,
            "turn": spoken.number,
            "id": completion.id,
            "continues": None if before is None else before.completion.id,
            "messages": [{"role": each.role, "parts": list(map(self._recorded, each.parts))} for each in new],
            "observation_ids": observation.token_ids_L.tolist(),
            "image_keys": [image.key for image in observation.images],
            "text": completion.text,
            "token_ids": completion.token_ids_T.tolist(),
            "logprobs": [float(logprob) for logprob in completion.logprobs_T],
            "temperature": sampling.temperature,
            "finish": completion.finish,
            "version": completion.version,
        }
        with (self._folder / TURNS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.num_turns += 1

    def _recorded(self, part: str | ImageRef) -> dict[str, str]:
        """A text, or the name of a picture's file, which is written once."""
        if isinstance(part, str):
            return {"text": part}
        assert isinstance(part.source, bytes), "pictures of requests are encoded"
        name = hashlib.sha256(part.source).hexdigest()
        file = self._folder / IMAGES_FOLDER / name
        if not file.exists():
            file.write_bytes(part.source)
        return {"image": f"{IMAGES_FOLDER}/{name}"}


def _keys(messages: Sequence[Message]) -> Iterator[str]:
    """A hash of the conversation up to each message."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(f"{message.role}\0{len(message.parts)}\0".encode())
        for part in message.parts:
            source = part.source if isinstance(part, ImageRef) else part.encode("utf-8", "surrogatepass")
            assert isinstance(source, bytes), "pictures of requests are encoded"
            digest.update(f"{type(part).__name__}\0{len(source)}\0".encode() + source)
        yield digest.hexdigest()
