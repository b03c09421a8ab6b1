"""Kernels by private names: called by PyTorch's public functions, without what these do besides."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_REFUSED = "steps with these ops are refused"
_WHOLE = "Dynamo takes it apart"
_CHECK = "a check on a tensor is refused, as Dynamo refuses it"
_SCALED = "whole steps with a GradScaler are refused"
_CUDA = "steps with a batch norm are refused on GPUs"
_CLIPPED = "whole steps with clipped gradients are refused"

NAMES = Table(
    Name("_nn", "torch:_C._nn", "pointwise functions and poolings"),
    Name("_adaptive_avg_pool2d", "torch", "a pooling", _REFUSED),
    Name("_log_softmax", "torch", "logarithms of a softmax", _REFUSED),
    Name("_log_softmax_backward_data", "torch", "and their backward", _REFUSED),
    Name("_softmax", "torch", "a softmax", _REFUSED),
    Name("_softmax_backward_data", "torch", "and its backward", _REFUSED),
    Name("_foreach_copy_", "torch", "writes to several tensors", _REFUSED),
    Name("_foreach_lerp_", "torch", "a step of averages over parameters", _WHOLE),
    Name("_foreach_norm", "torch", "norms of gradients, as clipping takes them", _CLIPPED),
    Name("_group_tensors_by_device_and_dtype", "torch.utils._foreach_utils", "which are clipped together", _CLIPPED),
    Name("_amp_foreach_non_finite_check_and_unscale_", "torch", "gradients without their scale", _SCALED),
    Name("_assert", "torch", "a check that an assert becomes", _CHECK),
    Name("_check", "torch", "a check", _CHECK),
    Name("_check_with", "torch", "a check with an error of its own", _CHECK),
    Name("_check_tensor_all", "torch", "a check of all elements", _CHECK),
    Name("_check_tensor_all_with", "torch", "a check of all elements, with an error of its own", _CHECK),
    Name("_select_batch_norm_backend", "torch._C", "whether cuDNN takes a batch norm", _CUDA),
    Name("_BatchNormBackend", "torch._C", "which one that is", _CUDA),
    Name("_get_cudnn_batch_norm_reserve_space_size", "torch._C", "what it keeps for its backward", _CUDA),
    Name("_snapshot", "torch.cuda.memory", "what the allocator holds", "a budget on GPUs is one of bytes asked for"),
    Name("get_enum", "torch.nn._reduction", "the number of a loss's reduction", "CTC's loss is not captured"),
)
__getattr__ = NAMES.get
