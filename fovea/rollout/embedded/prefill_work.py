"""Count of the work of prefill, to show that a prompt is run once for all of its completions."""

from __future__ import annotations

from fovea.models.flops import Work
from fovea.rollout.embedded.requests import QueuedRequest
from fovea.types import Metrics

TERA = 1e12


class PrefillWork:
    """Model FLOPs of the decoder on the prompts that an engine has prefilled."""

    def __init__(self, work: Work) -> None:
        self._work, self._run, self._copies = work, 0.0, 0.0

    def add(self, request: QueuedRequest) -> None:
        """Count a request whose prompt is run once, from its first new token on."""
        flops = self._work.prompt(request.prompt.num_tokens, ()) - self._work.prompt(request.first_new_token, ())
        self._run += flops
        self._copies += request.n * flops

    def take(self) -> Metrics:
        """TFLOP since the last call: those run, and those of a pass for each completion."""
        found = {"rollout_prefill_tflop": self._run / TERA, "rollout_prefill_copies_tflop": self._copies / TERA}
        self._run = self._copies = 0.0
        return found
