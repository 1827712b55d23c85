"""The images that each worker of a policy is sent."""

from __future__ import annotations

from fovea.config.algorithm import Algorithm
from fovea.models.vlm import VLM
from fovea.train.microbatches import cost_of
from fovea.train.row_assignment import RowAssignment
from fovea.train.schedule import ImagesByRank, Schedule
from tests.policies import train_settings
from tests.tiny_models import image, renderer, tiny, user


def test_workers_of_one_share_get_the_images_that_it_imitates() -> None:
    parts = tiny("qwen3_vl")
    prompts = [renderer(parts).prompt(user(image(seed), "How many?")) for seed in range(2)]
    assignment = RowAssignment(
        train=train_settings(),
        cost=cost_of(VLM(parts.network, parts.processor.banned_ids)),
        num_ranks=2,
        image_token_id=parts.processor.family.image_token_id,
        shards_tower=False,
    )
    schedule = Schedule(algorithm=Algorithm(), plain_update_every_steps=1, step=0)
    images = ImagesByRank(policy=assignment, reference=None, schedule=schedule, limit_tokens=100, shares=(0, 0, 1, 1))
    first, second = [frozenset(each.key for each in prompt.images) for prompt in prompts]
    assert images.to_imitate(prompts) == [first, first, second, second]
