"""The workflow vlm-rl-eval for `mixtrain workflow create` (docs/workflows.md)."""

from fovea.tools.workflows.mixtrain import VLMRLEval

__all__ = ["VLMRLEval"]
