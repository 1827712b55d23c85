"""Lets torchvision be imported beside a CPU build of torch; for the environments of the tests of engines alone.

The registry's wheel of torchvision is built for CUDA. Beside a CPU build of torch its operators do not load, and its
import fails, because it registers shapes for two of them: "operator torchvision::nms does not exist". Declared here,
they are found; image transforms are Python and need neither. A .pth file imports this module in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareOperators(MetaPathFinder):
    """Declares the operators right before torchvision is imported, and finds no module itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch  # here: every process imports this module, and few need torch

            if torch.version.cuda is None:
                # kept by FINDER: a library that is freed takes its operators along
                self.library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in OPERATORS:
                    self.library.define(operator)
        return None


FINDER = DeclareOperators()
sys.meta_path.insert(0, FINDER)
