"""Lets torchvision's CUDA build import beside a CPU build of torch: its operators get schemas."""

import sys
from importlib.abc import MetaPathFinder


class _OperatorSchemas(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch import library as operators

            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                operators.define(f"torchvision::{operator}", schema)
        return


sys.meta_path.insert(0, _OperatorSchemas())
