"""The published workflows of mixtrain, vlm-rl-training and vlm-rl-eval, by their own names (docs/workflows.md)."""
