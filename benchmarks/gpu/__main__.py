"""Behaviour of checkmate on a GPU, in minutes: a row for each finding, as soon as it is known, failures too.

    python -m benchmarks.gpu [--only ITEM ...] [--seconds 440] [--jobs 5]
    python -m benchmarks.gpu --device cpu --small --out rows.jsonl
    python -m benchmarks.gpu --table benchmarks/results/gpu.jsonl

Items run several at a time, each in a process of its own; those that need the whole device come last, one by one. What
is timed or measured waits for a lock, so that no two do it at once. With ``--seconds`` no item goes on beyond them.
Rows of a CUDA device go to benchmarks/results/gpu.jsonl, others to where ``--out`` says. Nothing is downloaded; of
packages PyTorch, highspy and platformdirs are enough; what takes Triton is left out where that cannot compile.

Items: bytes predicted, asked for and reserved, bits, kinds of ops by measured and estimated seconds, and step time of
GPT-2, ResNet-50, ViT-B/16, a U-Net, and a Llama with flex_attention and with norms by Triton, within three budgets each
and in two precisions; the same with pinned memory; whole steps; seconds of a first step and of later starts; other ways
to save memory at equal peaks; training where PyTorch may take half of what it needs; the largest batch by trying.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.apart import LOCK, EndedEarly, apart
from benchmarks.common.rows import Row, append, documented, origin, read

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.items import Asked

RESULTS = Path(__file__).parents[1] / "results" / "gpu.jsonl"
KEPT = 150.0  # of the seconds, for items that need the whole device
LEAST = 15.0  # seconds: with less no item begins
SHOWN = 400  # characters of a row in a table


def origin_of(device: torch.device) -> Row:
    """The place and time at which a row was made, with the GPU and what drives it."""
    import torch

    facts: Row = {**origin(), "device": str(device)}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["gpu_bytes"] = torch.cuda.get_device_properties(device).total_memory
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return facts


def rows_of(name: str, asked: Asked, until: float, lock: str) -> Iterator[Row]:
    """The rows of an item until a moment of `time.monotonic`; then how it ended."""
    began = time.monotonic()
    from benchmarks.gpu.items import CACHE, run_item

    row: Row = {"ended": "at its end"}
    if until - began < LEAST:
        row = {"ended": "not begun: no time was left"}
    else:
        with tempfile.TemporaryDirectory() as folder:
            work = partial(run_item, name, asked, {LOCK: lock, CACHE: folder})
            rows = apart(work, patience=until - began)
            try:
                for found in rows:
                    yield {"item": name, **found}
                    if time.monotonic() > until:
                        row = {"ended": "late"}
                        break
            except EndedEarly as error:
                row = {"error": str(error), "traceback": str(error.__cause__ or "")}
            finally:
                rows.close()
    yield {"item": name, **row, "seconds": time.monotonic() - began}


def main() -> None:
    """Run items, append their rows to the file, print them; fails if an item or a row does."""
    parser = documented(__doc__)
    parser.add_argument("--only", nargs="+", metavar="ITEM", help="some of the items, by the begin of their names")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small networks, few pairs")
    parser.add_argument("--seconds", type=float, default=440.0, help="for everything")
    parser.add_argument("--jobs", type=int, default=5, help="items at a time")
    parser.add_argument("--out", type=Path, help="by default gpu.jsonl of benchmarks/results, for a CUDA device")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the rows of a file instead")
    args = parser.parse_args()
    if args.table:
        print("\n".join(map(told, read(args.table))))
        return
    import torch

    from benchmarks.gpu.items import ITEMS, Asked

    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here. --device cpu --small --out FILE runs small versions of the networks.")
    if device.type != "cuda" and args.out is None:
        sys.exit("Say where rows of another device than CUDA go: --out FILE.")
    device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    asked = Asked(device, args.small, pairs=2 if args.small else 10, time_limit=1.0 if args.small else 5.0, seconds=0.0)
    names = [name for name in ITEMS if args.only is None or any(name.startswith(one) for one in args.only)]
    last = [name for name in names if ITEMS[name].alone]
    end, writes, failed = time.monotonic() + args.seconds, threading.Lock(), list[str]()
    about = origin_of(device)

    def run(name: str, until: float) -> None:
        seconds = min(ITEMS[name].seconds * (5 if args.small else 1), until - time.monotonic())
        for row in rows_of(name, replace(asked, seconds=seconds), time.monotonic() + seconds, lock):
            with writes:
                append(args.out or RESULTS, {**about, **row})
                print(told(row), flush=True)
                if "error" in row:
                    failed.append(name)

    with tempfile.TemporaryDirectory() as folder:
        lock = str(Path(folder) / "lock")
        first = end - (min(KEPT, args.seconds / 3) if last else 0.0)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda name: run(name, first), [name for name in names if name not in last]))
        for name in last:
            run(name, end)
    if failed:
        sys.exit(f"Something failed in {', '.join(dict.fromkeys(failed))}; {args.out or RESULTS} has the errors.")


def told(row: Row) -> str:
    """A row in a line: its item, then its figures, but for long lists and where it is from."""
    left_out = {"item", "traceback", "plan", "ops_by_kind", "runs_once", "date", "commit", "python", "cpu", "allocator"}

    def shown(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        return f"{value / 1e9:.3f} GB" if isinstance(value, int) and value > 10**7 else str(value)

    told_of = (f"{key}={shown(value)}" for key, value in row.items() if key not in left_out and value is not None)
    return f"{row['item']}: {'  '.join(told_of)}"[:SHOWN]


if __name__ == "__main__":
    main()
