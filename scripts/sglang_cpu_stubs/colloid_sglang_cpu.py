"""Lets a torchvision that was built for CUDA be imported beside a torch built for CPU: declares the two operators that
it registers a shape rule for and brings only for CUDA. Imported at the start of the interpreter by a .pth file.
"""

import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; it sees that torchvision is about to be imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__].library = self.library  # it lasts as long as the object


sys.meta_path.insert(0, _BeforeTorchvision())
