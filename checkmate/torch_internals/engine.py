"""Autograd's engine, reference counts, and the profiler that counts memory."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_METER = "steps are not measured"
_COUNT = "nothing is written over to save memory"

NAMES = Table(
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
)
__getattr__ = NAMES.get
