"""Changes to PyTorch's tracing, listed in `PATCHES`, with which steps are captured as eager PyTorch runs them.

``import checkmate`` changes nothing. The first use of `checkmate.compile` and its like imports these modules, which
then change what `PATCHES` says. Nothing here changes what eager PyTorch or another backend of `torch.compile` computes.
"""

from __future__ import annotations

from typing import NamedTuple

WITHIN = "while a step of ours is captured"  # undone at its end, also by an error
OURS = "from the import on, in what our backends capture"  # by `only_our_captures`; others run PyTorch's own code
PROCESS = "from the import on, in the process"  # a mistake in a description, mended for whoever traces


class Patch(NamedTuple):
    """A change to PyTorch's tracing."""

    module: str  # in this room
    when: str
    what: str
    why: str


PATCHES = (
    Patch("data_dependence", OURS, "jumps, bool(), item(), checks", "a condition on data is evaluated"),
    Patch("python_calls", OURS, "calls of ContextVar", "set, read and reset as in plain PyTorch"),
    Patch("ctc_lengths", PROCESS, "the description of CTC's kernels", "of lengths that are numbers all is known"),
    Patch("ctc_lengths", OURS, "calls of CTC's loss", "lengths known before the step are asked"),
    Patch("is_compiling", OURS, "answers to is_compiling()", "told yes, libraries compute other bits"),
    Patch("kernels", WITHIN, "decompositions in Python", "they round otherwise than the kernels"),
    Patch("kernels", WITHIN, "upsampling by a list of sizes", "in C++ it asks sizes that are symbols"),
    Patch("kernels", WITHIN, "autograd's formulas of a few reductions", "eager PyTorch picks one by the data"),
    Patch("kernels", WITHIN, "svdvals, eigvalsh and what uses them", "idle vectors round otherwise"),
    Patch("kernels", WITHIN, "AOTAutograd's look at a first call", "under a mode kernels conjugate wrongly"),
    Patch("leaves", OURS, "refusals of leaves made on the way", "what they lack is not asked for"),
    Patch("python_calls", OURS, "logging, print, warnings", "they are left out, and that is logged"),
    Patch("python_calls", OURS, "raise", "an error of the user's leaves the step as in plain PyTorch"),
    Patch("python_calls", OURS, "calls of np.random", "NumPy draws before the step; its arrays are inputs"),
    Patch("recurrent", WITHIN, "Dynamo's setting allow_rnn", "nn.LSTM and its like are captured"),
    Patch("recurrent", PROCESS, "the description of oneDNN's LSTM", "it has a workspace, of which nothing was known"),
    Patch("data_dependence", OURS, "x[mask] and its like", "what a mask selects is counted before the step"),
    Patch("small_changes", OURS, "addcdiv and others, taken apart", "the parts round otherwise than the whole"),
    Patch("small_changes", OURS, "torch.backends.cudnn.flags", "on the CPU it changes nothing"),
    Patch("small_changes", OURS, "x.to() and its like", "where there is nothing to convert, it is x itself"),
    Patch("small_changes", OURS, "calls of compiled functions", "their flex_attention is one kernel"),
    Patch("small_changes", OURS, "the description of results", "some fail that kernels make"),
    Patch("small_changes", PROCESS, "shortcuts past guards", "they miss a parameter that is frozen later"),
    Patch("small_changes", OURS, "set_checkpoint_early_stop", "it changes no number"),
    Patch("small_changes", PROCESS, "layouts of gradients from outside", "where ours change, that is logged"),
    Patch("transforms", OURS, "calls of autograd.Function in torch.func", "their own backward is kept"),
    Patch("traced_ops", PROCESS, "tracers, as they make nodes", "the status line counts the ops of a long capture"),
    Patch("transforms", OURS, "calls of autograd.Function", "numbers that they read are guarded"),
    Patch("transforms", PROCESS, "views of zeros without memory", "of fake ones they were no fake tensors"),
    Patch("results.averages_by_count", OURS, "batch norms with momentum=None", "each step counts with another number"),
    Patch("results.image_sizes", PROCESS, "pooling of signals, two others", "in C++ they ask sizes that are symbols"),
    Patch("results.strides", WITHIN, "AOTAutograd's form of writes in place", "a write leaves strides as they are"),
    Patch("results.strides", PROCESS, "descriptions of some twenty kernels", "the strides of their results"),
    Patch("results.strides", PROCESS, "descriptions of normalizations", "the types of their statistics"),
)
