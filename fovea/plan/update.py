"""Peak memory of the update: states, and the packed row whose forward and backward pass takes most."""

from __future__ import annotations

from collections import Counter

from fovea.config.run import Config
from fovea.models.vision.passes import PASS_PATCHES
from fovea.plan.activations import FLOAT, Numerics, decoder_stages, embedding_stage, head_stage
from fovea.plan.model_sizes import ModelSizes
from fovea.plan.recorded import Recorded
from fovea.plan.states import CRITIC, GATHERED, GRADIENTS, critic_trainable, gathered_bytes, has_own_critic
from fovea.plan.vision import VISION, tower_stages
from fovea.plan.walk import Bytes, Stage, peak_of
from fovea.plan.workload import RowShape, Workload


def update_peak(
    config: Config, sizes: ModelSizes, work: Workload, ranks: int, numerics: Numerics, recorded: Recorded
) -> Bytes:
    """Bytes by part, without those that are held in all phases, at the peak of an update."""
    # all ranks have as many rows; gradients of the first are still there in the second
    gradients_held = work.rows_per_minibatch > 1
    peaks = [_row_peak(config, sizes, row, numerics, recorded, gradients_held) for row in work.distinct_rows]
    if has_own_critic(config):
        # after the policy's backward pass, whose gradients stay
        peaks += [_critic_peak(config, sizes, row, numerics, gradients_held) for row in work.distinct_rows]
    if recorded.vision_graph:
        peaks.append(_graph_peak(config, sizes, work, numerics))
    held: Bytes = max(peaks, key=lambda peak: peak.total()) + recorded.bytes
    held[GATHERED] += gathered_bytes(sizes, ranks, numerics)
    # the optimizer's step needs gradients alone, which are more than the peak's where most of them were yet to come
    last = Counter({GRADIENTS: FLOAT * sizes.trainable})
    if has_own_critic(config):
        last[CRITIC] = FLOAT * critic_trainable(sizes)
    return max(held, last, key=lambda moment: moment.total())


def _critic_peak(config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics, gradients_held: bool) -> Bytes:
    """Peak of a separate critic's passes, which encode images by a tower of their own and make no logits."""
    stages = row_stages(config, sizes, row, numerics)[:-1]
    held = peak_of(stages, gradients_part=CRITIC, gradients_held=gradients_held).held
    return held + Counter({GRADIENTS: FLOAT * sizes.trainable})


def _graph_peak(config: Config, sizes: ModelSizes, work: Workload, numerics: Numerics) -> Bytes:
    """The backward pass through the vision graph, whose activations are recorded, after those of all rows."""
    patches = work.rank_prompts * work.lengths.images * work.lengths.patches
    stages = tower_stages(config, sizes, min(patches, PASS_PATCHES), numerics)
    return Counter({VISION: max(stage.backward for stage in stages), GRADIENTS: FLOAT * sizes.trainable})


def _row_peak(
    config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics, recorded: Recorded, gradients_held: bool
) -> Bytes:
    stages = row_stages(config, sizes, row, numerics, encodes=not recorded.vision_graph)
    return peak_of(stages, gradients_part=GRADIENTS, gradients_held=gradients_held).held


def row_stages(
    config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics, *, encodes: bool = True
) -> list[Stage]:
    """The stages of a packed row in the order of its forward pass; `encodes` its images, if the tower is trained."""
    tower = tower_stages(config, sizes, row.patches, numerics) if encodes else []
    features = Stage(part=VISION, saved=0, forward=row.visual_tokens * sizes.width * numerics.width)
    return [
        embedding_stage(sizes, row, numerics),
        *tower,
        features,
        *decoder_stages(config, sizes, row, numerics),
        head_stage(config, sizes, row, numerics),
    ]
