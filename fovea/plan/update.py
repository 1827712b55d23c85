"""Peak memory of the update: states, and the packed row whose forward and backward pass takes most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fovea.config.run import Config
from fovea.models.vision.passes import PASS_PATCHES
from fovea.plan.activations import FLOAT, Numerics, decoder_stages, embedding_stage, head_stage
from fovea.plan.model_sizes import ModelSizes
from fovea.plan.recorded import Recorded
from fovea.plan.states import (
    CRITIC,
    GATHERED,
    GRADIENTS,
    critic_trainable,
    gathered_bytes,
    gradient_bytes,
    has_own_critic,
)
from fovea.plan.vision import VISION, tower_stages
from fovea.plan.walk import Bytes, Stage, peak_of
from fovea.plan.workload import RowShape, Workload


def update_peak(
    config: Config, sizes: ModelSizes, work: Workload, ranks: int, numerics: Numerics, recorded: Recorded
) -> Bytes:
    """Bytes by part, without those that are held in all phases, at the peak of an update."""
    # all ranks have as many rows; gradients of the first are still there in the second
    gradients_held = work.rows_per_minibatch > 1
    held = _held_gradients(config, sizes, ranks, numerics)
    rows = work.distinct_rows
    peaks = [_row_peak(config, sizes, row, ranks, numerics, recorded, gradients_held) for row in rows]
    if has_own_critic(config):
        if gradients_held:
            peaks = [Counter({CRITIC: held[CRITIC]}) + peak for peak in peaks]
        # after the policy's backward pass, whose gradients stay
        of_critic = [_critic_peak(config, sizes, row, ranks, numerics, gradients_held) for row in rows]
        peaks += [Counter({GRADIENTS: held[GRADIENTS]}) + peak for peak in of_critic]
    if recorded.vision_graph:
        peaks.append(_graph_peak(config, sizes, work, numerics))
    peak: Bytes = max(peaks, key=lambda peak: peak.total()) + recorded.bytes
    peak[GATHERED] += gathered_bytes(sizes, ranks, numerics)
    # the optimizer's step needs gradients alone, which are more than the peak's where most of them were yet to come
    return max(peak, held, key=lambda moment: moment.total())


def _held_gradients(config: Config, sizes: ModelSizes, ranks: int, numerics: Numerics) -> Bytes:
    """Gradients between two micro-batches, and before the optimizer's step."""
    critic = critic_trainable(sizes) if has_own_critic(config) else 0
    numbers = {GRADIENTS: sizes.trainable, CRITIC: critic}
    return Counter({part: gradient_bytes(config, count, ranks, numerics) for part, count in numbers.items()})


def _critic_peak(
    config: Config, sizes: ModelSizes, row: RowShape, ranks: int, numerics: Numerics, gradients_held: bool
) -> Bytes:
    """Peak of a separate critic's passes, which encode images by a tower of their own and make no logits."""
    stages = _on_ranks(row_stages(config, sizes, row, numerics), config, ranks, numerics)[:-1]
    return peak_of(stages, gradients_part=CRITIC, gradients_held=gradients_held).held


def _graph_peak(config: Config, sizes: ModelSizes, work: Workload, numerics: Numerics) -> Bytes:
    """The backward pass through the vision graph, whose activations are recorded, after those of all rows."""
    patches = work.rank_prompts * work.lengths.images * work.lengths.patches
    stages = tower_stages(config, sizes, min(patches, PASS_PATCHES), numerics)
    return Counter({VISION: max(stage.backward for stage in stages), GRADIENTS: FLOAT * sizes.trainable})


def _row_peak(
    config: Config,
    sizes: ModelSizes,
    row: RowShape,
    ranks: int,
    numerics: Numerics,
    recorded: Recorded,
    gradients_held: bool,
) -> Bytes:
    stages = row_stages(config, sizes, row, numerics, encodes=not recorded.vision_graph)
    stages = _on_ranks(stages, config, ranks, numerics)
    return peak_of(stages, gradients_part=GRADIENTS, gradients_held=gradients_held).held


def _on_ranks(stages: Sequence[Stage], config: Config, ranks: int, numerics: Numerics) -> list[Stage]:
    """The stages of a whole row on so many ranks, where the first and the last are FSDP2's root.

    Gradients are whole and in the type of the weights until they are reduce-scattered: after the backward pass of
    their layer or block, and those of the root after the whole backward pass.
    """
    if ranks == 1:
        return list(stages)
    last = len(stages) - 1
    return [_on_rank(x, config, ranks, numerics, in_root=n in (0, last)) for n, x in enumerate(stages)]


def _on_rank(stage: Stage, config: Config, ranks: int, numerics: Numerics, *, in_root: bool) -> Stage:
    trainable = stage.gradient // FLOAT
    whole = trainable * numerics.width
    return replace(
        stage,
        gradient=gradient_bytes(config, trainable, ranks, numerics),
        backward=stage.backward + (0 if in_root else whole),
        pending=stage.pending * numerics.width // FLOAT + (whole if in_root else 0),
    )


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
