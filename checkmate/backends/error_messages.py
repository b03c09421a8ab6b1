"""Reword errors that PyTorch raises during capture for users: what, where in their code, what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from checkmate.backends.tensor_state import held_modules
from checkmate.capture.number_inputs import CHOSEN, EXPERTS, OUTSIDE
from checkmate.capture.provenance import is_users
from checkmate.errors import CheckmateError, Unsupported
from checkmate.torch_internals import capturing
from checkmate.torch_internals.names import LEFT_OUT
from checkmate.torch_internals.versions import is_tried

log = logging.getLogger("checkmate.backends.error_messages")
_WRONG_TYPE = re.compile(r"^TypeError when making fake tensor call.*?context: TypeError .+?>: (.+?)$", re.DOTALL | re.M)
_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.+)')
_INTERNAL = "If it runs without checkmate, please report this; the log of checkmate has the traceback, at level DEBUG."
WRAP_OUTSIDE = (
    "DistributedDataParallel speaks with the other ranks in its forward, outside of any plan. Compile the module "
    "within, and wrap what comes out: DistributedDataParallel(checkmate.compile(model, budget=...))."
)
_capturing: ContextVar[bool] = ContextVar("checkmate_capturing", default=False)
_NO_DATA = (
    "What is on the meta device has no data: put the model and the batch on one device; "
    'or plan without data, with all on meta: checkmate.trace(..., profile="roofline:h100").'
)
_GRADIENT_WITHIN = (
    "A gradient inside the step would be differentiated again, which a plan can by torch.func only. In place of "
    "y = f(x); (g,) = torch.autograd.grad(y, x, create_graph=True) write g, y = torch.func.grad_and_value(f)(x); "
    "where y is no scalar, y, back = torch.func.vjp(f, x); (g,) = back(torch.ones_like(y))."
)
_ASSERTS = "INTERNAL ASSERT FAILED"
_BY_OPS = (
    "Write it by other ops, as attention by two products and a softmax. "
    "If the step fails without checkmate as well, that is not the reason."
)
_CHECKPOINTING = (
    "The plan decides what runs again: switch the model's own checkpointing off (use_checkpoint=False, "
    "gradient_checkpointing_disable()), or call what is checkpointed directly."
)
_IN_CHECKPOINT, _IN_BACKWARD = "within torch.utils.checkpoint", "within a backward of the step's own"
_OF_DATA = "a tensor has a size that depends on data"
_ADVICE = (  # a pattern of what Dynamo or AOTAutograd says, in any case, and what to do
    (
        r"is an autograd\.Function within torch\.func",
        "Give it all that it reads by apply(), or write it by ops: x + (x.round() - x).detach() has the value of "
        "x.round(), and the gradient of x.",
    ),
    (r"is differentiated by torch\.func\.jvp|derivative for \S+ is not implemented", _BY_OPS),
    (_ASSERTS, f"That happens within torch.func. {_BY_OPS}"),
    (r"modified by an inplace operation", "Plain PyTorch refuses this too: write to a copy, x.clone(), instead."),
    (
        r"elements share memory|more than one element of the written-to tensor",
        "Of an expanded tensor, or of windows that overlap, several elements are one number in memory. Write to a "
        "copy, x.clone(), or to the tensor that it shows.",
    ),
    (
        r"changed the shape of a tensor in place",
        "Tracing may lose track of that: write x = x.unsqueeze(0) in place of x.unsqueeze_(0). If the step fails "
        "without checkmate as well, that is not the reason.",
    ),
    (
        r"It is given a tensor of no elements",
        "Of such tensors tracing may refuse what the kernel takes: leave the op out where there is nothing to compute. "
        "If the step fails without checkmate as well, that is not the reason.",
    ),
    (r"set_runtime_stats_and_log|of class `Reducer`", WRAP_OUTSIDE),  # called first by its forward
    (
        r"`R?lock` context manager",
        "A compiled step holds no lock. If only the first call does, to set something up, call the model once before "
        "compiling: the step then finds it done.",
    ),
    (
        r"hook '.*' has changed the size|ApplyTemplate.* returned an invalid gradient",
        "A tensor hook must return a gradient of the shape that it is given.",
    ),
    (
        r"saved_tensors_hooks|save_on_cpu",
        "The plan decides what is kept for the backward: leave this out. host_budget= has values wait in the memory of "
        "the host.",
    ),
    (r"hook", "Compile the module without backward hooks, or register them on tensors: tensor.register_hook(...)."),
    (
        rf"(autograd\.grad|Tensor\.backward|`backward`|requires_grad_\(\) call)[\s\S]*{_IN_BACKWARD}",
        "In place of odeint_adjoint call odeint; of a reversible block call the halves in plain PyTorch, without the "
        "Function: the plan does the rest. Another backward within a backward of the model's own is checkpointing, as "
        f"a rule. {_CHECKPOINTING}",
    ),
    (rf"torch/utils/checkpoint\.py|context_fn|side.?effect[\s\S]*{_IN_CHECKPOINT}", _CHECKPOINTING),
    (r"torch\.autograd\.grad\b.*trace_autograd_ops", _GRADIENT_WITHIN),
    (r"trace_autograd_ops", "Return the loss, and call backward() or torch.autograd.grad() on it outside."),
    (
        r"FakeQuantize",
        "Dynamo does not look into this module. Call its op on buffers of your own module instead, "
        "torch.fused_moving_avg_obs_fake_quant(x, ...), which keeps the range from step to step too; or "
        "torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high) where the range is fixed.",
    ),
    (
        r"pack_padded_sequence|pad_packed_sequence|pack_sequence|PackedSequence",
        "Sizes in a packed sequence depend on the lengths. Run the recurrent module on the padded batch, and mask what "
        "is beyond a length (torch.where, an ignored index). For a last state, take the output at each length - 1 "
        "(torch.gather). A backward direction reads the padding first: flip each sequence within its length before.",
    ),
    (
        r"_ctc_loss",
        "The size of its workspace depends on the lengths, which a plan must know: pass these as tuples of numbers, "
        "made outside of the step by tuple(lengths.tolist()). Each other pair of tuples gets a plan of its own; where "
        "they change at every step, return the log-probabilities and call F.ctc_loss on them outside.",
    ),
    (
        r"NestedTensor",
        "A plan counts bytes, and a nested tensor has as many as its parts are long. Pass a padded batch and a mask.",
    ),
    (
        r"functorch tracing attempt",
        "Within torch.func.vmap, grad, jvp and their like call the plain module, whose parameters are the same.",
    ),
    (
        r"sparse",
        "A sparse tensor has as many bytes as its data says. Of an adjacency pass the edges as two index tensors, and "
        "sum with out.index_add(0, to, weight[:, None] * x[from_]).",
    ),
    (r"ScriptModule", "Compile the original eager nn.Module, which torch.jit was given."),
    (
        r"calls requires_grad_\(",
        "A step may freeze parameters for a while, and puts back what it changes: set such flags before it. What takes "
        "the model with another adapter, such as the reference of DPO, compute before the step, under torch.no_grad(), "
        "and pass it in.",
    ),
    (
        r"requires_grad_\(\) call",
        "Compute it outside, and pass it in with requires_grad_(). From PyTorch 2.12 on a step may call that on "
        "what it has computed itself.",
    ),
    (r"optimizer\.", "Return the loss, and call backward() and the optimizer outside."),
    (r"retain_grad", "Register a hook instead: tensor.register_hook(...)."),
    (r"(asks for the value of a tensor|Data.dependent)[\s\S]*(expert|adapter|\bmoe\b)", EXPERTS),
    (
        r"depends on random numbers that the step draws",
        "Turn such decisions off, layerdrop=0 for example. Or draw outside of the step, and pass the answers in as "
        "bools: each set of answers gets its plan.",
    ),
    (
        rf"asks for the value of a tensor[\s\S]*asked of a size|{_OF_DATA}",
        "Sizes must be fixed: mask what is left out (torch.where, an ignored index) in place of selecting the rest. "
        f"{CHOSEN} {OUTSIDE}",
    ),
    (
        r"asks for the value of a tensor[\s\S]*\n.*: assert ",
        "What the step computes cannot be checked before it runs: return what is to be checked, and assert outside; "
        "python -O leaves all asserts out.",
    ),
    (
        r"asks for the value of a tensor",
        "Compute without asking: torch.where(condition, a, b). Or ask outside, and pass the answer in as a bool: each "
        "of the two gets its plan. If only the first call asks, to set a codebook up, say, call the model once before "
        "compiling. "
        f"{CHOSEN} {OUTSIDE}",
    ),
    (
        r"generator",
        "A step draws from the global generator: leave generator= out, and seed with manual_seed; or draw outside of "
        "the compiled function and pass the numbers in.",
    ),
    (
        r"rng_state|fork_rng|manual_seed",
        "A step leaves the state of the generators alone: seed before it. Where a module sets it to run a part again, "
        f"that is checkpointing. {_CHECKPOINTING}",
    ),
    (
        r"Parameter\(\)` constructor",
        "A parameter that the step makes is trained by nobody: make the module in __init__. If only the first call "
        "makes it, for this kind of input say, call the model once before compiling, on one such batch: the step then "
        "finds it made.",
    ),
    (r"random\.", "Draw with torch, or draw outside and pass the number in as a tensor."),
    (r"is raised here", "Call the function without checkmate: is it raised there too?"),
    (r"unhandled tensor method|has no attribute|TypeError", "Call the function without checkmate: does it run?"),
    (
        r"as_proxy",
        "An op was given what is no plain tensor. Pass the tensors of a batch, not what gives batches; of a subclass "
        "of Tensor, such as MONAI's MetaTensor, pass x.as_tensor().",
    ),
    (r"bind arguments", "The function was called with other arguments than it takes."),
)
_UNKNOWN_SIZE = re.compile(r"\bsize=\([^)]*\bu\d+\b")
_CHOICE = re.compile(r"expert|adapter|\bmoe\b", re.IGNORECASE)
_NUMBER = (
    "Python needs a number here that a tensor holds, for an index, a size or a comparison, and that is not known "
    "before the step runs."
)
_FIXED = (
    "Index with the tensor (x[i], torch.gather), mask with it (torch.where), or read the number outside of the step "
    "and pass it in: each number gets a plan of its own."
)
_COUNTED = re.compile(r"torch/nn/modules/batchnorm\.py")
_MOMENTUM = (
    "Give it a momentum, such as 0.1. Averages over all batches can be taken behind the training, by a pass without "
    "gradients: torch.optim.swa_utils.update_bn."
)
_IN_CAT = r"Expected (\d+) in dimension \d+ but got (\d+) for tensor number (\d+) in the list$"
# Words of kernels' descriptions, and an op whose eager kernel words the same.
_SHAPES: dict[str, Callable[..., Any]] = {
    r"same reduction dim, but got (\[.*?\]) X (\[.*?\])": torch.mm,
    r"broadcast a dimension.*had torch\.Size\((\[.*?\])\).*broadcastable to (\[.*?\])": torch.add,
}
_ONE_GRAPH = (
    "The whole step is planned at once, so it must be captured as one graph: move this out of the compiled "
    "function, or compile a part that does not need it."
)


def explained(error: Exception, fn: Callable[..., Any]) -> Exception:
    """The error to raise for an error of a compiled call; errors that explain themselves stay."""
    name, place = getattr(fn, "__qualname__", type(fn).__name__), _place(error)
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if ours := next((cause for cause in causes if isinstance(cause, CheckmateError)), None):
        return ours
    # PyTorch had to know a number that a tensor holds while it traced the step.
    if any(isinstance(c, GuardOnDataDependentSymNode) or "data-dependent expression" in str(c) for c in causes):
        log.debug("%s failed in capture", name, exc_info=error)
        if _COUNTED.search(str(error)):
            # Among batch norms without momentum only SyncBatchNorm is refused.
            norms = [
                f"{name} ({type(part).__name__})"
                for module in held_modules(fn, ())
                for name, part in module.named_modules()
                if isinstance(part, nn.SyncBatchNorm) and part.momentum is None
            ]
            message = (
                f"{', '.join(norms) or 'a batch norm'}: momentum=None weighs each batch by 1 / num_batches_tracked, "
                "another number in each step, and each would get a plan of its own."
            )
            return Unsupported(f"Cannot capture {name}: {message}{place}\n{_MOMENTUM}")
        advice = EXPERTS if _CHOICE.search(str(error)) else _FIXED
        return Unsupported(f"Cannot capture {name}: {_NUMBER}{place}\n{advice}")
    # The user's code fails, with checkmate or without: an op, what it raises itself, an argument of a wrong type.
    if not isinstance(error, capturing.TorchDynamoException):
        return error
    log.debug("%s failed in capture", name, exc_info=error)
    if isinstance(error, capturing.TorchRuntimeError):
        if _UNKNOWN_SIZE.search(_explanation(error)):
            return Unsupported(f"Cannot capture {name}: {_OF_DATA}.{place}\n{_advice(_OF_DATA, _ONE_GRAPH)}")
        kind = IndexError if "got IndexError(" in str(error) else RuntimeError  # plain PyTorch fails as well
        return kind(f"{_as_eager(error)}{place}")
    if (users := getattr(error, "users", None)) is not None:
        if error.is_users:
            if hasattr(users, "add_note") and place:  # from Python 3.11 on
                users.add_note(f"raised at{place.rstrip()}")
            return users
        message = f"{type(users).__name__}: {users} is raised here.{place}"
        return Unsupported(f"Cannot capture {name}: {message}\n{_advice(message, _ONE_GRAPH)}")
    if match := _WRONG_TYPE.search(str(error)):
        message = re.sub(r"\bimmutable_(list|dict)\b", r"\1", match.group(1))  # as fx calls them
        return TypeError(f"{message}{place}")
    # Dynamo or AOTAutograd refuses. This version of PyTorch may be the reason.
    hint = "" if is_tried() else f"\ncheckmate has not been tried on PyTorch {torch.__version__}."
    hint += f"\nOn this PyTorch it leaves out: {', '.join(LEFT_OUT)} (checkmate doctor)." if LEFT_OUT else ""
    if isinstance(error, (capturing.Unsupported, capturing.UserError)):
        message, explanation = str(error).strip().splitlines()[0].strip(), _explanation(error)
        message = f"{message}. {explanation.strip()}{place}" if explanation else f"{message}{place}"
        # Within a backward, or a checkpoint, the advice is another one.
        around = f"\n{_IN_CHECKPOINT}" if "Operator: torch.utils.checkpoint" in str(error) else ""
        if re.search(r"(autograd\.Function|\.apply\()[\s\S]* in backward\n", str(error)):
            around = f"\n{_IN_BACKWARD}"
        return Unsupported(f"Cannot capture {name}: {message}\n{_advice(f'{message}{around}', _ONE_GRAPH)}{hint}")
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    message = f"{type(inner).__name__}: {re.split('from user code|While executing %', str(inner))[0].strip()}{place}"
    if _ASSERTS in str(inner):
        message = f"PyTorch fails a check of its own while it traces an op.{place}"
    return Unsupported(f"Cannot compile {name}: {message}\n{_advice(str(inner), _INTERNAL)}{hint}")


def of_op(error: Exception) -> str:
    """The line of the user's code whose op fails while it is traced, and PyTorch's first sentence on it."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    match = re.search(r"got \w+\(['\"](.+?)['\"]\)", str(error)) or re.match(r"\s*(.+)", str(inner))
    sentence = "" if match is None else re.split(r"\. |\.?\\n", match[1])[0]
    return f"{' '.join(_place(error).split())} ({sentence})"


def _as_eager(error: Exception) -> str:
    """The message of plain PyTorch for an op that fails on the shapes or types of its arguments."""
    match = re.search(r"got \w+\((['\"])(?P<said>.+?)\1\)", str(error), re.DOTALL)
    message = match["said"] if match else _explanation(error)
    message = f"{message} {_NO_DATA}" if re.search(r"\bmeta\b", message) else message or str(error)
    for pattern, op in _SHAPES.items():  # reworded by tracing
        if match := re.search(pattern, message):
            a, b = ([int(n) for n in re.findall(r"\d+", shape)] for shape in match.groups())
            scalar = torch.zeros(())
            try:
                op(scalar.expand(b if op is torch.add else a), scalar.expand(a if op is torch.add else b))
            except RuntimeError as eager:
                return str(eager)
    return re.sub(_IN_CAT, r"Expected size \1 but got size \2 for tensor number \3 in the list.", message)


_FAILING = "failed while attempting to run meta", "fake tensor raised"


@contextmanager
def quietly() -> Iterator[None]:
    """Keep fake tensors' logs of a failing op from standard error: the error says it in one sentence."""
    before = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(before)


logging.getLogger("torch._subclasses.fake_tensor").addFilter(
    lambda record: not (_capturing.get() and str(record.msg).startswith(_FAILING))
)


def refuse_lazy(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse modules without parameters yet: capture would initialize them, and then restore the generator."""
    for module in held_modules(fn, args):
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                raise Unsupported(
                    f"{name} of {type(module).__name__} has no shape yet. Call it once before compiling, on a batch."
                )


def _explanation(error: Exception) -> str:
    """Dynamo's explanation; for an op that fails, its call with the shapes of its arguments."""
    match = re.search(r"Explanation: (.+)", str(error))
    return match.group(1) if match and not match.group(1).endswith(":") else ""  # a list of reasons follows


def _place(error: Exception) -> str:
    """The innermost line of the user's own code."""
    frames = [frame for frame in _USER_FRAME.findall(str(error)) if is_users(frame[0])]
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f"\n  {file}:{line} in {function}: {code.strip()}"


def _advice(message: str, otherwise: str) -> str:
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, message, re.IGNORECASE)), otherwise)
