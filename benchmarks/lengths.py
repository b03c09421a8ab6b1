"""Steps whose length changes from call to call: seconds of the processor for each new length, bits, bytes, overhead.

    python -m benchmarks.lengths [NETWORK ...] [--quick]

One row for each length, in the order of the calls: the first is captured by itself, the second with its length as an
input, and into what was captured then all others are put in. Seconds are those of the first forward of a length beside
those of its second one, of this process alone. The overhead is that of the plan that runs at once; ``searched`` that of
one that is looked for as long as ``--seconds`` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import nothing_on_disk
from checkmate.backends.tensor_state import same_bits
from checkmate.memory import measure_peak

WORDS, BATCH = 5000, 4
Loss = Callable[..., Tensor]


def _gpt2(words: int = WORDS, layers: int = 6, width: int = 128) -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": words, "n_positions": 512, "n_embd": width, "n_layer": layers, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss


def _llama(layers: int = 4) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss


def _bert() -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 512}
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4))
    return model, lambda tokens: model(input_ids=tokens, attention_mask=(tokens % 7).clamp(max=1), labels=tokens).loss


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "gpt2": _gpt2,
    "gpt2-words": lambda: _gpt2(words=32_000, layers=2, width=64),  # at a small share its loss runs in parts
    "llama": _llama,
    "llama-32": lambda: _llama(32),
    "bert": _bert,
}


def _trained(step: Loss, model: nn.Module, tokens: Tensor) -> list[Any]:
    """The loss of a step, its gradients and the random state."""
    torch.manual_seed(0)
    loss = step(tokens)
    loss.backward()
    left = [loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
    model.zero_grad()
    return left


def rows(name: str, share: float, lengths: list[int], seconds: float) -> Iterator[Row]:
    """Call a step with one length after another."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, loss = NETWORKS[name]()
    batches = {n: torch.randint(WORDS, (BATCH, n), generator=torch.Generator().manual_seed(n)) for n in lengths}
    problem = checkmate.trace(loss, batches[max(lengths)])
    budget = int(share * problem.keep_all_peak)
    step: Any = checkmate.compile(loss, budget=budget)
    for place, (n, tokens) in enumerate(batches.items()):
        expected = _trained(loss, model, tokens)
        before = {id(plan) for plan in step._caches[0].plans}
        with nothing_on_disk():
            began = time.process_time()
            step(tokens)
            first = time.process_time() - began
        began = time.process_time()
        step(tokens)
        again = time.process_time() - began
        same = all(map(same_bits, _trained(step, model, tokens), expected))
        (plan,) = (plan.plan for plan in step._caches[0].plans if id(plan) not in before)
        row: Row = {"model": name, "place": place, "length": n, "ops": len(plan.problem.graph.ops), "budget": budget}
        row |= {"seconds": first - again, "captures": len(step._caches[0].steps), "bitwise": same}
        row |= {"predicted_peak": plan.peak, "overhead": plan.cost / plan.problem.least_cost - 1}

        def again_from_nothing(tokens: Tensor = tokens) -> None:
            step(tokens).backward()
            model.zero_grad()

        row["splits"] = [*plan.problem.splits]
        row["measured_peak"] = plan.problem.resident + measure_peak(again_from_nothing, torch.device("cpu")).peak
        searched = checkmate.solve(plan.problem, budget, time_limit=seconds)
        yield {**row, "searched": searched.cost / plan.problem.least_cost - 1, "bound": searched.bound / searched.cost}


BENCHMARK = Benchmark(
    __doc__,
    "lengths.jsonl",
    rows,
    {
        "network": "{model}",
        "length": "{length}",
        "ops": "{ops}",
        "captures": "{captures}",
        "seconds": "{seconds:.2f} s",
        "budget": "{budget:_}",
        "predicted": "{predicted_peak:_}",
        "measured": "{measured_peak:_}",
        "recomputed": "{overhead:.1%}",
        "searched": "{searched:.1%}",
        "bits": lambda row: "same" if row["bitwise"] else "DIFFER",
    },
    names=NETWORKS,
    options={
        "share": (0.6, "of the bytes that keeping everything takes at the longest"),
        "lengths": ([256, 200, 180, 131, 77, 240, 220, 160, 101, 64], "in the order of the calls"),
        "seconds": (60.0, "to search for a plan to compare with"),
    },
    quick={"names": ["bert"], "share": 0.9, "lengths": [64, 48, 33], "seconds": 2.0},
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    BENCHMARK.run()
