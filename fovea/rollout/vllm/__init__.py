"""vLLM as a rollout engine, in this process, and as a server; an optional extra."""

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
    "VLLM_NO_USAGE_STATS": "1",  # a run tells nobody about itself
    "VLLM_LOGGING_LEVEL": "WARNING",  # its start logs fifty lines into a run's display
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a CPU build would else run its one worker in a process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a CPU build would else pin the trainer's threads too
}
for name, value in DEFAULTS.items():
    # before vLLM is imported, which reads some of them once
    os.environ.setdefault(name, value)
