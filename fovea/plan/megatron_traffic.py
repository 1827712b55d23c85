"""Bytes that a step moves between GPUs under `train.backend=megatron`.

A layer is summed up over the tensor axis after its attention and after its MLP, in the forward and in the backward pass
(Shoeybi et al., arXiv 1909.08053, section 3); with sequence parallel an all-gather and a reduce-scatter move as much
(Korthikanti et al., arXiv 2205.05198, section 4.2.2). A ring of N GPUs moves (N - 1) / N of a tensor past each for
either of the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from fovea.config.run import Config
from fovea.plan.activations import FLOAT, Numerics
from fovea.plan.megatron import backend_of, slice_of
from fovea.plan.model_sizes import ModelSizes
from fovea.plan.moved import Moved
from fovea.plan.passes import scoring_passes
from fovea.plan.roles import Roles
from fovea.plan.workload import Workload


def moved_by_megatron(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics
) -> Iterator[Moved]:
    """Received by a GPU of this stage."""
    backend, mine, epochs = backend_of(config), slice_of(config, sizes, roles), config.algorithm.ppo_epochs
    tensor, experts, shares = backend.tensor_parallel_size, backend.expert_parallel_size, roles.shares
    stream = sum(row.tokens for rows in work.rows for row in rows) * sizes.width * numerics.width
    layers = sizes.decoder.num_layers // roles.stages
    again = config.train.gradient_checkpointing == "full"
    forward = epochs * (1 + again) + scoring_passes(config)
    if tensor > 1:
        of_layer = 2 * 2 * (tensor - 1) / tensor * stream
        yield Moved(what="sums over split layers", num_bytes=int(layers * (forward + epochs) * of_layer))
    if experts > 1:
        # there and back, each to its experts
        travels = 2 * sizes.decoder.experts_per_token * (experts - 1) / experts * stream / tensor
        yield Moved(what="tokens to experts", num_bytes=int(layers * (forward + epochs) * travels))
    if roles.stages > 1:
        # layers that run again have their inputs
        between = (2 * epochs + scoring_passes(config)) * stream
        yield Moved(what="activations between stages", num_bytes=int(between))
    past, steps = (shares - 1) / shares, epochs * len(work.rows)
    if shares > 1:
        trained = steps * past * mine.trainable
        yield Moved(what="reduce-scatter of gradients", num_bytes=int(trained * FLOAT))
        yield Moved(what="all-gather of weights", num_bytes=int(trained * numerics.width))
    missing = sizes.parameters - mine.total
    yield Moved(what="weights made whole for a push", num_bytes=missing * numerics.width)
