"""Scheduling of the engine's requests: which one runs next, and which row is preempted if the KV cache is full."""

from __future__ import annotations

from collections import deque

from fovea.rollout.embedded.batch import DecodeBatch
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.requests import DecodeRow, KeptKeys, QueuedRequest, resumption
from fovea.types import Completion
from fovea_gym.utils.lru_cache import LRUCache

PREFILL_PASSES = 2
"""Prompts are admitted together if their tokens fit into this number of forward passes."""


class Scheduler:
    """The queue of an engine and its running requests.

    Requests are admitted strictly first come, first served: if smaller ones could overtake, a large one might wait
    forever. A preempted completion waits at the head of the queue as a separate request (`resumption`).
    """

    def __init__(self, pass_tokens: int) -> None:
        """`pass_tokens` is the number of prompt tokens in one forward pass of the prefill."""
        self._most_new_tokens = PREFILL_PASSES * pass_tokens
        self._queue: deque[QueuedRequest] = deque()
        self._running: dict[QueuedRequest, list[Completion | None]] = {}
        """Finished completions of each admitted request, oldest request first; None for unfinished completions."""
        self._full = False
        """True if the next request of the queue does not fit until some rows finish."""

    def __bool__(self) -> bool:
        """True while requests are waiting or running."""
        return bool(self._queue or self._running)

    @property
    def needs_exact(self) -> bool:
        """True if a running request does not allow approximate weights."""
        return any(request.sampling.exact for request in self._running)

    def submit(self, request: QueuedRequest) -> None:
        """Append a request to the queue."""
        self._queue.append(request)

    def admit(self, cache: Cache, turns: LRUCache[str, KeptKeys]) -> list[QueuedRequest]:
        """Remove from the queue the first requests that fit the cache, as many as are prefilled at once.

        Each gets the KV cache of its previous turn if `turns` holds it. Preempted completions come first.
        """
        admitted: list[QueuedRequest] = []
        new_tokens = 0
        while self._queue and not self._full:
            request = self._queue[0].request
            # looked up only now: a waiting request must not keep memory alive that is evicted meanwhile
            kept = None if request.continues is None else turns.get(request.continues)
            # limits the image features and states of all these prompts, which are in memory together
            new_tokens += request.prompt.num_tokens - (0 if kept is None else kept.num_tokens)
            if admitted and new_tokens > self._most_new_tokens:
                break
            self._full = not cache.fits([*admitted, self._queue[0]])
            if not self._full:
                self._queue[0].kept = kept
                admitted.append(self._queue.popleft())
        self._running |= {request: [None] * request.n for request in admitted if request.preempted is None}
        return admitted

    def make_room(self, batch: DecodeBatch, cache: Cache, steps: int) -> None:
        """Preempt the youngest rows until the remaining ones have room for these steps."""
        while not cache.reserve(batch.tokens_after(steps)):
            age = {request: place for place, request in enumerate(self._running)}
            youngest = max(range(len(batch)), key=lambda row: (age[batch.rows[row].request], batch.rows[row].index))
            cache.remove([youngest])
            self._queue.extendleft(map(resumption, batch.remove([youngest])))
            self._full = True

    def finish(self, row: DecodeRow, completion: Completion) -> None:
        """Record a row's completion; once its request has all of its completions, return them to the caller."""
        completions = self._running[row.request]
        completions[row.index] = completion
        if None not in completions:
            del self._running[row.request]
            # the future of a cancelled caller is already done
            if not row.request.done.done():
                row.request.done.set_result([each for each in completions if each is not None])
        self._full = False

    def fail(self, error: BaseException) -> None:
        """Raise an error in every waiting caller."""
        for request in (*self._queue, *self._running):
            if not request.done.done():
                request.done.set_exception(error)
        self._queue.clear()
        self._running.clear()
        self._full = False
