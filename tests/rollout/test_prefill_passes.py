"""How prompts are split into the forward passes of a prefill."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fovea.rollout.embedded.prefill import prompt_passes


@pytest.mark.parametrize(
    ("lengths", "starts", "passes"),
    [
        ([4, 4, 4], [0, 0, 0], [[(5, 0, 4), (6, 0, 4)], [(7, 0, 4)]]),
        # new tokens of later turns share a pass, but not with whole prompts
        ([24, 23, 4, 4, 22], [20, 20, 0, 0, 20], [[(5, 20, 24), (6, 20, 23)], [(7, 0, 4), (8, 0, 4)], [(9, 20, 22)]]),
        # more than fit into a pass, at the beginning and after kept tokens
        ([10, 31, 23], [0, 20, 20], [[(5, 0, 8)], [(5, 8, 10)], [(6, 20, 28)], [(6, 28, 31)], [(7, 20, 23)]]),
    ],
)
def test_passes(
    lengths: Sequence[int], starts: Sequence[int], passes: Sequence[Sequence[tuple[int, int, int]]]
) -> None:
    found = prompt_passes(lengths, 5, 8, starts)
    assert [[(span.prompt, span.start, span.end) for span in spans] for spans in found] == passes
