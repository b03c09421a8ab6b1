"""A device that PyTorch has not heard of: plans for it as for the others, by what `torch.accelerator` tells of it.

Each test runs in a process of its own, as a process has one accelerator.
"""

from __future__ import annotations

import pytest

from tests.support.processes import run_python

pytestmark = pytest.mark.usefixtures("can_be_built")

BEGIN = """
import torch, checkmate
from torch import nn
from checkmate.devices import is_known
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.simulated_cuda.private_use import install

lib = install()
SIM, BLOCK = torch.device("sim", 0), 512
torch.manual_seed(0)
WIDE = 256
parts = [part for _ in range(4) for part in (nn.Linear(WIDE, WIDE), nn.GELU(), nn.Dropout(0.37))]
net = nn.Sequential(*parts).to(SIM)
x = torch.randn(2048, WIDE).to(SIM)
step = lambda x: net(x).square().mean()
"""


@pytest.mark.long
def test_bits_and_bytes_on_a_device_that_only_torch_accelerator_knows() -> None:
    """At the smallest budget, between, and with room for all; then with values that wait in pinned memory."""
    code = """
problem = checkmate.trace(step, x)
assert problem.profile.source == "measured on sim", problem.profile.source
least, most = checkmate.min_budget(problem).peak, problem.keep_all_peak
assert least < 0.8 * most, (least, most)
for budget in (least, (least + most) // 2, most):
    compiled = checkmate.compile(step, budget=budget, time_limit=5)
    found = checkmate.verify(step, x, budget=budget, time_limit=5)
    assert found.spread == 0 and found.repeats and found.gradients == 8, found
    assert found.measured_peak <= found.predicted_peak <= budget, found
    assert found.predicted_peak - found.allocated_peak in (0, BLOCK), found  # where less than a block is a workspace
    torch.manual_seed(1)
    compiled(x).backward()
    grads, drawn = [p.grad.cpu() for p in net.parameters()], torch.sim.get_rng_state(SIM)
    net.zero_grad(set_to_none=True)
    use = measure_peak(lambda: compiled(x).backward(), SIM)
    assert compiled.plans[0].peak - use.allocated in (0, BLOCK), use
    net.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    step(x).backward()
    assert_same_bits(grads, [p.grad.cpu() for p in net.parameters()])
    assert_same_bits(drawn, torch.sim.get_rng_state(SIM))
    net.zero_grad(set_to_none=True)
late = lib.simulated_late_tasks()
budget = (least + most) // 2
found = checkmate.verify(step, x, budget=budget, host_budget="1 GB", time_limit=5)
assert found.spread == 0 and found.measured_peak <= budget, found
assert lib.simulated_late_tasks() > late
"""
    run_python("-c", BEGIN + code)


@pytest.mark.long
def test_a_device_whose_allocator_keeps_no_counts_is_refused() -> None:
    code = """
def refuse(device=None):
    raise RuntimeError("Allocator for sim is not a DeviceAllocator.")

torch.accelerator.memory_stats = refuse
assert not is_known(SIM)
for says, run in (
    ("The step runs on sim:0; steps are planned for the CPU", lambda: checkmate.trace(step, x)),
    ("not on sim:0", lambda: measure_peak(lambda: None, SIM)),
):
    try:
        run()
    except checkmate.errors.Unsupported as error:
        assert says in str(error), error
    else:
        raise AssertionError(says)
"""
    run_python("-c", BEGIN + code)
