"""What a rank of `tests.warm.run_ranks` runs: the function of a file with its rank."""

from __future__ import annotations

import os
import sys

import torch

from tests.warm import PROCESS_NUMBER

if __name__ == "__main__":
    target, arguments = torch.load(sys.argv[1], weights_only=False)
    target(int(os.environ[PROCESS_NUMBER]), *arguments)
