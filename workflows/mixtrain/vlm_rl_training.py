"""The workflow vlm-rl-training for `mixtrain workflow create` (docs/workflows.md)."""

from fovea_tools.workflows.mixtrain import VLMRLTraining

__all__ = ["VLMRLTraining"]
