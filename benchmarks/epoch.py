"""An epoch of real lengths: steps a second of a small GPT-2, first step and all captures included, bytes, and bits.

    python -m benchmarks.epoch [--quick]

Lengths of documents are drawn from a log-normal distribution, and the longest batch comes first. Plain PyTorch and
checkmate train the same batches, each padded to its own longest document, to the next multiple of 32, and to the
longest of all, in a process of its own, with nothing on disk. Seconds are those of the clock over the epoch, updates
included. The budget is a share of the bytes that keeping everything takes at the longest. The peak is what the
allocator counts in a step of the longest batch after the epoch, the process's peak what its resident set grew by. Bits
are those of losses and parameters beside the plain run with the same padding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import checkmate
from benchmarks.common.apart import apart
from benchmarks.common.resident import status
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import nothing_on_disk
from checkmate.memory import measure_peak

WORDS, BATCH = 2000, 4
MULTIPLE = 32  # of tokens
SHORTEST, MEDIAN, SPREAD = 16, 180.0, 0.5  # of lengths; the spread is that of their logarithms


def batches_of(count: int, longest: int, *, multiple: int) -> list[Tensor]:
    """Batches of documents, the one with the longest first, padded with -1 to a multiple of so many tokens."""
    draw = torch.Generator().manual_seed(0)
    lengths = (MEDIAN * longest / 512 * (SPREAD * torch.randn(count, BATCH, generator=draw)).exp()).round().long()
    lengths = lengths.clamp(SHORTEST, longest)
    lengths[0, 0] = longest
    made = []
    for row in lengths.tolist():
        documents = [torch.randint(WORDS, (n,), generator=draw) for n in row]
        batch = pad_sequence(documents, batch_first=True, padding_value=-1)
        more = min(-batch.shape[1] % multiple, longest - batch.shape[1])
        made.append(nn.functional.pad(batch, (0, more), value=-1).contiguous())
    return made


def model_of(layers: int, longest: int) -> tuple[nn.Module, Any]:
    """A GPT-2 with its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": WORDS, "n_positions": longest, "n_embd": 128, "n_layer": layers, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))

    def loss(batch: Tensor) -> Tensor:
        labels = batch.masked_fill(batch < 0, -100)
        of_batch: Tensor = model(input_ids=batch.clamp(min=0), attention_mask=(batch >= 0).long(), labels=labels).loss
        return of_batch

    return model, loss


def kept(layers: int, longest: int) -> list[int]:
    """The bytes that a step of the longest batch takes where everything is kept."""
    _, loss = model_of(layers, longest)
    return [checkmate.trace(loss, batches_of(1, longest, multiple=longest)[0]).keep_all_peak]


def epoch(layers: int, longest: int, count: int, budget: int, *, multiple: int) -> Iterator[Row]:
    """Train an epoch; ``budget``: 0 for plain PyTorch."""
    model, loss = model_of(layers, longest)
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.01), batches_of(count, longest, multiple=multiple)
    step: Any = checkmate.compile(loss, budget=budget) if budget else loss
    digest, held, began = sha256(), status("VmRSS"), time.perf_counter()
    for batch in batches:
        result = step(batch)
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest.update(result.detach().numpy().tobytes())
    seconds, most = time.perf_counter() - began, status("VmHWM") - held
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    counted = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), batches[0]))
    counted += measure_peak(lambda: step(batches[0]).backward()).peak
    row: Row = {"way": "checkmate" if budget else "plain", "multiple": multiple, "budget": budget}
    row |= {"steps": count, "seconds": seconds, "peak": counted, "process": most, "digest": digest.hexdigest()}
    row["lengths"] = len({batch.shape[1] for batch in batches})
    if budget:
        plans = step.plans
        row |= {"captures": len(step._caches[0].steps), "plans": len(plans), "predicted": max(p.peak for p in plans)}
    yield row


def rows(layers: int, longest: int, batches: int, share: float) -> Iterator[Row]:
    """Train the same epoch in each way."""
    with nothing_on_disk():
        (most,) = apart(partial(kept, layers, longest))
    digests: dict[int, str] = {}
    for budget in (0, int(share * most)):
        for multiple in (1, MULTIPLE, longest):
            with nothing_on_disk():
                (row,) = apart(partial(epoch, layers, longest, batches, budget, multiple=multiple))
            digest = row.pop("digest")
            yield {**row, "keep_all": most, "bitwise": digests.setdefault(multiple, digest) == digest}


BENCHMARK = Benchmark(
    __doc__,
    "epoch.jsonl",
    rows,
    {
        "way": "{way}",
        "padded to": lambda row: {1: "its longest", MULTIPLE: f"multiples of {MULTIPLE}"}.get(
            row["multiple"], "the longest"
        ),
        "steps": "{steps}",
        "lengths": "{lengths}",
        "a second": lambda row: f"{row['steps'] / row['seconds']:.2f}",
        "seconds": "{seconds:.1f} s",
        "budget": lambda row: f"{row['budget']:_}" if row["budget"] else "",
        "predicted": lambda row: f"{row['predicted']:_}" if row["budget"] else "",
        "peak": "{peak:_}",
        "process": "{process:_}",
        "captures": lambda row: str(row.get("captures", "")),
        "plans": lambda row: str(row.get("plans", "")),
        "bits": lambda row: "same" if row["bitwise"] else "DIFFER",
    },
    options={
        "layers": (4, "of the network"),
        "longest": (512, "the most tokens of a document"),
        "batches": (64, "of the epoch"),
        "share": (0.5, "of the bytes that keeping everything takes at the longest"),
    },
    quick={"layers": 2, "longest": 96, "batches": 12},
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    BENCHMARK.run()
