"""Builder of the warm-up."""

from __future__ import annotations

from fovea.config.run import Config
from fovea.data.order import Order
from fovea.data.prompt_source import PromptSource
from fovea.models.render import Renderer
from fovea.run.warmup import WarmupStage
from fovea_gym.environments.base import Environment
from fovea_gym.environments.mixture import with_shares
from fovea_gym.errors import ConfigError
from fovea_gym.rows.tasks import kinds_of


def make_warmup(
    config: Config, environment: Environment, train: PromptSource, renderer: Renderer
) -> WarmupStage | None:
    """Make the warm-up; None without one."""
    settings = config.warmup
    if settings is None:
        return None
    unknown = set(settings.stop_kind_accuracy) - set(kinds_of(environment.tasks("dev")))
    if unknown:
        raise ConfigError(
            f"warmup.stop_kind_accuracy: no dev row is of kind {', '.join(sorted(unknown))}, so that the warm-up could "
            f"never stop; the kinds are {', '.join(sorted(set(kinds_of(environment.tasks('dev')))))}"
        )
    return WarmupStage(
        settings=settings,
        # a separate data order, so that the rows of RL do not depend on how long the warm-up took
        order=Order(
            kinds_of(train.tasks),
            weights=with_shares(settings.kind_weights, train.tasks),
            seed=config.seed + 1,
            setting="warmup.kind_weights",
        ),
        source=train,
        environment=environment,
        answer_ids=renderer.demonstration,
    )
