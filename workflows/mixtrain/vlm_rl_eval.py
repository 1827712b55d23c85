"""The workflow vlm-rl-eval for `mixtrain workflow create` (docs/workflows.md)."""

from fovea_tools.workflows.mixtrain import VLMRLEval

__all__ = ["VLMRLEval"]
