"""What a rank of `tests.warm.run_ranks` runs: the function of a file with its rank."""

from __future__ import annotations

import sys

import torch

if __name__ == "__main__":
    file, rank = sys.argv[1:]
    target, arguments = torch.load(file, weights_only=False)
    target(int(rank), *arguments)
