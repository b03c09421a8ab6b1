"""PyTorch's memory budget by our solver: the partitioner does what the plan says, and nothing is drawn again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from checkmate.errors import InfeasibleBudget
from checkmate.integrations.inductor import KnapsackSolver, peak_budget
from checkmate.memory import measure_peak
from checkmate.solvers.kept_ops import KeptOps, least_peak
from tests.support.bits import assert_same_bits
from tests.support.oracle import random_problem


class _Step(nn.Module):
    """Layers, and the loss."""

    def __init__(self, layers: int, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = ((nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 64)) for _ in range(layers))
        self.layers = nn.Sequential(*(nn.Sequential(*block, nn.GELU()) for block in blocks))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().sum()
        return loss


def _run(step: Any, module: nn.Module) -> tuple[list[Tensor], int]:
    """Gradients from one random state, and the bytes that the second step allocates at its peak."""
    x = torch.linspace(-1, 1, 256 * 64).view(256, 64)

    def run() -> None:
        module.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        step(x).backward()

    run()
    peak = measure_peak(run).peak
    return [p.grad for p in module.parameters() if p.grad is not None], peak


def _share(share: float, solver: Any) -> AbstractContextManager[None]:
    return torch._functorch.config.patch(
        activation_memory_budget=share,
        activation_memory_budget_solver=solver,
        enable_autograd_cache=False,  # or it would be asked in the first run of the tests only
    )


def _compiled(module: nn.Module, found: list[Any]) -> Any:
    """A step whose two halves run by PyTorch's kernels, and are noted."""

    def partition(*args: Any, **options: Any) -> Any:
        found[:] = min_cut_rematerialization_partition(*args, **options)
        return found

    backend = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=partition)
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.2, 0.4])
def test_what_runs_again_is_what_the_plan_says(share: float) -> None:
    """Nothing else runs again; gradients have the bits of plain PyTorch, with the dropout of the forward."""
    module, found, solver = _Step(4), list[Any](), KnapsackSolver()
    expected, _ = _run(module, module)
    with _share(share, solver):
        gradients, _ = _run(_compiled(module, found), module)
    assert_same_bits(gradients, expected)
    both = {n.name for n in found[0].graph.nodes} & {n.name for n in found[1].graph.nodes if n.op == "call_function"}
    planned, ran = ({name for name in names if name.startswith("addmm")} for names in (solver.runs_again, both))
    assert planned == ran
    assert not any(draws in name for name in both for draws in ("rand", "bernoulli", "dropout"))


@pytest.mark.long
def test_less_of_the_budget_takes_less_memory() -> None:
    """Measured peaks fall with the share, where saving the fewest bytes would make all again at once."""
    module, found = _Step(6, dropout=0.0), list[Any]()
    peaks = [_run(_compiled(module, found), module)[1]]
    for share in (0.4, 0.05):
        with _share(share, KnapsackSolver()):
            peaks.append(_run(_compiled(module, found), module)[1])
    assert peaks[0] > peaks[1] > peaks[2]


def test_bytes_hold_whatever_the_share_is() -> None:
    plans = KeptOps(random_problem(3, most_ops=11))
    least, highest = least_peak(plans).peak, plans.everything.peak
    assert least < highest
    for budget in (least, highest):
        found = [KnapsackSolver(f"{budget} B").choose(plans, share) for share in (1e-9, 0.5, 0.99)]
        assert len({*found}) == 1
        assert found[0].peak <= budget
    with pytest.raises(InfeasibleBudget, match="Smallest budget that works: ") as error:
        KnapsackSolver(f"{least - 1} B").choose(plans, 0.5)
    assert (error.value.budget, error.value.min_budget) == (least - 1, least)


@pytest.mark.slow
def test_a_budget_of_bytes_is_kept_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Budgets hold from the smallest on, which a refusal names, with the gradients of plain PyTorch."""
    module, found = _Step(4), list[Any]()
    expected, _ = _run(module, module)
    with peak_budget("1 GB") as solver:
        step = _compiled(module, found)
        _run(step, module)
    assert solver.runs_again == []
    highest = solver.choice.peak
    with peak_budget("1 GB"):
        _run(step, module)
    assert "PyTorch asked for no plan within 1.00 GB" in caplog.text
    with peak_budget("10 kB"), pytest.raises(Exception, match="Smallest budget that works: ") as error:
        _run(_compiled(module, found), module)
    refusal: Any = error.value.inner_exception
    assert isinstance(refusal, InfeasibleBudget)
    for budget in (refusal.min_budget, (refusal.min_budget + highest) // 2):
        with peak_budget(budget) as solver:
            gradients, _ = _run(_compiled(module, found), module)
        assert_same_bits(gradients, expected)
        assert solver.runs_again
        assert solver.choice.peak <= budget < highest


def test_compiled_code_is_kept_under_the_sources_and_the_budget() -> None:
    ours = [KnapsackSolver(*budget).uuid() for budget in ((), ("1 GB",), ("2 GB",), (10**9,))]
    assert len({*ours[:3]}) == 3
    assert ours[1] == ours[3]


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_inductor_stays_within_what_is_simulated(threads: int, one_thread: None) -> None:
    """Inductor's own kernels, in the order of the graph, have the bits that they have without a budget.

    On one thread its kernels are others, and by its own order they took more.
    """
    torch.set_num_threads(threads)  # the fixture sets them back
    module, solver = _Step(2), KnapsackSolver()
    with torch._inductor.config.patch(reorder_for_peak_memory=False):
        torch._dynamo.reset()
        expected, plain = _run(torch.compile(module, dynamic=False), module)
        torch._dynamo.reset()
        with _share(0.1, solver):
            gradients, peak = _run(torch.compile(module, dynamic=False), module)
    assert_same_bits(gradients, expected)
    resident = sum(p.nbytes for p in module.parameters()) + 256 * 64 * 4
    assert peak <= solver.choice.peak - resident
    assert peak < plain
