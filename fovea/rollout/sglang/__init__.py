"""SGLang as a rollout engine, in processes of its own; an optional extra."""

from importlib.util import find_spec

from fovea.errors import MissingExtraError

if find_spec("sglang") is None:
    raise MissingExtraError(
        "rollout.engine=sglang needs SGLang, which is not installed: pip install 'fovea-rl[sglang]', in an environment "
        "of its own (docs/engines.md)"
    )
