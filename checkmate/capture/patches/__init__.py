"""What PyTorch's tracing is changed in, so that a step of ours is captured as eager PyTorch runs it: `PATCHES`.

``import checkmate`` changes nothing. The first use of `checkmate.compile` and its like imports these modules, which
then change what `PATCHES` says. Nothing here changes what eager PyTorch or another backend of `torch.compile` computes.
"""

from __future__ import annotations

from dataclasses import dataclass

WITHIN = "while a step of ours is captured"  # undone at its end, also by an error
OURS = "from the import on, in what our backends capture"  # asked each time; others run PyTorch's own code
PROCESS = "from the import on, in the process"  # a mistake in a description, mended for whoever traces


@dataclass(frozen=True)
class Patch:
    """One thing that is changed."""

    module: str  # in this room
    when: str
    what: str
    why: str


PATCHES = (
    Patch("branches", OURS, "Dynamo's jumps, bool(), item(), checks", "a question on a tensor is answered"),
    Patch("context_variables", OURS, "Dynamo's calls of ContextVar", "set, read and reset as in plain PyTorch"),
    Patch("ctc_lengths", PROCESS, "the description of CTC's kernels", "of lengths that are numbers all is known"),
    Patch("ctc_lengths", OURS, "Dynamo's call of CTC's loss", "lengths known before the step are asked"),
    Patch("formulas", WITHIN, "autograd's formulas of a few reductions", "eager PyTorch picks one by the data"),
    Patch("guards", PROCESS, "Dynamo's shortcuts past guards", "they miss a parameter that is frozen later"),
    Patch("is_compiling", OURS, "Dynamo's answers to is_compiling()", "told yes, libraries compute other bits"),
    Patch("kernels", WITHIN, "decompositions in Python", "they round otherwise than the kernels"),
    Patch("kernels", OURS, "Dynamo's taking apart of addcdiv and others", "the parts round otherwise than the whole"),
    Patch("kernels", OURS, "Dynamo's call of torch.backends.cudnn.flags", "on the CPU it changes nothing"),
    Patch("leaves", OURS, "Dynamo's refusals of leaves made on the way", "what they lack is not asked for"),
    Patch("logging_calls", OURS, "Dynamo's logging, print, warnings, raise", "they say what plain PyTorch says"),
    Patch("numpy_draws", OURS, "Dynamo's calls of np.random", "NumPy draws before the step; its arrays are inputs"),
    Patch("recurrent", WITHIN, "Dynamo's setting allow_rnn", "nn.LSTM and its like are captured"),
    Patch("recurrent", PROCESS, "the description of oneDNN's LSTM", "it has a workspace, of which nothing was known"),
    Patch("same_tensor", OURS, "Dynamo's x.to() and its like", "where there is nothing to convert, it is x itself"),
    Patch(
        "selections", OURS, "Dynamo's x[mask] and its like", "how much a known mask selects is asked before the step"
    ),
    Patch("setting_up", OURS, "Dynamo's capture of a call", "what a first call sets up is done before the capture"),
    Patch("results.fake_errors", OURS, "Dynamo's description of results", "some fail that kernels make"),
    Patch(
        "results.statistics",
        PROCESS,
        "descriptions of normalizations",
        "their statistics have another type than described",
    ),
    Patch(
        "results.strides",
        WITHIN,
        "AOTAutograd's functional form of writes in place",
        "a write leaves strides as they are",
    ),
    Patch(
        "results.strides",
        PROCESS,
        "descriptions of some twenty kernels",
        "their results have other strides than described",
    ),
    Patch(
        "results.values_only",
        WITHIN,
        "svdvals, eigvals and what uses them",
        "vectors that nobody needs round otherwise",
    ),
)
