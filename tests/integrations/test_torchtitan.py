"""torchtitan's ways in, on a graph of a transformer's step as its tracer makes it: same bits, within the budget."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks.networks.vit import Block
from checkmate import InfeasibleBudget, Unsupported
from checkmate.integrations import torchtitan
from checkmate.integrations.torchtitan import memory_policy, planned, read_graph, register
from checkmate.memory import measure_peak
from checkmate.solvers.kept_ops import KeptOps, least_peak
from tests.support.bits import assert_same_bits


@cache
def _inputs() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(*[Block(32, 4, 0.1) for _ in range(2)], nn.Linear(32, 8))
    return module, [torch.randn(8, 16, 32), torch.randint(0, 8, (8, 16)), *module.parameters()]


def _traced() -> fx.GraphModule:
    """Loss and gradients in one graph, the ops of the backward marked as torchtitan's tracer has them."""
    module, inputs = _inputs()
    names = [name for name, _ in module.named_parameters()]

    def step(x: Tensor, y: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        out = functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        return (loss, *torch.autograd.grad(loss, parameters))

    traced = make_fx(step, tracing_mode="fake")(*inputs)
    after = False
    for node in traced.graph.nodes:
        node.meta["autograd_backward"] = after
        after |= node.target is torch.ops.aten.nll_loss_forward.default
    return traced


def _made_again(gm: fx.GraphModule) -> fx.GraphModule:
    """What torchtitan's pass makes of tags: copies in front of the first reader in the backward, outputs told apart."""
    copies: dict[fx.Node, fx.Node] = {}
    nodes = list(gm.graph.nodes)
    for reader in (n for n in nodes if n.meta["autograd_backward"] and n.op != "output"):
        needed, stack = set[fx.Node](), [*reader.all_input_nodes]
        while stack:
            n = stack.pop()
            if n.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE and n not in copies and n not in needed:
                needed.add(n)
                stack += [*n.all_input_nodes, *(user for user in n.users if user.target is operator.getitem)]
        with gm.graph.inserting_before(reader):
            for n in (n for n in nodes if n in needed):
                copies[n] = gm.graph.node_copy(n, lambda a: copies.get(a, a))
        reader.args = fx.node.map_arg(reader.args, lambda a: copies.get(a, a))
    for n in reversed([*copies, *copies.values()]):
        if not n.users:
            gm.graph.erase_node(n)
    gm.recompile()
    return gm


def _run(gm: Callable[..., Any]) -> tuple[list[Tensor], int]:
    """What a graph returns from one random state, and the bytes of its peak with all that it is given."""
    inputs = _inputs()[1]

    def run() -> Any:
        torch.manual_seed(1)
        with torch.no_grad():
            return gm(*inputs)

    return [*run()], measure_peak(run).peak + sum(t.nbytes for t in inputs)


def test_what_is_read_is_what_runs() -> None:
    """Of a graph that runs with PyTorch's kernels, the bytes at its peak: to the byte."""
    gm = _traced()
    problem = read_graph(gm).problem
    assert _run(gm)[1] == problem.keep_all_peak
    assert any("draws random numbers" in (op.pinned or "") for op in problem.graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize("share", [-0.05, 0.5])
def test_the_pass_keeps_the_bits_and_the_budget(share: float) -> None:
    """From below the least that tags can do; what is measured is what the new graph says of itself."""
    gm = _traced()
    plans = KeptOps(read_graph(gm, by_tags=True).problem)
    least, most = least_peak(plans).peak, plans.everything.peak
    budget = int(least + share * (most - least))
    found = planned(budget, time_limit=2.0)(gm, tuple(_inputs()[1]))
    (expected, plain_peak), (results, peak) = _run(gm), _run(found)
    assert_same_bits(results, expected)
    assert peak == read_graph(found).problem.keep_all_peak <= budget < plain_peak
    assert len(found.graph.nodes) > len(gm.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_tags_keep_the_bits_and_the_budget(share: float) -> None:
    """With a pass that makes again what is tagged, as torchtitan's does."""
    gm = _traced()
    plans = KeptOps(read_graph(gm, by_tags=True).problem)
    least, most = least_peak(plans).peak, plans.everything.peak
    expected, plain_peak = _run(gm)
    budget = int(least + share * (most - least))
    tagged = memory_policy(budget)(gm, config=None)
    assert tagged is gm
    found = _made_again(gm)
    results, peak = _run(found)
    assert_same_bits(results, expected)
    assert peak <= budget < plain_peak == most


def test_nothing_runs_again_that_must_not() -> None:
    """What draws is saved at the smallest budget, too, and what is of the loss has no backward to run again in."""
    gm = _traced()
    memory_policy(least_peak(KeptOps(read_graph(gm, by_tags=True).problem)).peak)(gm)
    tags = {node.meta["recompute"] for node in gm.graph.nodes if "bernoulli" in str(node.target)}
    assert [str(tag) for tag in tags] == ["CheckpointPolicy.MUST_SAVE"]
    for node in gm.graph.nodes:
        node.meta["custom"] = {"module_fqn": "loss"}
    assert KeptOps(read_graph(gm, by_tags=True).problem).free == ()


@pytest.mark.slow
def test_a_budget_too_small_is_refused_with_the_smallest_that_works() -> None:
    gm = _traced()
    for attempt in (memory_policy("1 kB"), planned("1 kB", time_limit=1.0)):
        with pytest.raises(InfeasibleBudget) as refused:
            attempt(gm)
        assert 1000 < refused.value.min_budget < read_graph(gm).problem.keep_all_peak


def test_a_policy_is_registered_where_torchtitan_is(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[str, Any] = {}

    class Registry:
        @staticmethod
        def register_memory_policy(key: str) -> Callable[[Any], Any]:
            return lambda policy: registry.setdefault(key, policy)

    with pytest.raises(Unsupported, match="pip install"):
        register("1 GB")
    monkeypatch.setattr(torchtitan, "import_module", lambda name: Registry)
    register("1 GB")
    gm = _traced()
    assert registry["checkmate"](gm, config=None) is gm
    assert all(node.meta["recompute"].name == "MUST_SAVE" for node in gm.graph.nodes if "recompute" in node.meta)
