"""AOTAutograd: the joint graph of forward and backward, what its inputs and outputs are, and how it is made."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_DESCRIPTORS = "torch._functorch._aot_autograd.descriptors"
_PASSES = "torch._functorch._aot_autograd.graph_compile:"
_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"
_FIRST_CALL = "the first call of a few ops of complex numbers, such as pinv, has other numbers"
_LAYOUTS = "nobody is told where a gradient from outside is laid out anew"
_EACH_NUMBER = "numbers that change are no inputs: each is captured"
_PARTITIONERS = "torch._functorch.partitioners"

NAMES = Table(
    Name("aot_autograd", "torch._dynamo.backends.common", "traces the joint graph, and calls us to cut it in two"),
    Name("runtime_wrappers", f"{_RUNTIME}:", "gradients that come to results, laid out anew", _LAYOUTS),
    Name("_FirstInvocationContext", _RUNTIME, "looks at custom ops in the first call", _FIRST_CALL),
    Name("TracingContext", "torch._guards", "what is known of the capture at hand"),
    Name("tracing", "torch._guards", "sets it, or none", "attention that is compiled is refused"),
    Name("functorch_config", "torch._functorch:config", "where autocast stands while a backward is traced"),
    Name("graph_compile", _PASSES, "its `tensorify_python_scalars` would make tensors of floats", _EACH_NUMBER),
    Name("is_with_effects", "torch._functorch._aot_autograd.utils", "ops in an order that is kept by tokens"),
    Name("_extract_fwd_bwd_outputs", _PARTITIONERS, "results and gradients, among the outputs"),
    Name("_has_tag_is_backward", _PARTITIONERS, "ops that were traced for the backward"),
    Name("_must_be_in_backward", _PARTITIONERS, "ops that may run nowhere else"),
    Name("_is_backward_state", _PARTITIONERS, "what hooks hand to the backward"),
    Name("_is_bwd_seed_offset", _PARTITIONERS, "random states of the backward on CUDA"),
    Name("_is_fwd_seed_offset", _PARTITIONERS, "those of the forward"),
    Name("_is_primal", _PARTITIONERS, "parameters, buffers and inputs"),
    Name("_is_tangent", _PARTITIONERS, "gradients of results"),
    Name("is_sym_node", _PARTITIONERS, "numbers"),
    Name("BackwardTokenAOTInput", _DESCRIPTORS, "a token of effects in the backward"),
    Name("ForwardTokenAOTInput", _DESCRIPTORS, "a token of effects"),
    Name("ForwardTokenAOTOutput", _DESCRIPTORS, "a token of effects, handed out"),
    Name("BufferAOTInput", _DESCRIPTORS, "a buffer"),
    Name("ParamAOTInput", _DESCRIPTORS, "a parameter"),
    Name("PlainAOTInput", _DESCRIPTORS, "an input"),
    Name("TangentAOTInput", _DESCRIPTORS, "a gradient of a result"),
    Name("InputMutationAOTOutput", _DESCRIPTORS, "what is written to an input at the end"),
    Name("SavedForBackwardsAOTOutput", _DESCRIPTORS, "a saved tensor"),
    Name("SavedForBackwardsNoVcCheckAOTOutput", _DESCRIPTORS, "one that may be written to in between"),
    Name("SubclassGetAttrAOTInput", _DESCRIPTORS, "a tensor within another"),
    Name("SubclassGetAttrAOTOutput", _DESCRIPTORS, "a tensor within another, handed out"),
)
__getattr__ = NAMES.get
