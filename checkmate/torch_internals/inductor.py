"""Inductor: the kernels of attention that is compiled, and of groups of ops."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_KERNELS = "attention that is compiled is refused, and groups of ops run one by one"
NAMES = Table(
    Name("inductor_config", "torch._inductor:config", "its settings; `fallback_random` holds draws that nobody reads"),
    Name("compile_fx", "torch._inductor.compile_fx", "makes kernels of a graph of Dynamo's", _KERNELS),
    Name("get_cpp_compiler", "torch._inductor.cpp_builder", "its compiler", _KERNELS),
)
__getattr__ = NAMES.get
