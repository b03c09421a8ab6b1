"""Tensors without data, by which a step is traced, and the rules that say what an op makes of them."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_OPEN = "groups of ops are compiled for each size"
_RULES = "torch._subclasses.fake_impls"
NAMES = Table(
    Name("FakeTensor", "torch._subclasses.fake_tensor", "a tensor without data"),
    Name("FakeTensorMode", "torch._subclasses.fake_tensor", "what makes these; its `_dispatch_impl` describes an op"),
    Name("ShapeEnv", "torch.fx.experimental.symbolic_shapes", "what knows symbols of open sizes", _OPEN),
    Name("DimDynamic", "torch.fx.experimental.symbolic_shapes", "says that a size is a symbol", _OPEN),
    Name("ConstantSource", "torch._dynamo.source", "a name of a symbol", _OPEN),
    Name("FunctionalTensor", "torch._subclasses.functional_tensor", "a tensor to which writes are traced as new ones"),
    Name("FunctionalTensorMode", "torch._subclasses.functional_tensor", "what makes these, op by op"),
    Name("MetaTensorDesc", "torch._subclasses.meta_utils", "a description of a tensor on the meta device"),
    Name("MetaTensorDescriber", "torch._subclasses.meta_utils", "what makes it"),
    Name("op_implementations_checks", _RULES, "rules by which ops are described", "CTC's loss is not captured"),
    Name("register_op_impl", _RULES, "sets the rule of one op", "LSTMs are not captured"),
    Name("mkldnn_rnn_layer", "torch._meta_registrations", "PyTorch's rule of an LSTM", "LSTMs are not captured"),
    Name("mkldnn_rnn_layer_backward", "torch._meta_registrations", "and of its backward", "LSTMs are not captured"),
    Name("decompositions", "torch._decomp", "in place of ops: `should_fold`, `dropout`, `native_batch_norm_helper`"),
    Name("meta_table", "torch._decomp", "what is described by a rule, and not by its decomposition"),
    Name("compute_elementwise_output_strides", "torch._prims_common", "strides of pointwise results"),
    Name("make_contiguous_strides_for", "torch._prims_common", "strides of a contiguous tensor"),
    Name("suggest_memory_format", "torch._prims_common", "channels last, or not"),
)
__getattr__ = NAMES.get
