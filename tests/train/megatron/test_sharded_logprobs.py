"""Scores over slices of the vocabulary against those over all of it, on one rank; `test_equal_steps` has two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fovea.models.head_gradients import LossGradients
from fovea.models.token_logprobs import TokenScores, token_scores
from fovea.train.megatron.sharded_logprobs import VocabularySlice, sharded_token_scores
from tests.models.banned_ids import ACTIONS, BANNED, TOLERANCE, VOCABULARY, inputs

OF_LOGPROBS, OF_ENTROPIES = torch.linspace(-1, 2, ACTIONS), torch.linspace(0.5, -0.7, ACTIONS)
SETTINGS = {"temperature": 0.7, "chunk_tokens": 4}


@pytest.fixture
def whole() -> VocabularySlice:
    """The slice of the one rank of a group, which is not the default one: other tests of this process may have that."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    return VocabularySlice.of_rank(0, VOCABULARY, torch.tensor(BANNED), group)


def results(scores: TokenScores, hidden: Tensor, head: Tensor) -> list[Tensor]:
    """Scores and gradients."""
    ((OF_LOGPROBS * scores.logprobs_A).sum() + (OF_ENTROPIES * scores.entropies_A).sum()).backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return [scores.logprobs_A, scores.entropies_A, scores.banned_mass_A, hidden.grad, head.grad]


@pytest.mark.parametrize("loss_gradients", [None, LossGradients(lambda *_: (OF_LOGPROBS, OF_ENTROPIES))])
def test_one_slice_is_the_whole_vocabulary(loss_gradients: LossGradients | None, whole: VocabularySlice) -> None:
    hidden, head, targets = inputs()
    found = results(
        sharded_token_scores(hidden, head, targets, whole, **SETTINGS, loss_gradients=loss_gradients), hidden, head
    )
    hidden, head, targets = inputs()
    expected = results(token_scores(hidden, head, targets, torch.tensor(BANNED), **SETTINGS), hidden, head)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=1e-4)


def test_banned_ids_are_those_of_the_slice(whole: VocabularySlice) -> None:
    banned = torch.tensor([0, 3, 4, 7, 8])
    slices = [VocabularySlice.of_rank(rank, 4, banned, whole.group).banned_K.tolist() for rank in range(3)]
    assert slices == [[0, 3], [0, 3], [0]]
