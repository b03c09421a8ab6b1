"""Train a model whose parameters are sharded over ranks, inside a budget of bytes on each, with plain PyTorch's bits.

    torchrun --nproc-per-node 2 examples/ranks.py [--budget "8 MB"]

It runs on the CPU, and takes a minute. The recipe is that of docs/ecosystem.md, "Sharded parameters in one plan".
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization

import checkmate

WIDTH, BATCH = 256, 1024


class Gathered(nn.Module):
    """Gives a whole parameter of its shards; its gradient becomes the mean over all ranks, in shards."""

    def forward(self, shard: Any) -> Tensor:
        whole: Tensor = shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        return whole


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Leave each rank a shard of each parameter, along its first dimension; what modules share, they still share."""
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for module in [*model.modules()]:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter not in shards:
                shards[parameter] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            module.register_parameter(name, shards[parameter])
            register_parametrization(module, name, Gathered(), unsafe=True)
    return model


class Classifier(nn.Module):
    """Eight layers and the loss, so that it is within the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1)
        return F.cross_entropy(self.head(x), y)


def main() -> None:
    """Compare one step with plain PyTorch, then train a few."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", default="8 MB", help="bytes of one rank, at any moment of a step")
    budget = parser.parse_args().budget
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    model = shard(Classifier(), init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
    found = checkmate.verify(model, *batch, budget=budget, time_limit=5)
    compiled: Any = checkmate.compile(model, budget=budget, time_limit=5)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    (plan,) = compiled.plans
    ops, again = plan.problem.graph.ops, plan.plan.runs
    gathered = [again.count(k) for k, op in enumerate(ops) if op.target.endswith("gather_parameter")]
    if first:
        print(found)
        print(
            f"of {len(gathered)} parameters {sum(count > 1 for count in gathered)} are gathered again in the backward"
        )
        print(f"losses {losses}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
