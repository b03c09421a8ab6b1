"""The types of results on the CPU in mixed precision, where PyTorch describes others.

Of an input in half precision and parameters in float32, as under autocast, the kernels make means and deviations in
float32 (ATen's ``mixed_data_type.h``: the first parameter that is given decides). PyTorch's descriptions have them in
the input's type, and the gradient of a group norm's input, or a soft margin loss, in a type of all operands, where the
kernel has the input's. A plan would count other bytes, and a backward could not be measured with what is described.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Types = list[torch.dtype | None]  # of each result on the CPU; None: as described


def _statistics(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype:
    """The type of means and deviations: the input's, or float32 if it is mixed with parameters of another type."""
    given = next((p for p in parameters if p is not None), x)
    return x.dtype if given.dtype == x.dtype else torch.float32


def _normalization(given: Mapping[str, Any]) -> Types:
    running = [given[name] for name in ("running_mean", "running_var") if name in given]
    made = _statistics(given["input"], given["weight"], given["bias"], *running)
    return [None, made, made, *(t.dtype for t in running)]


TYPES: dict[Any, Callable[[Mapping[str, Any]], Types]] = {
    aten.native_layer_norm.default: _normalization,
    aten.native_group_norm.default: _normalization,
    aten.native_group_norm_backward.default: lambda given: [given["input"].dtype, None, None],
    aten._native_batch_norm_legit_functional.default: _normalization,
    aten._native_batch_norm_legit.no_stats: _normalization,
    aten.soft_margin_loss.default: lambda given: [given["self"].dtype],
    aten.soft_margin_loss_backward.default: lambda given: [given["self"].dtype],
}
