"""PyTorch's dispatcher: ops and their overloads, dispatch keys, modes of Python, transforms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from checkmate.torch_internals.names import Name, Table

_FORMULAS = "max, min, median and prod are not captured"
_TWICE = "weights that are used twice under autocast are not captured"
_CONJUGATES = "a few kernels of complex numbers are verified against other numbers than they compute"
_FLEX = "torch._higher_order_ops.flex_attention"
_TRITON = "torch._higher_order_ops.triton_kernel_wrap"
_KERNELS = "steps that launch kernels of Triton's are refused"

NAMES = Table(
    Name("OpOverload", "torch._ops", "what a node of a graph calls"),
    Name("HigherOrderOperator", "torch._ops", "an op that calls functions, such as a checkpoint"),
    Name("sdpa_dense", _FLEX, "its ops where it is not compiled", "it counts as the kernel in estimates"),
    Name("sdpa_dense_backward", _FLEX, "and those of its backward", "it counts as the kernel in estimates"),
    Name("kernel_side_table", _TRITON, "kernels of Triton's, by number", _KERNELS),
    Name("triton_kernel_wrapper_functional", _TRITON, "launches one, on copies of what it writes to", _KERNELS),
    Name("triton_utils", "torch.utils._triton:", "whether there is Triton for a device", _KERNELS),
    Name("_SetExcludeDispatchKeyGuard", "torch._C", "conjugates within kernels under a mode", _CONJUGATES),
    Name("DispatchKey", "torch._C", "the kernels of an op that tracing is to find"),
    Name("DispatchKeySet", "torch._C", "several of them", _FORMULAS),
    Name("_AutoDispatchBelowAutograd", "torch._C", "calls an op without recording it", "LSTMs are not captured"),
    Name("_DisablePythonDispatcher", "torch._C", "calls an op's own kernel while a step is traced"),
    Name("_ForceDispatchKeyGuard", "torch._C", "differentiates while a step is traced", _FORMULAS),
    Name("_dispatch_tls_local_exclude_set", "torch._C", "the keys that are off", _FORMULAS),
    Name("_dispatch_tls_local_include_set", "torch._C", "the keys that are on", _FORMULAS),
    Name("_TorchDispatchModeKey", "torch._C", "the mode that records a graph", "writes to views are not captured"),
    Name("_get_dispatch_mode", "torch._C", "the mode that is on", "writes to views are not captured"),
    Name("_len_torch_dispatch_stack", "torch._C", "whether modes of the user's may see an op"),
    Name("_len_torch_function_stack", "torch._C", "whether modes of the user's may see a call"),
    Name("_get_current_dispatch_mode_stack", "torch.utils._python_dispatch", "which these are"),
    Name("_get_current_function_mode_stack", "torch.overrides", "which these are"),
    Name("DeviceContext", "torch.utils._device", "one of these, which does no harm"),
    Name("_disable_current_modes", "torch.utils._python_dispatch", "runs ops on tensors while a step is traced"),
    Name("TorchDispatchMode", "torch.utils._python_dispatch", "sees each op that runs"),
    Name("is_traceable_wrapper_subclass", "torch.utils._python_dispatch", "tensors that hold tensors"),
    Name("_make_wrapper_subclass", "torch:Tensor._make_wrapper_subclass", "a tensor that stands for its copy", _TWICE),
    Name("_from_functional_tensor", "torch", "the tensor within one that is traced"),
    Name("_is_functional_tensor", "torch", "whether there is one"),
    Name("functorch", "torch:_C._functorch", "what vmap, grad and their like have made of a tensor"),
    Name("TransformType", "torch._C._functorch", "a kind of these"),
    Name("retrieve_all_functorch_interpreters", "torch._functorch.pyfunctorch", "which of these are at work"),
    Name("_enter_dual_level", "torch._C", "enters a level of forward mode"),
    Name("_exit_dual_level", "torch._C", "leaves it"),
    Name("_str", "torch._tensor_str", "shows a tensor, and holds a guard of the dispatcher"),
    Name("saved_tensors_hooks", "torch:_C._autograd", "whether hooks of saved tensors are allowed"),
    Name("_is_any_autocast_enabled", "torch._C", "whether autocast is on"),
    Name("_enter_autocast", "torch.amp.autocast_mode", "the call that begins autocast in a captured graph"),
    Name("_exit_autocast", "torch.amp.autocast_mode", "the call that ends it"),
)
__getattr__ = NAMES.get


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Run ops as where nothing is traced: no mode sees them, and what their kernels call runs by kernels, too."""
    with NAMES.get("_disable_current_modes")(), NAMES.get("_DisablePythonDispatcher")():
        yield
