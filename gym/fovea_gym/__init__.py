"""Visual tasks for reinforcement learning: rows, environments, graders and tools, without torch or a trainer."""

__version__ = "0.4.0"
