"""SGLang as a rollout engine, in separate processes; an optional extra."""

from importlib.util import find_spec

from fovea.utils.installing import pip_install_elsewhere
from fovea_gym.errors import MissingExtraError

if find_spec("sglang") is None:
    raise MissingExtraError(
        f"rollout.engine=sglang needs SGLang, which is not installed: {pip_install_elsewhere('sglang')}, in a separate "
        "environment (docs/engines.md)"
    )
