"""Inductor, which makes kernels of our modules on demand."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_NONE = 'backend="inductor" is refused'
_ATTENTION = "attention that is compiled is refused"
_PASSES, _PEAKS = "torch._inductor.custom_graph_pass", "its memory budget does not go by the peak"
NAMES = Table(
    Name("inductor_config", "torch._inductor:config", "its settings; `fallback_random` holds draws that nobody reads"),
    Name("compile_fx", "torch._inductor.compile_fx", "makes kernels of a graph of Dynamo's", _ATTENTION),
    Name("compile_fx_inner", "torch._inductor.compile_fx", "makes kernels of a module", _NONE),
    Name("InductorChoices", "torch._inductor.choices", "what it fuses", _NONE),
    Name("V", "torch._inductor.virtualized", "sets who chooses that", _NONE),
    Name("get_cpp_compiler", "torch._inductor.cpp_builder", "its compiler", _NONE),
    Name("CustomKnapsackSolver", _PASSES, "what chooses what is saved within a memory budget", _PEAKS),
    Name("get_hash_for_files", _PASSES, "what compiled code is kept under", _PEAKS),
    Name("select_decomp_table", "torch._inductor.decomposition", "ops that it has taken apart before", _NONE),
)
__getattr__ = NAMES.get
