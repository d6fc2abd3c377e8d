"""Lets `import torchvision` work beside a CPU build of torch, for vLLM and models that see images on a machine without
a GPU.

torchvision's wheels hold operators for CUDA builds, which a CPU torch cannot load; the import fails because two of them
are unknown. Nobody here calls them: they are declared before torchvision is imported. vLLM's own processes need it too,
so it goes into the environment:

    pip install --no-deps torchvision==0.28.0
    site="$(python -c 'import site; print(site.getsitepackages()[0])')"
    cp requirements/torchvision_operators.py "$site"
    echo "import torchvision_operators" > "$site/torchvision_operators.pth"
"""

import importlib.abc
import sys


class _Before(importlib.abc.MetaPathFinder):
    """Finds nothing; it notices that torchvision is about to be imported."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch._verl_torchvision_operators = self.library  # declared as long as this lives
        return None


sys.meta_path.insert(0, _Before())
