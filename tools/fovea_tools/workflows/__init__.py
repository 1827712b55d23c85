"""mixtrain's published workflows vlm-rl-training and vlm-rl-eval, under their names (docs/workflows.md)."""
