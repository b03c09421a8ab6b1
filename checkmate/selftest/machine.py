"""Checks of the machine: versions and settings, and copies to a second memory."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch

from checkmate.capture.ways.rounding_probes import same_bytes
from checkmate.host.opening import measure, open_store
from checkmate.host.store import rounded
from checkmate.selftest.check import Finding, Setting
from checkmate.torch_internals.versions import TRIED, is_tried
from checkmate.version import __version__

BLOCKS = (1 << 20, 16 << 20)  # bytes that are copied


def versions(setting: Setting) -> Finding:
    """What runs here, and whether the device adds."""
    device = setting.device
    facts: dict[str, Any] = {"checkmate": __version__, "python": platform.python_version(), "torch": torch.__version__}
    facts |= {"tried": f"{TRIED[0]} to {TRIED[-1]}", "system": f"{platform.system()} {platform.machine()}"}
    shown = [f"PyTorch {torch.__version__}" + ("" if is_tried() else ", which has not been tried: steps are compared")]
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
        facts |= {"device": about.name, "capability": f"{about.major}.{about.minor}", "bytes": about.total_memory}
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        facts |= {"allocator": settings or "as PyTorch has it"}
        shown += [f"{name} {facts[name]}" for name in ("cuda", "cudnn", "driver", "device", "capability", "allocator")]
    facts["threads"] = torch.get_num_threads()
    works = torch.ones(1000, device=device).sum().item() == 1000
    return Finding(works, ", ".join(shown), "The device does not add: look at its driver.", facts)


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(asked, capture_output=True, text=True, check=False)
    return run.stdout.partition("\n")[0] or None


def copies(setting: Setting) -> Finding:
    """Rates to a second memory and back, and the bits that come back while the device computes."""
    device = setting.device
    if device.type == "cpu" and sys.platform != "linux":
        return Finding(None, "a file beside the RAM needs Linux")
    store = open_store("file:" if device.type == "cpu" else "pinned", 4 * rounded(max(BLOCKS)), device)
    try:
        links = measure(store, device, BLOCKS)
        same = True
        for size in BLOCKS:
            value = torch.randint(256, (size,), dtype=torch.uint8, device=device)
            expected, landing = value.clone(), torch.empty_like(value)
            store.send(0, value.untyped_storage())
            store.wait(0)
            value.zero_()  # at once: the copy must have ended by then, on the device's own time
            store.fetch(0, landing.untyped_storage())
            store.wait(0)
            same &= same_bytes(landing, expected)
            store.drop(0)
    finally:
        store.close()
    rates = f"{links.send / 1e9:.2f} GB/s there, {links.fetch / 1e9:.2f} back, {links.latency * 1e6:.0f} us at least"
    found = f"{rates}; {'the same' if same else 'OTHER'} bits"
    return Finding(same, found, "Do not use host_budget on this machine. Please report it.", asdict(links))
