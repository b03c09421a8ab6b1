"""The list of checks, in the order in which they run."""

from __future__ import annotations

from checkmate.selftest import kernels, machine, steps
from checkmate.selftest.check import Check

_OPS = "each op measured by itself, run again and again, and tried over its arguments"
_KNOWN = "all run, and none wavers but those that are known to; what may be written over is tried, not promised"

CHECKS = (
    Check("versions", "versions, driver and settings, and a sum on the device", "the sum is right", machine.versions),
    Check("ops of a transformer", _OPS, _KNOWN, kernels.ops_of_transformer),
    Check("ops of convolutions", _OPS, _KNOWN, kernels.ops_of_bottlenecks),
    Check("ops of other kinds", _OPS, _KNOWN, kernels.ops_of_mixed),
    Check(
        "dropout again",
        "masks drawn, and drawn again from the state that the generator had",
        "the same bits, and the generator as it was",
        kernels.dropout,
    ),
    Check(
        "attention repeats",
        "the gradients of each kernel of attention, several times",
        "they repeat, or waver in kernels that are known to on a GPU",
        kernels.attention,
    ),
    Check(
        "parts",
        "a loss in parts, each tried for the bits of the whole, within the smallest budget",
        "plain PyTorch's bits; parts that have others are not offered",
        steps.parts,
    ),
    Check(
        "predicted bytes",
        "a step within three budgets: bytes predicted, asked for, allocated and reserved",
        "no more is asked for than is predicted",
        steps.predicted_bytes,
    ),
    Check(
        "second memory",
        "copies to pinned memory, on the CPU to a file, and back",
        "the same bits come back",
        machine.copies,
    ),
    Check(
        "capacity",
        "training where PyTorch may take no more than half way between the least and the most",
        "the planned step trains there, and plain PyTorch runs out of memory",
        steps.capacity,
        alone=True,
    ),
    Check(
        "a transformer in budgets",
        "a transformer in the manner of GPT-2 within three budgets",
        "plain PyTorch's bits, or its spread where it does not repeat them, and peaks within the budgets",
        steps.transformer,
        seconds=180.0,
    ),
    Check(
        "convolutions in budgets",
        "bottlenecks in the manner of ResNet-50 within three budgets",
        "plain PyTorch's bits, or its spread where it does not repeat them, and peaks within the budgets",
        steps.bottlenecks,
        seconds=180.0,
    ),
)
