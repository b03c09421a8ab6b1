"""Inductor: the kernel of attention that is compiled, and the solver of its memory budget."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_ATTENTION = "attention that is compiled is refused"
_PASSES, _PEAKS = "torch._inductor.custom_graph_pass", "its memory budget does not go by the peak"
NAMES = Table(
    Name("inductor_config", "torch._inductor:config", "its settings; `fallback_random` holds draws that nobody reads"),
    Name("compile_fx", "torch._inductor.compile_fx", "makes kernels of a graph of Dynamo's", _ATTENTION),
    Name("get_cpp_compiler", "torch._inductor.cpp_builder", "its compiler", _ATTENTION),
    Name("CustomKnapsackSolver", _PASSES, "what chooses what is saved within a memory budget", _PEAKS),
    Name("get_hash_for_files", _PASSES, "what compiled code is kept under", _PEAKS),
)
__getattr__ = NAMES.get
