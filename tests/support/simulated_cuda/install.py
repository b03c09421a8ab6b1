"""Have `torch.cuda` speak to the simulated device: what it calls in PyTorch's C++ is answered by the library.

A PyTorch that is built for CUDA has these functions, which would look for a driver; one for the CPU has none of them.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkmate.profiling import measure
from tests.support.simulated_cuda.build import library

DEVICES = 2
NAME = "Simulated H100"

_lib: Any = None
_pools = itertools.count(1)
_options: dict[str, bool] = {}


def is_installed() -> bool:
    """Whether the CUDA device of this process is the simulated one."""
    return _lib is not None


def environment() -> dict[str, str]:
    """For other processes of a test: if this one has the simulated device, Python starts it there before all else."""
    if not is_installed():
        return {}
    here, before = Path(__file__).parent, os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*map(str, [here / "startup", here.parents[2]]), *[before] * bool(before)])}


def lib() -> Any:
    """The library, for what tests ask of it alone."""
    assert _lib is not None, "the simulated device is not installed"
    return _lib


def set_option(name: str, on: bool) -> None:
    """``clocks``: unordered accesses are errors; ``late``; ``poison``; ``expandable`` segments."""
    lib().simulated_set_option(name.encode(), int(on))
    _options[name] = on


def set_waver(on: bool, *, what: str = "attention") -> None:
    """Whether the backward of ``attention``, or ``convolutions``, sum in another order from call to call."""
    getattr(lib(), f"simulated_waver_{what}")(int(on))


def set_capacity(nbytes: int, device: int = 0) -> None:
    """Give a device so many bytes."""
    lib().simulated_set_capacity(device, nbytes)


def unpinned_early() -> int:
    """Count how often pinned memory was let go of while a copy might use it, since this was asked last."""
    return int(lib().simulated_unpinned_early())


def host_has_waited(tensor: Tensor) -> bool:
    """Whether the host may read and write a pinned tensor: no copy to or from it can be under way."""
    return bool(_lib.simulated_host_has_waited(tensor.data_ptr(), tensor.nbytes))


def install() -> None:
    """Load the device into this process, for good.

    Raises:
        RuntimeError: if it cannot be built.
    """
    global _lib
    if _lib is not None:
        return
    _lib = declared(ctypes.CDLL(str(library())))
    _answer_for_cuda()
    measure.DEVICE_SECONDS_PER_OP = 0.0  # its clock says the same each time, and the processor takes longer to run it


def declared(loaded: Any) -> Any:
    """The library, with the types of what it is asked."""
    number, pointer = ctypes.c_uint64, ctypes.c_void_p
    for name, result, arguments in (
        ("stats", ctypes.c_char_p, [ctypes.c_int]),
        ("snapshot", ctypes.c_char_p, [ctypes.c_int, number, number]),
        ("empty_cache", None, [number, number]),
        ("set_capacity", None, [ctypes.c_int, ctypes.c_int64]),
        ("capacity", ctypes.c_int64, [ctypes.c_int]),
        ("set_fraction", None, [ctypes.c_int, ctypes.c_double]),
        ("fraction", ctypes.c_double, [ctypes.c_int]),
        ("make_pool", None, [ctypes.c_int, number]),
        *((f"{verb}_pool", ctypes.c_int, [ctypes.c_int, number, number]) for verb in ("begin", "end", "release")),
        ("pool_uses", ctypes.c_int, [ctypes.c_int, number, number]),
        ("elapsed", ctypes.c_double, [pointer, pointer]),
        ("stream", ctypes.c_int64, [ctypes.c_int]),
        ("set_stream", None, [ctypes.c_int, ctypes.c_int64]),
        ("pin", None, [pointer, ctypes.c_size_t]),
        ("unpin", ctypes.c_int, [pointer]),
        ("unpinned_early", ctypes.c_int64, []),
        ("host_has_waited", ctypes.c_int, [pointer, ctypes.c_size_t]),
        ("late_tasks", ctypes.c_int64, []),
        ("orders_checked", ctypes.c_int64, []),
    ):
        function = getattr(loaded, f"simulated_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class Stream(torch.Stream):
    """`torch.cuda.Stream` over PyTorch's stream of any device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        where = torch.cuda.current_device() if device is None else torch.device(device).index
        return super().__new__(cls, torch.device("cuda", where or 0), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """`torch.cuda.Event` over PyTorch's event of any device."""

    def __new__(cls, enable_timing: bool = False, **unused: bool) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(_lib.simulated_elapsed(self.event_id, end_event.event_id))

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


class MemPool:
    """`torch.cuda.MemPool`: made on the device that is current."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.device, self._number = torch.cuda.current_device(), next(_pools)
        _lib.simulated_make_pool(self.device, self._number)

    @property
    def id(self) -> tuple[int, int]:
        return (0, self._number)

    def use_count(self) -> int:
        return int(_lib.simulated_pool_uses(self.device, *self.id))

    def __del__(self) -> None:
        _lib.simulated_release_pool(self.device, *self.id)
        _lib.simulated_empty_cache(*self.id)


class Cudart:
    """Stands for `torch.cuda.cudart()`: memory of the host that the device copies by itself."""

    @staticmethod
    def cudaHostRegister(at: int, nbytes: int, flags: int) -> int:
        _lib.simulated_pin(at, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(at: int) -> int:
        return int(_lib.simulated_unpin(at))


def properties(device: Any = None) -> Any:
    """Properties of an H100, of which the product reads some."""
    capacity = int(_lib.simulated_capacity(torch.cuda._get_device_index(device, optional=True)))
    return types.SimpleNamespace(
        name=NAME, major=9, minor=0, gcnArchName="", uuid="simulated", is_integrated=0, is_multi_gpu_board=0,
        total_memory=capacity, L2_cache_size=1 << 20, warp_size=32, multi_processor_count=132,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
    )  # fmt: skip


def _of_pool(verb: str, device: int, pool: tuple[int, int]) -> None:
    if getattr(_lib, f"simulated_{verb}_pool")(device, *pool):
        raise RuntimeError(f"to {verb} a pool: refused by the simulated device")


def _snapshot(which: Any = None, *_: Any) -> dict[str, Any]:
    first, second = (which or (0, 0))[:2]
    everything = (first, second) == (0, 0)
    return {
        "segments": json.loads(_lib.simulated_snapshot(int(everything), first, second)),
        "device_traces": [],
        "allocator_settings": {"expandable_segments": _options.get("expandable", False)},
        "external_annotations": [],
    }


def _answer_for_cuda() -> None:
    """Put this device's answers where `torch.cuda` looks for the C++ ones."""
    set_stream = _lib.simulated_set_stream
    exchange = lambda device: int(_lib.simulated_exchange_device(device))  # noqa: E731
    answers: dict[str, Any] = {
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": lambda: DEVICES,
        "_cuda_getDevice": lambda: int(_lib.simulated_device()),
        "_cuda_setDevice": lambda device: exchange(device) * 0,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_synchronize": lambda: _lib.simulated_synchronize(int(_lib.simulated_device())),
        "_cuda_getCurrentStream": lambda device: (int(_lib.simulated_stream(device)), device, 1),
        "_cuda_getDefaultStream": lambda device: (0, device, 1),
        "_cuda_getCurrentRawStream": lambda device: int(_lib.simulated_stream(device)),
        "_cuda_setStream": lambda stream_id, device_index, device_type: set_stream(device_index, stream_id),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_memoryStats": lambda device: json.loads(_lib.simulated_stats(device)),
        "_cuda_resetPeakMemoryStats": lambda device: _lib.simulated_reset_peaks(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: _lib.simulated_reset_accumulated(device),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_emptyCache": lambda *which: _lib.simulated_empty_cache(0, 0),
        "_cuda_memorySnapshot": _snapshot,
        "_cuda_setMemoryFraction": lambda fraction, device: _lib.simulated_set_fraction(device, fraction),
        "_cuda_getMemoryFraction": lambda device: float(_lib.simulated_fraction(device)),
        "_cuda_beginAllocateCurrentThreadToPool": partial(_of_pool, "begin"),
        "_cuda_endAllocateToPool": partial(_of_pool, "end"),
        "_cuda_releasePool": partial(_of_pool, "release"),
        "_cuda_clearCublasWorkspaces": lambda: _lib.simulated_clear_workspaces(),
        "_has_cudnn": True,
        "_get_cudnn_batch_norm_reserve_space_size": _reserve_bytes,
    }
    for name, answer in answers.items():
        for module in (torch._C, torch.cuda, torch.cuda.memory, torch.cuda.graphs):
            if module is torch._C or hasattr(module, name):
                setattr(module, name, answer)
    # What `torch.cuda` takes out of these when it is imported, and what it is itself.
    cuda: Any = torch.cuda
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.MemPool = cuda.memory.MemPool = MemPool
    cuda.device_count = lambda: DEVICES
    cuda.get_device_properties = cuda._get_device_properties = properties
    cuda.mem_get_info = cuda.memory.mem_get_info = _memory_info
    cuda.cudart = Cudart
    storages: Any = torch.storage._StorageBase
    storages.clone = _clone
    torch._use_cudnn_rnn_flatten_weight = lambda: False  # there are no RNNs of cuDNN
    cuda.default_generators = tuple(torch.ops.simulated_cuda.generator(device) for device in range(DEVICES))
    cuda._initialized = True
    for call, _ in [*cuda._lazy_seed_tracker.get_calls()]:  # a seed that was set before there was a device
        call()


_clone_elsewhere = torch.storage._StorageBase.clone


def _clone(storage: Any) -> Any:
    """A copy of a storage, as `copy.deepcopy` makes it: a PyTorch built for CUDA takes its memory from there."""
    if storage.device.type != "cuda":
        return _clone_elsewhere(storage)
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


def _memory_info(device: Any = None) -> tuple[int, int]:
    index = torch.cuda._get_device_index(device, optional=True)
    capacity = int(_lib.simulated_capacity(index))
    return capacity - torch.cuda.memory_reserved(index), capacity


def _reserve_bytes(x: Tensor, training: bool) -> int:
    return x.numel() // 8 if training else 0
