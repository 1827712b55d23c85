"""vLLM as a rollout engine, in this process or as a server; an optional extra."""

import os
from importlib.util import find_spec

from fovea.utils.installing import pip_install_elsewhere
from fovea_gym.errors import MissingExtraError

if find_spec("vllm") is None:
    raise MissingExtraError(
        f"rollout.engine=vllm and `fovea serve` need vLLM, which is not installed: {pip_install_elsewhere('vllm')}, "
        "in a separate environment (docs/engines.md)"
    )

DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",  # runs send no usage statistics
    "VLLM_LOGGING_LEVEL": "WARNING",  # at INFO, its start prints about fifty lines into a run's output
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise a CPU build runs its single worker in another process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise a CPU build also pins the trainer's threads
}
for name, value in DEFAULTS.items():
    # set before the import of vLLM, which reads some of them only once
    os.environ.setdefault(name, value)
