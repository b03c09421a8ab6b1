"""The parts of PyTorch that run a step: dispatcher, engine, kernels, nested containers, hooks and ranks."""

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
_METER = "steps are not measured"
_COUNT = "nothing is written over to save memory"
_REFUSED = "steps with these ops are refused"
_WHOLE = "Dynamo takes it apart"
_CHECK = "a check on a tensor is refused, as Dynamo refuses it"
_SCALED = "whole steps with a GradScaler are refused"
_CUDA = "steps with a batch norm are refused on GPUs"
_CLIPPED = "whole steps with clipped gradients are refused"
_PLACE = "torch.utils._pytree"
_OPTIMIZER, _RANKS = "whole steps are refused", "steps on several ranks are refused"
_MODULES, _UNSEEN = "torch.nn.modules.module", "hooks of all modules are seen only if they are there at the first call"
_DDP = "torch.nn.parallel:DistributedDataParallel"

NAMES = Table(
    # The dispatcher: ops and their overloads, dispatch keys, modes of Python, transforms
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
    # Autograd's engine, reference counts, and the profiler that counts memory
    Name("_current_autograd_node", "torch._C", "the node whose backward runs"),
    Name("_current_graph_task_id", "torch._C", "the backward that runs"),
    Name("_will_engine_execute_node", "torch._C", "whether a gradient will be asked for"),
    Name("_engine_run_backward", "torch.autograd.graph", "the call of a backward, found on the stack"),
    Name("AccumulateGrad", "torch:_C._functions.AccumulateGrad", "what adds to a leaf's gradient; its order is set"),
    Name("_storage_Use_Count", "torch._C", "who else holds a tensor's memory", _COUNT),
    Name("_autograd", "torch._C", "the profiler that counts bytes of one thread"),
    Name("_profiler", "torch._C", "its settings", _METER),
    Name("autograd_profiler", "torch.autograd:profiler", "whether the user's profiler runs: `_is_profiler_enabled`"),
    Name("_GLIBCXX_USE_CXX11_ABI", "torch._C", "how PyTorch was compiled", "steps have no arena"),
    # Kernels, called by PyTorch's public functions, without what these do besides
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
    # Nested lists, tuples and dictionaries
    Name("keystr", _PLACE, "the place of a leaf, in words", "steps are not verified"),
    Name("tree_flatten", _PLACE, "the leaves, and the structure", "LSTMs are not captured"),
    Name("tree_flatten_with_path", _PLACE, "the leaves with their places"),
    Name("tree_leaves", _PLACE, "the tensors among arguments and results"),
    Name("tree_map", _PLACE, "the same structure of other leaves"),
    Name("tree_map_only", _PLACE, "the same structure, with the tensors replaced"),
    Name("tree_unflatten", _PLACE, "the structure with other leaves", "LSTMs are not captured"),
    # What stands around a step: hooks of modules and optimizers, processes that train together
    Name("_global_optimizer_pre_hooks", "torch.optim.optimizer", "hooks that see each optimizer's step", _OPTIMIZER),
    Name("_global_optimizer_post_hooks", "torch.optim.optimizer", "hooks that see each optimizer's step", _OPTIMIZER),
    Name("_global_forward_pre_hooks", _MODULES, "hooks of the forward of each module", _UNSEEN),
    Name("_global_forward_hooks", _MODULES, "hooks of the forward of each module", _UNSEEN),
    Name("_global_backward_pre_hooks", _MODULES, "hooks of the backward of each module", _UNSEEN),
    Name("_global_backward_hooks", _MODULES, "hooks of the backward of each module", _UNSEEN),
    Name("_get_default_store", "torch.distributed.distributed_c10d", "where ranks agree on a plan", _RANKS),
    Name("_resolve_process_group", "torch.distributed.distributed_c10d", "the ranks of a collective, by name", _RANKS),
    Name("_get_active_ddp_module", f"{_DDP}._get_active_ddp_module", "whether DistributedDataParallel calls"),
)
__getattr__ = NAMES.get


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Run ops as where nothing is traced: no mode sees them, and what their kernels call runs by kernels, too."""
    with NAMES.get("_disable_current_modes")(), NAMES.get("_DisablePythonDispatcher")():
        yield
