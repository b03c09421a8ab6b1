"""The parts of PyTorch that capture a step: Dynamo, AOTAutograd, tensors without data, Inductor.

`METHODS` has what `wrap` puts others around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkmate.torch_internals.names import Name, Table

_EXC, _SOURCE, _FRAMES = "torch._dynamo.exc", "torch._dynamo.source", "torch._dynamo.symbolic_convert"
_VARIABLES, _GRAPH = "torch._dynamo.variables", "torch._dynamo.output_graph"
_BUILTIN, _FUNCTIONS, _MISC = f"{_VARIABLES}.builtin", f"{_VARIABLES}.functions", f"{_VARIABLES}.misc"
_TENSOR, _USER_DEFINED, _HIGHER = (f"{_VARIABLES}.{part}" for part in ("tensor", "user_defined", "higher_order_ops"))
_STACK = f"{_FRAMES}:ExceptionStack"
_RAISED_FORMERLY = (f"{_STACK}.get_current_exception",)
_LEAVES_CHECK, _SETS_FORMERLY = "OutputGraph._check_requires_grad_intermediate_outputs", "BuiltinVariable.call_setattr"
_CALL_FORMERLY = f"{_USER_DEFINED}:UserDefinedObjectVariable.call_method"
_ASKING = "questions on tensors are refused, as Dynamo refuses them"
_DRAWING = "draws of NumPy within a step are refused"
_SAYING = "logging, print, warnings and errors of a step are refused, as Dynamo refuses them"
_CONTEXT = "context variables within a step are refused, as Dynamo refuses them"
_SELECTING = "what a mask selects is refused, where its size must be known"
_LEAVES = "what Dynamo refuses of leaves stays refused"
_TOLD_YES = "libraries that ask whether they are compiled compute other bits"
_DENSE = "flex_attention that is compiled computes other bits"
_RANKS, _FLAGS = "steps on several ranks are refused", "torch.backends.cudnn.flags is refused"
_WHERE_USED = "it is asked where it is used"
_FUNC = "an autograd.Function within torch.func has other gradients"
_CELLS = "a number that an autograd.Function reads is not guarded"
_REENTRANT = "more reentrant checkpoints are refused"
_NONE_REFUSED = "there is nothing to allow"
_DESCRIPTORS = "torch._functorch._aot_autograd.descriptors"
_PASSES = "torch._functorch._aot_autograd.graph_compile:"
_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"
_FIRST_CALL = "the first call of a few ops of complex numbers, such as pinv, has other numbers"
_LAYOUTS = "nobody is told where a gradient from outside is laid out anew"
_EACH_NUMBER = "numbers that change are no inputs: each is captured"
_PARTITIONERS = "torch._functorch.partitioners"
_OPEN = "groups of ops are compiled for each size"
_RULES = "torch._subclasses.fake_impls"
_KERNELS = "attention that is compiled is refused, and groups of ops run one by one"

NAMES = Table(
    # Dynamo, which follows the user's code
    Name("dynamo_config", "torch._dynamo:config", "its settings"),
    Name("OptimizedModule", "torch._dynamo", "a module that was compiled", "compiled parts are not recognized"),
    Name("allow_in_graph", "torch._dynamo", "functions of ours that it does not follow"),
    Name("run", "torch._dynamo", "calls what is captured, capturing nothing"),
    Name("reset_code", "torch._C:_dynamo.eval_frame.reset_code", "forgets what was captured"),
    Name("_debug_get_cache_entry_list", "torch._dynamo.eval_frame", "what is captured, with its guards"),
    Name("mark_static_address", "torch._dynamo.decorators", "a call between the user's code and a question"),
    Name("maybe_mark_dynamic", "torch._dynamo", "makes a size an input", "each size is captured by itself"),
    Name("get_optimize_ddp_mode", "torch._dynamo.utils", "whether DistributedDataParallel cuts graphs", _RANKS),
    Name("auto_dynamic", "torch._dynamo.pgo", "guesses which sizes change, which is turned off"),
    Name("builder", _VARIABLES, "makes inputs of what a step reads; `get_fake_value` describes a node's results"),
    # Its errors
    Name("TorchDynamoException", _EXC, "all of them"),
    Name("BackendCompilerFailed", _EXC, "an error of ours, on its way to the user"),
    Name("TorchRuntimeError", _EXC, "an op that cannot take what it is given"),
    Name("Unsupported", _EXC, "what it cannot follow"),
    Name("UserError", _EXC, "what it takes for a mistake of the user's"),
    Name("ObservedException", _EXC, "an exception of the code that it follows", _ASKING),
    Name("FakeTensorObservedException", _EXC, "one of the description of an op", "it is a TorchRuntimeError", "2.14"),
    Name("raise_observed_exception", _EXC, "raises one", _ASKING),
    Name("unimplemented", _EXC, "refuses", _ASKING),
    # Where a value comes from
    Name("AttrSource", _SOURCE, "an attribute", _CONTEXT),
    Name("CallFunctionNoArgsSource", _SOURCE, "what a call returns", _CONTEXT),
    Name("GlobalSource", _SOURCE, "a global variable", _CELLS),
    Name("RandomValueSource", _SOURCE, "a call before the step", _DRAWING),
    Name("GuardBuilder", "torch._dynamo.guards", "kinds of guards", _CELLS),
    Name("install_guard", "torch._dynamo.guards", "adds a guard to a capture", _CELLS),
    # Frames
    Name("get_raised_exception", f"{_STACK}.get_raised_exception", "what is raised", _SAYING, "", _RAISED_FORMERLY),
    Name("InstructionTranslator", _FRAMES, "the frame of the step; `current_tx` is the one at hand"),
    Name("InstructionTranslatorBase", _FRAMES, "a frame; its `dispatch_table` has what follows an instruction"),
    # Graphs
    Name("get_torch_obj_rule_map", "torch._dynamo.trace_rules", "which functions are followed", _TOLD_YES),
    Name("manual_torch_name_rule_map", "torch._dynamo.trace_rules", "those set by hand", _TOLD_YES),
    Name(
        "external_is_compiling", "torch._dynamo:external_utils.is_compiling", "the question, otherwise named", _TOLD_YES
    ),
    Name("utils_is_compiling", "torch:_utils.is_compiling", "the question, otherwise named", _TOLD_YES),
    Name("proxy_args_kwargs", "torch._dynamo.utils", "arguments of a node, from variables", _ASKING),
    # Kinds of values
    Name("VariableTracker", f"{_VARIABLES}.base", "any value; `build` makes one of a Python object"),
    Name("AttributeMutationNew", f"{_VARIABLES}.base", "an object that the step has made", _SAYING),
    Name("ValueMutationNew", f"{_VARIABLES}.base", "a list that the step has made", _ASKING),
    Name("Method", f"{_VARIABLES}.base", "what follows a method", "methods are attributes", since="2.14"),
    Name("GraphArg", f"{_VARIABLES}.builder", "an input of the graph", _DRAWING),
    Name("wrap_fx_proxy", f"{_VARIABLES}.builder", "a tensor that a node makes", _SELECTING),
    Name("wrap_fx_proxy_cls", f"{_VARIABLES}.builder", "the same, of a class that is given", _DRAWING),
    Name("BuiltinVariable", _BUILTIN, "a function that Python builds in"),
    Name("NullContextVariable", f"{_VARIABLES}.ctx_manager", "a context that does nothing", _FLAGS),
    Name("ExceptionVariable", f"{_VARIABLES}.exception", "an exception", _SAYING, "", (f"{_MISC}:ExceptionVariable",)),
    Name("UserFunctionVariable", _FUNCTIONS, "a function of the user's", _DRAWING),
    Name("ListVariable", f"{_VARIABLES}.lists", "a list", _ASKING),
    Name("TupleVariable", f"{_VARIABLES}.lists", "a tuple", _SELECTING),
    Name("LoggingLoggerVariable", _MISC, "a logger", _SAYING),
    Name("StringFormatVariable", _MISC, "a text that is made of values", _SAYING),
    Name("NumpyNdarrayVariable", _TENSOR, "an array", _DRAWING),
    Name("SymNodeVariable", _TENSOR, "a number that a tensor gave", _ASKING),
    Name("TensorVariable", _TENSOR, "a tensor; `tp_methods` and `method_…` are its methods"),
    Name("UnspecializedPythonVariable", _TENSOR, "a draw of Python's generator", _ASKING),
    Name("TorchInGraphFunctionVariable", f"{_VARIABLES}.torch", "a function of PyTorch's; `_get_handlers` follow some"),
    Name("UserDefinedExceptionObjectVariable", _USER_DEFINED, "an exception of the user's", _SAYING),
    # AOTAutograd, which makes the joint graph of forward and backward
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
    # Tensors without data, and the rules that say what an op makes of them
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
    # Inductor, which compiles kernels: of attention that is compiled, of groups of ops
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


def _method(name: str, module: str, what: str, without: str, since: str = "", formerly: str = "") -> Name:
    """A method that is wrapped, by the name of its class and its own; ``formerly``: its former place, or name there."""
    before = formerly if ":" in formerly else f"{module}:{formerly}"
    return Name(name, f"{module}:{name}", what, without, since, (before,) if formerly else ())


METHODS = Table(
    _method("InstructionTranslatorBase.call_function", _FRAMES, "a call", _TOLD_YES),
    _method("InstructionTranslatorBase._format_value", _FRAMES, "formats a value in an f-string", _SAYING),
    _method("InstructionTranslatorBase.exception_handler", _FRAMES, "looks for who handles an exception", _SAYING),
    _method("_detect_and_normalize_assert_statement", _FRAMES, "makes an op of an assert", _ASKING),
    _method("OutputGraph.compile_subgraph", _GRAPH, "ends a capture", _CONTEXT),
    _method(_LEAVES_CHECK, _GRAPH, "refuses leaves that are made on the way", _NONE_REFUSED, since="2.12"),
    _method("get_fake_value", f"{_VARIABLES}.builder", "describes what a node makes", "some refusals say less"),
    _method("BuiltinVariable.call_function", _BUILTIN, "a call of print, and its like", _SAYING),
    _method("BuiltinVariable._handle_insert_op_in_graph", _BUILTIN, "a call of an operator, x[mask] too", _SELECTING),
    _method("SetAttrBuiltinVariable._call_setattr", _BUILTIN, "sets an attribute", _LEAVES, "", _SETS_FORMERLY),
    _method("SkipFunctionVariable.call_function", _FUNCTIONS, "a call of what is not followed", _SAYING),
    _method("UserFunctionVariable.call_function", _FUNCTIONS, "a call of a function of the user's", _DRAWING),
    _method("WrapperUserFunctionVariable.call_function", _FUNCTIONS, "a call of a function that is wrapped", _DENSE),
    _method("AutogradFunctionApplyVariable.call_function", _HIGHER, "a call of an autograd.Function", _LEAVES),
    _method("CheckpointHigherOrderVariable._call_function", _HIGHER, "a call of a checkpoint", _REENTRANT),
    _method("AutogradFunctionVariable.call_apply", _MISC, "a call of an autograd.Function's apply", _FUNC),
    _method("LoggingLoggerVariable.call_method", _MISC, "a call of a logger", _SAYING),
    _method("NumpyVariable.call_function", _MISC, "a call of a function of NumPy's", _DRAWING),
    _method("TensorVariable.nb_bool_impl", _TENSOR, "bool(x)", _WHERE_USED, "2.12", "TensorVariable.bool_impl"),
    _method(
        "SymNodeVariable.nb_bool_impl", _TENSOR, "and of numbers", _WHERE_USED, "2.12", "SymNodeVariable.bool_impl"
    ),
    _method("SymNodeVariable.evaluate_expr", _TENSOR, "makes a Python number of one from a tensor", _ASKING),
    _method("TensorVariable.call_method", _TENSOR, "a call of a tensor's method", "x.to() makes another tensor of x"),
    _method("UserDefinedClassVariable.call_function", _USER_DEFINED, "a call of a class", _SAYING),
    _method("UserDefinedObjectVariable.call_function", _USER_DEFINED, "a call of an object", _DRAWING),
    _method("ContextVarVariable.call_method", _MISC, "a call of one's method", _CONTEXT, "", _CALL_FORMERLY),
    _method("BaseListVariable.getitem_const", f"{_VARIABLES}.lists", "an element of a list or a tuple", _ASKING),
)
wrap = METHODS.wrap


def wrap_tensor_method(name: str, around: Callable[[Any], Any]) -> None:
    """Wrap Dynamo's handler of a method of tensors; the wrapper is given None if Dynamo has none.

    From 2.14 on Dynamo has a table of them; before that, and where it calls one itself, they are attributes.
    """
    tensor = NAMES.get("TensorVariable")
    handler = around(getattr(tensor, f"method_{name}", None))
    setattr(tensor, f"method_{name}", handler)
    if NAMES.has("Method"):
        tensor.tp_methods[name] = NAMES.get("Method")(handler)
