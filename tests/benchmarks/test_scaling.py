"""The figures of the benchmark of scaling: what `fovea plan` says of the driver's messages, against such messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import PROMPT_TOKENS, SAMPLES, TOKENS, batch, message
from fovea.config.loading import load_config
from fovea.processes.messages import Packing
from fovea.tools.plan.plan import make_plan
from fovea.types import Request, Sampling

GROUPS, GPUS = 5, 3
RECIPE = Path(__file__).parents[2] / "recipes/shapes.yaml"
TOLERANCE = 0.02
"""Lengths of ids and numbers of a message that the plan rounds."""


def planned(*settings: str) -> dict[str, int]:
    """Bytes that the driver sends in a step, in MiB, by what."""
    lengths = (f"plan.prompt_tokens={PROMPT_TOKENS}", "plan.image_tokens=64", f"plan.completion_tokens={TOKENS}")
    sizes = (f"rollout.prompts_per_step={GROUPS}", f"rollout.samples_per_prompt={SAMPLES}")
    # room for a group
    more = ("train.max_tokens_per_microbatch=32768", "plan.gpu=cpu", f"plan.gpus={GPUS}")
    plan = make_plan(load_config([RECIPE], [*lengths, *sizes, *more, *settings]))
    return {moved.what: moved.num_bytes for moved in plan.traffic if moved.by_driver}


@pytest.mark.parametrize(
    ("settings", "learners"),
    [
        ((), 2),
        ((f"cluster.gpus_per_node={GPUS}",), 3),
        ((f"cluster.gpus_per_node={GPUS}", "cluster.placement=disaggregated", "cluster.rollout_gpus=1"), 2),
        ((f"cluster.gpus_per_node={GPUS}", "cluster.placement=disaggregated", "cluster.rollout_gpus=2"), 1),
    ],
    ids=["torchrun", "Ray", "an engine apart", "two engines apart"],
)
def test_planned_bytes_of_tokens_are_those_of_packed_messages(settings: tuple[str, ...], learners: int) -> None:
    """A step sends a request per prompt, and to each learner in another process the batch for log-probs and update."""
    updated = batch(GROUPS)
    scored = replace(
        updated,
        groups=tuple(
            replace(group, samples=tuple(replace(sample, advantages_T=None) for sample in group.samples))
            for group in updated.groups
        ),
    )
    learner = Packing()
    for each in (scored, updated):
        learner.pack(each)
    sampling = Sampling(max_new_tokens=TOKENS)
    engine = Packing()
    engine.pack([Request(id=group.task_id, prompt=group.prompt, sampling=sampling) for group in updated.groups])
    expected = learners * (learner.packed_bytes - learner.image_bytes) + engine.packed_bytes - engine.image_bytes
    assert planned(*settings)["tokens, from the driver"] == pytest.approx(expected, rel=TOLERANCE)


RAY, APART = f"cluster.gpus_per_node={GPUS}", ("cluster.placement=disaggregated", "cluster.rollout_gpus=2")


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        # one learner and one engine of three each, which are the same process for a third of the images
        ((RAY,), 1 + 1 - 1 / 3),
        # the same with a driver that is the first of them
        ((), 2 / 3 + 2 / 3 - 2 / 9),
        # one learner, which has all rows
        ((RAY, *APART), 1 + 1),
        # and a dummy's image, which two thirds of the learners would not have
        ((RAY, "model.freeze_vision_tower=false"), 1 + 1 - 1 / 3 + 2 / GROUPS),
        # rows of minibatches: dealt anew for log-probs and values, and in each of two epochs
        ((RAY, "algorithm={name: ppo, ppo_epochs: 2, minibatches: 2}"), 19 / 9 + 1 - 19 / 27),
    ],
    ids=["Ray", "torchrun", "two engines apart", "trained tower", "minibatches"],
)
def test_an_image_is_planned_for_one_engine_and_the_learners_with_rows_of_it(
    settings: tuple[str, ...], copies: float
) -> None:
    frozen = "model.freeze_vision_tower=true"
    bytes_of_images = planned(frozen, RAY, *APART)["images, from the driver"] / 2
    assert planned(frozen, *settings)["images, from the driver"] == pytest.approx(copies * bytes_of_images)


def test_a_message_has_thirteen_bytes_a_token_and_four_more_with_advantages() -> None:
    figures = message(4, 2)
    assert figures["message"] * 2**20 == pytest.approx(4 * SAMPLES * TOKENS * 17, rel=0.05)
    assert figures["images"] == 4 * 1.5
