"""What an engine with weights of its own can serve now: the version that it draws with, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.errors import EngineError
from fovea.rollout.outputs import check_fits
from fovea.types import Request

CLOSED = "the engine was closed; start another"
NO_WEIGHTS = "the engine has no weights; push them first"
BROKEN_PUSH = (
    "the last push of weights broke off and left weights of two versions in the engine; push all of them again, or "
    "start again to go on from the last checkpoint"
)


@dataclass(slots=True, kw_only=True)
class Readiness:
    """Whether an engine can serve a request, and with which weights."""

    max_model_len: int
    """Most tokens of a prompt with its completion."""
    max_images: int
    """Most images of a prompt."""
    version: int | None = None
    """Version of the weights that it holds; None: it has none to draw with, for the reason in `lacks`."""
    lacks: str = NO_WEIGHTS
    asleep: bool = False

    def lose_weights(self, reason: str) -> None:
        """Refuse requests for this reason, until a version is set again."""
        self.version, self.lacks = None, reason

    def check(self, request: Request) -> None:
        """Raise EngineError for a request that cannot be served now, or at all."""
        if self.asleep:
            raise EngineError("a request to an engine that is asleep; call wake first")
        if self.version is None:
            raise EngineError(self.lacks)
        check_fits(request, max_model_len=self.max_model_len, max_images=self.max_images)

    def check_wakes(self) -> None:
        """Raise EngineError for a wake of an engine whose weights were freed, and not pushed since."""
        if self.version is None:
            raise EngineError("wake was called before the weights that sleep freed were pushed; push them first")

    @property
    def drawn_with(self) -> int:
        """Version of the weights that the running requests are drawn with."""
        assert self.version is not None, "weights came while a request was running"
        return self.version


def check_idle(call: str, num_running: int) -> None:
    """Raise EngineError for a call that may not come while requests run."""
    if num_running:
        raise EngineError(f"{call} while the engine is generating completions; await them first")
