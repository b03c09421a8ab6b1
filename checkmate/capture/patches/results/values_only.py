"""`torch.linalg.svdvals`, `eigvalsh` and their like, traced without vectors where eager PyTorch computes none.

``torch.linalg.svdvals`` and its like compute vectors if the gradient needs them, by another routine of LAPACK, which
rounds otherwise; not so ``eigvals``. While they are traced PyTorch takes it that a gradient may be needed (ATen's
``_may_require_fw_or_bw_grad`` says yes to each subclass of a tensor); here it is asked of the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import traceback

aten = torch.ops.aten
_VALUES = {  # functions that give values only, or are computed from these
    *(torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_rank),
    *(torch.linalg.matrix_norm, torch.linalg.norm, torch.norm, torch.functional.norm, torch.nuclear_norm),
}
Call = Callable[..., Any]


def without_vectors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
    """Compute an op without vectors, by ``call`` of another; None: call it as it is."""
    if op not in _OPS or (args[0].requires_grad and torch.is_grad_enabled()):
        return None
    stack = traceback.get_current_meta().get("source_fn_stack") or [("", None)]
    return _OPS[op](call, *args, **kwargs) if stack[-1][1] in _VALUES else None


def _svd(call: Call, a: Any, full_matrices: bool = False, compute_uv: bool = True, **kwargs: Any) -> Any:
    return call(aten._linalg_svd.default, (a, full_matrices, False), kwargs)


def _eigh(call: Call, a: Any, uplo: str = "L", compute_v: bool = True) -> Any:
    return call(aten._linalg_eigh.default, (a, uplo, False), {})


_OPS: dict[Any, Call] = {
    aten._linalg_svd.default: _svd,
    aten._linalg_eigh.default: _eigh,
}
