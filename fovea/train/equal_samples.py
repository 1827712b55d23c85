"""Equal samples of a group, which a packed row holds once.

Short answers repeat: of 8 completions of a prompt 2 or 3 may be different ones. Equal completions have the same
log-probs, so that the network runs on one of each; the loss is still that of every sample, with its own advantage and
weight, and their gradients meet in the shared tokens. Exact but for rounding. Like the tokens of the prompt, shared
tokens have one mask of dropout.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fovea.types import PromptImage


class Continuing(Protocol):
    """Tokens behind a prompt, as the network reads them."""

    @property
    def token_ids_T(self) -> NDArray[np.int64]: ...

    @property
    def mask_T(self) -> NDArray[np.bool_]:
        """True at actions."""

    @property
    def images(self) -> tuple[PromptImage, ...]: ...


C = TypeVar("C", bound=Continuing)


def distinct(continuations: Sequence[C]) -> tuple[list[C], list[int]]:
    """The first of each set of equal continuations of one prompt, and the index of each continuation's among them."""
    places: dict[Hashable, int] = {}
    firsts: list[C] = []
    index: list[int] = []
    for each in continuations:
        place = places.setdefault(_key(each), len(firsts))
        if place == len(firsts):
            firsts.append(each)
        index.append(place)
    return firsts, index


def _key(each: Continuing) -> Hashable:
    # the mask, too: only actions have log-probs
    return each.token_ids_T.tobytes(), each.mask_T.tobytes(), tuple(image.key for image in each.images)
