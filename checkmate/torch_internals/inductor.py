"""Inductor: the kernels of attention that is compiled, and of groups of ops."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_KERNELS = "attention that is compiled is refused, and groups of ops run one by one"
NAMES = Table(
    Name("inductor_config", "torch._inductor:config", "its settings; `fallback_random` holds draws that nobody reads"),
    Name("compile_fx", "torch._inductor.compile_fx", "makes kernels of a graph of Dynamo's", _KERNELS),
    Name("compile_fx_inner", "torch._inductor.compile_fx", "makes a kernel of a group of ops", _KERNELS),
    Name("select_decomp_table", "torch._inductor.decomposition", "the ops that it takes apart", _KERNELS),
    Name("V", "torch._inductor.virtualized", "where it finds the tensors without data", _KERNELS),
    Name("AsyncCompile", "torch._inductor.async_compile", "its processes that compile", _KERNELS),
    Name("get_compile_threads", "torch._inductor.async_compile", "how many these are", _KERNELS),
    Name("cache_dir", "torch._inductor.runtime.cache_dir_utils", "where kernels are on disk", _KERNELS),
    Name("get_compiler_version_info", "torch._inductor.cpp_builder", "its compiler's version", _KERNELS),
    Name("get_cpp_compiler", "torch._inductor.cpp_builder", "its compiler", _KERNELS),
)
__getattr__ = NAMES.get
