"""Equal completions are in a packed row once, and train as if each of them were in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.config.algorithm import Algorithm, CispoLoss, ClippedLoss, GspoLoss
from fovea.models.flops import Passes, Work
from fovea.models.plain import PlainVLM
from fovea.samples import with_old_logprobs
from fovea.train.packing import Continuation, pack_conversations
from fovea.train.row_assignment import Cost, GroupSlice, slice_groups
from fovea.types import Batch
from tests.policies import REPEATED, make_batch, make_policy, micro_batcher, repeated, update_gradients
from tests.reference import largest_relative_difference
from tests.tiny_models import CPU, DENSE_FAMILIES, image, renderer, tiny, user
from tests.train.recording_pair import Pair, batch_of

GRADIENT_TOLERANCE = 1e-5


def alone(batch: Batch) -> Batch:
    """Each sample in a separate group, which shares nothing: the slow twin."""
    return Batch(groups=tuple(replace(g, samples=(sample,)) for g in batch.groups for sample in g.samples))


@pytest.mark.parametrize("max_tokens", [10_000, 75])
@pytest.mark.parametrize(
    "loss", [ClippedLoss(clip_high=0.3), GspoLoss(), CispoLoss()], ids=lambda loss: type(loss).__name__
)
def test_gradient_and_metrics_are_those_of_samples_that_share_nothing(
    loss: ClippedLoss | GspoLoss | CispoLoss, max_tokens: int
) -> None:
    results = []
    for change in (repeated, lambda batch: alone(repeated(batch))):
        parts = tiny("qwen3_vl")
        algorithm = Algorithm(entropy_coef=0.1, loss=loss, importance_sampling_fix=True)
        policy = make_policy(parts, algorithm=algorithm, max_tokens_per_microbatch=max_tokens)
        batch = change(make_batch(parts))
        logprobs = policy.logprobs(batch)
        gradient, metrics = update_gradients(policy, batch), policy.update(batch)
        for name in ("memory/activations_gib", "microbatch/max_tokens", "balance/microbatches", "update_tflop"):
            del metrics[name]
        results.append((gradient, metrics, np.concatenate(logprobs)))
    (shared, shared_metrics, shared_logprobs), (single, single_metrics, single_logprobs) = results
    assert largest_relative_difference(single, shared) < GRADIENT_TOLERANCE
    assert shared_metrics == pytest.approx(single_metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(shared_logprobs, single_logprobs, atol=1e-5)


def test_a_row_holds_equal_completions_once_and_all_their_actions() -> None:
    parts = tiny("qwen3_vl")
    batch = make_batch(parts)
    (micro,) = micro_batcher(parts).micro_batches(repeated(batch).groups)
    (of_unequal,) = micro_batcher(parts).micro_batches(batch.groups)
    assert micro.row.num_tokens == of_unequal.row.num_tokens
    lengths = [len(g.samples[place].token_ids_T) for g in batch.groups for place in REPEATED]
    assert micro.lengths == tuple(lengths)
    assert micro.row.num_actions == len(micro.weights_A) == sum(lengths)


def test_the_plain_path_shares_them_too() -> None:
    parts = tiny("qwen3_vl")
    (micro,) = micro_batcher(parts).micro_batches(repeated(make_batch(parts)).groups)
    fast = make_policy(parts).vlm(micro.row, temperature=0.9, chunk_tokens=1000)
    plain_parts = tiny("qwen3_vl")
    plain = PlainVLM(plain_parts.network, plain_parts.processor.banned_ids)
    torch.testing.assert_close(
        plain(micro.row, temperature=0.9, chunk_tokens=1000).logprobs_A, fast.logprobs_A, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_they_are_read_from_the_tape_once(family: str) -> None:
    gradients, tokens = [], []
    for traces in (True, False):
        parts = tiny(family)
        pair = Pair(parts)
        rollout = pair.rollout(n=4)
        same = [[group[0], group[1], group[0], group[1]] for group in rollout]
        batch = batch_of(pair.prompts, same, traces=traces)
        (micro,) = micro_batcher(parts).micro_batches(batch.groups)
        tokens.append(micro.row.num_tokens)
        gradients.append(pair.gradient(batch))
        assert pair.metrics["reused_frac"] == float(traces)
        actions = sum(len(completion.token_ids_T) for group in same for completion in group)
        assert pair.metrics["actions_trained"] == actions
    unequal = sum(len(completion.token_ids_T) - 1 for group in rollout for completion in group[:2])
    assert tokens == [unequal + sum(prompt.num_tokens for prompt in pair.prompts)] * 2
    assert largest_relative_difference(gradients[1], gradients[0]) < GRADIENT_TOLERANCE


def test_samples_that_differ_in_actions_or_images_alone_share_nothing() -> None:
    parts = tiny("qwen3_vl")
    prompt = renderer(parts).prompt(user(image(0), "How many?"))
    pad = parts.processor.family.image_token_id
    images = [renderer(parts).prompt(user(image(number), "?")).images for number in (1, 2)]
    ids_T = np.array([5, 6, *[pad] * images[0][0].num_tokens, 7, 8])
    masks = np.zeros((2, len(ids_T)), dtype=np.bool_)
    masks[:, [0, -1]], masks[1, 1] = True, True
    each = [
        Continuation(token_ids_T=ids_T, mask_T=masks[a], images=images[b]) for a, b in ((0, 0), (1, 0), (0, 1), (0, 0))
    ]
    row = pack_conversations(parts.processor.family, [prompt], [each], CPU)
    assert row.layout.lengths == ((prompt.num_tokens, (len(ids_T) - 1,) * 3),)
    assert row.computed_A.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert len(row.images) == 4


def test_cost_and_budget_count_what_is_computed() -> None:
    batch = make_batch(tiny("qwen3_vl"))
    single, double = batch.groups[0], repeated(batch).groups[0]
    of = {each: GroupSlice(group=group, first_sample=0) for each, group in (("single", single), ("double", double))}
    assert of["double"].num_tokens == of["single"].num_tokens
    work = Work(token=2, pair=4, action=6, patch=8, image_pair=10, window_pair=0, window_side=0)
    cost = Cost(work=work, passes=Passes(linear=3, attention=3, vision=3, vision_attention=3))
    assert cost.of(double) == cost.of(single)
    assert len(slice_groups([double], of["single"].num_tokens)) == 1
    # 4, 0 and 6 tokens: 0 1 0 | 2 1 | 0
    small = slice_groups([double], single.prompt.num_tokens + 7)
    assert [len(part.group.samples) for part in small] == [3, 2, 1]


def test_old_logprobs_of_copies_are_their_own() -> None:
    """What a copy brings with it is not taken from the first of its kind."""
    parts = tiny("qwen3_vl")
    batch = repeated(make_batch(parts))
    (micro,) = micro_batcher(parts).micro_batches(with_old_logprobs(batch, _numbers(batch)).groups)
    assert micro.old_logprobs_A is not None
    assert micro.old_logprobs_A.tolist() == [x for each in _numbers(batch) for x in each]


def _numbers(batch: Batch) -> list[np.ndarray]:
    return [np.full(len(s.token_ids_T), float(number), dtype=np.float32) for number, s in enumerate(batch.samples)]
