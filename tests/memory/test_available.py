"""What there is for a step: by made-up files of the kernel's, by this machine's, and by made-up accelerators."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from checkmate.errors import BudgetError, HostError
from checkmate.memory import available as module
from checkmate.memory.available import (
    LEAST_MARGIN,
    SCRATCH,
    STEPS,
    Available,
    Limit,
    available,
    free_there,
    limits,
    rounded_down,
)
from tests.support.sampling import in_turn

CPU, MB, GB = torch.device("cpu"), 10**6, 10**9
MACHINE = {"proc/meminfo": "MemTotal:       16000000 kB\nMemFree:  1000 kB\nMemAvailable:    8000000 kB\n"}
TOTAL, FREE = 16_000_000 * 1024, 8_000_000 * 1024
V2, V1 = "0::/user.slice/job\n", "9:name=systemd:/\n4:cpu,memory:/docker/ab\n0::/\n"


def found(root: Path, files: dict[str, str]) -> dict[str, Limit]:
    """The limits that such files say, by what they are of."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {limit.of: limit for limit in limits(root)}


def test_a_machine_that_says_only_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without /proc: half of it; nothing where not even that is known. Otherwise it gives what is available."""
    (half,) = found(tmp_path, {}).values()
    assert half.free == half.total // 2 > 0
    monkeypatch.delattr(os, "sysconf")
    assert found(tmp_path, {}) == {}
    assert found(tmp_path / "other", MACHINE) == {"this machine": Limit("this machine", TOTAL, FREE)}
    monkeypatch.setattr(module, "limits", list)
    with pytest.raises(BudgetError, match="This machine does not say how much memory is free: name the bytes"):
        available(CPU, 0)


def test_control_groups_of_version_2_and_those_above(tmp_path: Path) -> None:
    """One without a limit is none. Cached files go where memory is asked for, but those that are mapped."""
    top = "sys/fs/cgroup"
    files = {
        **MACHINE,
        "proc/self/cgroup": V2,
        f"{top}/memory.stat": "anon 5\n",  # the top group has no limit
        f"{top}/user.slice/memory.max": f"{4 * GB}\n",
        f"{top}/user.slice/memory.current": f"{3 * GB}\n",
        f"{top}/user.slice/memory.stat": f"file_mapped {200 * MB}\ninactive_file {GB}\nactive_file {500 * MB}\n",
        f"{top}/user.slice/job/memory.max": "max\n",
        f"{top}/user.slice/job/memory.high": f"{2 * GB}\n",
        f"{top}/user.slice/job/memory.current": f"{500 * MB}\n",
        f"{top}/user.slice/job/memory.stat": "",
    }
    job, above = "the control group user.slice/job (memory.high)", "the control group user.slice (memory.max)"
    assert [*found(tmp_path, files).values()] == [
        Limit("this machine", TOTAL, FREE),
        Limit(job, 2 * GB, 1_500 * MB),
        Limit(above, 4 * GB, 4 * GB - (3 * GB - 1_300 * MB)),
    ]
    job = "sys/fs/cgroup/job"  # which holds more than its limit
    files = {"proc/self/cgroup": "0::/../job\n", f"{job}/memory.max": "100\n", f"{job}/memory.current": "101\n"}
    assert found(tmp_path, {**MACHINE, **files})["the control group job (memory.max)"].free == 0


@pytest.mark.parametrize("inside", [False, True])
def test_control_groups_of_version_1(inside: bool, tmp_path: Path) -> None:
    """A container sees its own group as the top one, by a path that is not there. No limit is a huge number."""
    top = "sys/fs/cgroup/memory" + ("" if inside else "/docker/ab")
    files = {
        **MACHINE,
        "proc/self/cgroup": V1,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GB}\n",
        f"{top}/memory.limit_in_bytes": f"{GB}\n",
        f"{top}/memory.usage_in_bytes": f"{400 * MB}\n",
        f"{top}/memory.stat": (
            f"mapped_file 1\ninactive_file 2\ntotal_mapped_file {50 * MB}\ntotal_inactive_file {100 * MB}\n"
            f"total_active_file {30 * MB}\n"
        ),
    }
    least = min(found(tmp_path, files).values(), key=lambda limit: limit.free)
    assert (least.total, least.free) == (GB, GB - (400 * MB - 80 * MB))
    assert least.of == f"the control group {'.' if inside else 'docker/ab'} (memory.limit_in_bytes)"


def test_limits_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are not shared: each rank has its own."""
    set_to = {resource.RLIMIT_AS: GB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (set_to[which], resource.RLIM_INFINITY))
    own = found(tmp_path, {**MACHINE, "proc/self/status": "VmPeak:\t 900 kB\nVmSize:\t 1000 kB\nVmData:\t 10 kB\n"})
    assert own["this process (RLIMIT_AS)"] == Limit("this process (RLIMIT_AS)", GB, GB - 1000 * 1024, shared=False)
    assert "this process (RLIMIT_DATA)" not in own
    monkeypatch.setattr(module, "limits", lambda: limits(tmp_path))
    alone, shared = available(CPU, 0), available(CPU, 0, sharing=2)
    assert alone.limit == shared.limit == own["this process (RLIMIT_AS)"]
    assert available(CPU, 0, sharing=16).limit == Limit("this machine", TOTAL, FREE // 16)


def test_what_is_left_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena's first mapping is a quarter larger than the plan, and malloc takes twice as much."""
    here = [Limit("this machine", 4 * GB, 2 * GB), Limit("a group", 9 * GB, 3 * GB)]
    monkeypatch.setattr(module, "limits", lambda: here)
    arena, malloc = available(CPU, 100 * MB), available(CPU, 100 * MB, in_arena=False)
    assert arena.bytes == 100 * MB + int((2 * GB - SCRATCH) / 1.25)
    assert malloc.bytes == 100 * MB + (2 * GB - SCRATCH) // 2
    assert str(arena) == (
        "this machine has 4.00 GB, 1.90 GB of it are held by others, and 614.75 MB are left as a margin"
    )
    monkeypatch.setattr(module, "limits", lambda: [Limit("this machine", 4 * GB, 100 * MB)])
    assert available(CPU, 100 * MB).bytes == 100 * MB  # what the step holds already


def test_what_is_left_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator holds is the step's; CUDA may be told to let this process have a share only."""
    xpu, cuda = torch.device("xpu", 0), torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 3 * GB)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (60 * GB, 80 * GB))
    assert available(xpu, 0) == Available(Limit("xpu:0", 80 * GB, 60 * GB), 3 * GB, 5 * GB)
    assert available(xpu, 0).bytes == 58 * GB
    fraction = Mock(return_value=1.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * GB, 4 * GB + 4))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
    assert available(cuda, 0) == Available(Limit("cuda:0", 4 * GB + 4, 1 * GB), 3 * GB, LEAST_MARGIN)
    fraction.return_value = 0.5
    assert available(cuda, 0).limit.free == 2 * GB + 2 - 3 * GB
    assert available(cuda, 0).bytes == 2 * GB + 2 - LEAST_MARGIN
    monkeypatch.setattr(torch.accelerator, "get_memory_info", Mock(side_effect=RuntimeError("not implemented")))
    says = "xpu:0 does not say how much memory is free: name the bytes, such as budget="
    with pytest.raises(BudgetError, match=says):
        available(xpu, 0)


@in_turn(count=[0, 1, 63, 64, 127, 129, 10**9, 2**40 - 1, 2**40, 12_345_678_901])
def test_rounding_is_coarse_and_down(count: int) -> None:
    down = rounded_down(count)
    assert 0 <= count - down <= count / STEPS
    assert rounded_down(down) == down
    assert len({rounded_down(n) for n in range(1024, 2048)}) == STEPS


def test_this_machine_says_something() -> None:
    there = available(CPU, held=12)
    assert there.held == 12
    assert 0 <= there.bytes <= there.limit.total


def test_a_second_memory_gives_nine_tenths_of_what_is_free_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {str(tmp_path): 10 << 20, "/temporary": 20 << 20}
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: Mock(free=usage[folder]))
    monkeypatch.setattr(module, "limits", lambda: [Limit("this machine", 1 << 40, free << 20) for free in (50, 40)])
    monkeypatch.setattr(tempfile, "tempdir", "/temporary")
    assert [free_there(where) >> 20 for where in (f"file:{tmp_path}", "file:", "pinned")] == [9, 18, 36]
    monkeypatch.undo()
    with pytest.raises(HostError, match=r"No file can be made in .*none: No such file or directory"):
        free_there(f"file:{tmp_path}/none")
