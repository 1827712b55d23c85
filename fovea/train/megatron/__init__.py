"""Training by Megatron-core, with models from Hugging Face folders by Megatron's bridge (docs/megatron.md)."""

from fovea_gym.errors import ConfigError

try:
    import megatron.bridge  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"train.backend=megatron, but {error.name} is not installed; install it into a separate environment "
        "(docs/megatron.md), or set train.backend.name=torch to train without it"
    ) from error
