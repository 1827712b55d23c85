"""Distributions that a rollout leaves on the tape: the update of their tokens against one that computes them again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.cluster.local import SharedWeights
from fovea.config.run import Algorithm, Model
from fovea.models import policy_network
from fovea.models.activation_tape import Tape
from fovea.models.recorded_distributions import DistributionTape
from fovea.models.token_logprobs import TokenScores, token_scores
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.sampler import Draw, needs_of, row_settings, sample_tokens
from fovea.samples import with_old_logprobs
from fovea.types import Metrics, Sampling
from fovea.utils.event_loop import wait_for
from tests.policies import stepped_gradients
from tests.reference import largest_relative_difference
from tests.rollout.drawing import generate
from tests.tiny_models import DENSE_FAMILIES, mixed_prompts, tiny
from tests.train.ppo_policies import PPO, gradients, ppo_policy, scored
from tests.train.recording_pair import (
    FROZEN,
    GRADIENT_TOLERANCE,
    LORA,
    TEMPERATURE,
    TRAINED,
    Pair,
    batch_of,
    gradients_of_steps,
)

METRIC_TOLERANCE = 1e-5
NOT_COMPARED = ("reused_", "seconds", "memory", "rollout_train", "mfu")
"""Metrics that say what was reused, or that a reusing update does not have."""


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of actions that logits were computed for."""
    counted: list[int] = []

    def counting(hidden_AE: torch.Tensor, *arguments: object, **settings: object) -> TokenScores:
        counted.append(len(hidden_AE))
        return token_scores(hidden_AE, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(policy_network, "token_scores", counting)
    return counted


def compared(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}


@pytest.mark.parametrize("settings", [TRAINED, FROZEN, LORA], ids=["trained", "frozen", "lora"])
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_gradients_and_metrics_equal_those_of_a_plain_update(family: str, settings: Model, heads: list[int]) -> None:
    """With an entropy bonus, in several micro-batches, in chunks of a few actions."""
    found, metrics = [], []
    for traces in (True, False):
        algorithm = Algorithm(entropy_coef=0.1)
        train = {"max_tokens_per_microbatch": 85, "backend": {"logits_mib": 0.02}}
        pair = Pair(tiny(family), settings, algorithm=algorithm, distributions=True, **train)
        batch = batch_of(pair.prompts, pair.rollout(), traces=traces)
        heads.clear()
        found.append(pair.gradient(batch))
        metrics.append(compared(pair.metrics))
        assert bool(heads) != traces, "no logits are computed where their distributions are recorded"
    assert largest_relative_difference(found[1], found[0]) < GRADIENT_TOLERANCE
    assert metrics[0] == pytest.approx(metrics[1], rel=METRIC_TOLERANCE, abs=1e-6)
    assert metrics[0]["entropy"] > 0


def test_the_head_runs_backward_only() -> None:
    operations = {}
    for distributions in (True, False):
        pair = Pair(tiny("qwen3_vl"), distributions=distributions)
        batch = batch_of(pair.prompts, pair.rollout())
        with FlopCounterMode(display=False) as counter:
            pair.policy.update(batch)
        operations[distributions] = counter.get_total_flops()
    head = pair.vlm.network.get_output_embeddings().weight
    actions = sum(len(sample.token_ids_T) for sample in batch.samples)
    assert operations[False] - operations[True] == 2 * actions * head.numel()


def test_rows_that_wait_in_line_and_end_early_are_recorded_right(heads: list[int]) -> None:
    found = []
    for traces in (True, False):
        parts = tiny("qwen3_vl")
        pair = Pair(parts, distributions=True)
        pair.engine = EmbeddedEngine(pair.vlm, parts.processor, max_batch_tokens=160, tape=pair.tape)
        pair.weight_sync = SharedWeights(pair.policy, pair.engine)
        wait_for(pair.weight_sync.push(0))
        pair.prompts = pair.prompts * 3
        batch = batch_of(pair.prompts, pair.rollout(max_new_tokens=24, n=2, stop=("e", "a")), traces=traces)
        heads.clear()
        found.append(pair.gradient(batch))
        assert bool(heads) != traces
    assert largest_relative_difference(found[1], found[0]) < GRADIENT_TOLERANCE


def test_draws_are_the_same_with_and_without() -> None:
    drawn = []
    for distributions in (True, False):
        pair = Pair(tiny("qwen3_vl"), distributions=distributions)
        for sampling in ({}, {"top_p": 0.8}):
            groups = pair.rollout(**sampling)
            drawn.append([(c.token_ids_T.tolist(), c.logprobs_T.tolist()) for group in groups for c in group])
    assert drawn[:2] == drawn[2:]


def test_with_top_p_it_is_the_whole_distribution_that_trains(heads: list[int]) -> None:
    found = []
    for traces in (True, False):
        pair = Pair(tiny("qwen3_vl"), distributions=True)
        batch = batch_of(pair.prompts, pair.rollout(top_p=0.5), traces=traces)
        heads.clear()
        found.append(pair.gradient(batch))
        assert bool(heads) != traces
    assert largest_relative_difference(found[1], found[0]) < GRADIENT_TOLERANCE


def test_later_epochs_compute_them_again() -> None:
    found = []
    for traces in (True, False):
        algorithm = Algorithm(ppo_epochs=2, minibatches=2)
        pair = Pair(tiny("qwen3_vl"), algorithm=algorithm, distributions=True, learning_rate=0.1)
        batch = batch_of(pair.prompts, pair.rollout(max_new_tokens=16), traces=traces)
        batch = with_old_logprobs(batch, pair.policy.annotator.logprobs(batch))
        found.append(gradients_of_steps(pair, batch))
    for step, (reused, plain) in enumerate(zip(*found, strict=True)):
        assert largest_relative_difference(plain, reused) < GRADIENT_TOLERANCE, f"step {step}"


@pytest.mark.parametrize("separate", [False, True])
def test_ppo_with_a_value_function(separate: bool, heads: list[int]) -> None:
    found = []
    for traces in (True, False):
        parts = tiny("qwen3_vl")
        policy = ppo_policy(parts, separate=separate, algorithm=PPO.model_copy(update={"entropy_coef": 0.1}))
        assert isinstance(policy.vlm, VLM)
        kept = DistributionTape(policy.vlm.vocabulary_size, TEMPERATURE)
        policy._tape, policy._steps = Tape(policy.vlm.linear_widths, 2**26, torch.float32, kept), 1
        engine = EmbeddedEngine(policy.vlm, parts.processor, max_batch_tokens=10_000, tape=policy._tape)
        wait_for(SharedWeights(policy, engine).push(0))
        prompts = mixed_prompts(parts)
        sampling = [Sampling(max_new_tokens=9, temperature=TEMPERATURE, seed=index) for index in range(len(prompts))]
        groups = generate(engine, prompts, sampling, 3, for_update=True)
        batch = scored(policy, batch_of(prompts, groups, traces=traces))
        stepped = stepped_gradients(policy)
        heads.clear()
        metrics = policy.update(batch)
        assert bool(heads) != traces
        found.append((gradients(policy, stepped), compared(metrics)))
    assert largest_relative_difference(found[1][0], found[0][0]) < GRADIENT_TOLERANCE
    assert found[0][1] == pytest.approx(found[1][1], rel=METRIC_TOLERANCE, abs=1e-6)


def test_another_temperature_than_that_of_the_update_is_not_recorded(heads: list[int]) -> None:
    pair = Pair(tiny("qwen3_vl"), distributions=True)
    pair.policy.update(batch_of(pair.prompts, pair.rollout(temperature=1.0)))
    assert heads


def test_what_does_not_fit_beside_linear_outputs_is_computed_again(heads: list[int]) -> None:
    """One byte less than outputs, image graph and distributions take."""
    parts = tiny("qwen3_vl")
    vlm = VLM(parts.network, parts.processor.banned_ids)
    prompts = mixed_prompts(parts)
    images = vlm.graph_bytes([image for prompt in prompts for image in prompt.images])
    limits, n = (9, 7, 5), 3
    outputs = (sum(prompt.num_tokens for prompt in prompts) + n * sum(limits)) * 4 * sum(map(sum, vlm.linear_widths))
    distributions = sum(1 + n * (limit - 1) for limit in limits) * vlm.logits_bytes_per_token
    for missing in (0, 1):
        pair = Pair(tiny("qwen3_vl"), max_bytes=images + outputs + distributions - missing, distributions=True)
        heads.clear()
        metrics = pair.policy.update(batch_of(pair.prompts, pair.rollout()))
        assert metrics["reused_frac"] == 1, "linear outputs fit"
        assert bool(heads) == bool(missing)


def test_a_request_that_no_longer_fits_ends_the_recording_of_those_beside_it(heads: list[int]) -> None:
    """Those that were recorded as a whole stay."""
    found = []
    for traces in (True, False):
        parts = tiny("qwen3_vl")
        pair = Pair(parts, distributions=True)
        kept = pair.tape._distributions
        assert kept is not None
        pair.engine = EmbeddedEngine(pair.vlm, parts.processor, max_batch_tokens=160, tape=pair.tape)
        wait_for(SharedWeights(pair.policy, pair.engine).push(0))
        pair.prompts = pair.prompts * 2
        # the requests are admitted one after the other
        whole = pair.tape.reserve_distributions
        calls: list[int] = []

        def first_only(rows: int, temperatures: object, calls: list[int] = calls, whole: object = whole) -> bool:
            calls.append(rows)
            return len(calls) == 1 and whole(rows, temperatures)  # type: ignore[operator,no-any-return]

        pair.tape.reserve_distributions = first_only  # type: ignore[method-assign]
        groups = pair.rollout(max_new_tokens=16, n=2)
        assert len(calls) > 0
        heads.clear()
        found.append(pair.gradient(batch_of(pair.prompts, groups, traces=traces)))
        assert heads
    assert largest_relative_difference(found[1], found[0]) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("banned", [(), (0, 3)])
def test_scores_and_gradients_are_those_of_the_slow_twin(dtype: torch.dtype, banned: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(7, 16).to(dtype), torch.randn(40, 16).to(dtype)
    targets, banned_K = torch.randint(4, 40, (7,)), torch.tensor(banned, dtype=torch.long)
    tape = DistributionTape(40, TEMPERATURE)
    tape.restart()
    tape.make_room(10, 20)
    places = torch.tensor([3, 9, 4, 0, 19, 7, 8])
    sampling = [Sampling(max_new_tokens=1, temperature=TEMPERATURE)] * 7
    draw = Draw(
        uniform_B=torch.rand(7).double(),
        settings=row_settings(sampling, torch.device("cpu")),
        needs=needs_of(sampling),
        banned_K=banned_K,
        recorded=tape.rows(places),
    )
    sample_tokens((hidden @ head.t()).float(), draw)
    results = []
    for fast in (True, False):
        inputs = [x.clone().requires_grad_() for x in (hidden, head)]
        if fast:
            known = tape.read(places)
            assert known is not None
            scores = known.scores(*inputs, targets, chunk_tokens=3)
        else:
            scores = token_scores(*inputs, targets, banned_K, temperature=TEMPERATURE, chunk_tokens=3)
        loss = scores.logprobs_A @ torch.arange(7.0) + scores.entropies_A @ torch.arange(1.0, 8.0)
        slopes = torch.autograd.grad(loss, inputs)
        results.append([scores.logprobs_A, scores.entropies_A, scores.banned_mass_A, *slopes])
    for fast_result, slow_result in zip(*results, strict=True):
        torch.testing.assert_close(fast_result, slow_result, rtol=1e-5, atol=1e-6)
    assert tape.read(torch.tensor([3, 5])) is None, "place 5 is not recorded"
