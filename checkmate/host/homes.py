"""Tensors at home in a file: their storages are mapped from it, and memory holds the pages in use.

To PyTorch they are ordinary tensors on the CPU. A step finds by `checkmate.host.home_of` that a tensor has a home, and
copies from there and to there past the page cache, by the same file (`checkmate.host.Store.adopt`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from checkmate.errors import HostError, Unsupported
from checkmate.host.files import File
from checkmate.host.store import BLOCK, HOMES, TORN, Home, home_of, rounded
from checkmate.units import exact_bytes

LEAST = 1 << 20  # bytes of a storage that gets a home
_WRITE_AND_WAIT = 7  # flags of Linux: for sync_file_range
_PUNCH_HOLE = 3  # for fallocate, with the size kept
_FAILED = ctypes.c_void_p(-1).value  # what mmap gives then
_Model = TypeVar("_Model", bound=nn.Module)

_libc = ctypes.CDLL(None, use_errno=True)
_Address, _Bytes = ctypes.c_void_p, ctypes.c_size_t
_libc.mmap.restype = _Address
_libc.mmap.argtypes = (_Address, _Bytes, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (_Address, _Bytes)
_libc.madvise.argtypes = (_Address, _Bytes, ctypes.c_int)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@torch.inference_mode(False)  # in which tensors would be made without gradients
def in_file(model: _Model, folder: str | os.PathLike[str]) -> _Model:
    """Map a model's parameters and buffers into a file, so that the model need not fit into memory.

    They stay ordinary tensors on the CPU, with their bits, layouts and ties; the objects stay too, so that an optimizer
    keeps its parameters. The kernel reads what is used, and lets go of it where memory runs short. Storages below 1 MiB
    stay in memory, and those that are in a file of this folder stay there. The file has no name: its bytes return to
    the disk with the tensors, or with the process, however that ends. A forked process shares the tensors.

    Tensors on meta, where a model takes no memory, become zeros in the file, to be loaded into one by one::

        with torch.device("meta"):
            model = Llama(config)
        checkmate.in_file(model, "/fast/disk")
        model.load_state_dict(torch.load("llama.pt", mmap=True))  # not with assign=True, which puts others there

    Args:
        model: on the CPU or on meta; it is changed.
        folder: on a fast disk; /dev/shm is memory.

    Returns:
        The model.

    Raises:
        HostError: if there is no such folder, or not so much room there; the model is as it was then.
        Unsupported: for a tensor that cannot be in a file, as on a GPU or of a subclass, and for a buffer on meta that
            is not in the model's `state_dict`, as nothing would load it; the model is as it was then, too.

    >>> import tempfile
    >>> model = in_file(torch.nn.Linear(1024, 512), tempfile.gettempdir())
    >>> home_of(model.weight).nbytes, home_of(model.bias)
    (2097152, None)
    """
    if sys.platform != "linux":
        raise HostError("A file as a second memory needs Linux.")
    # Find the tensors that move, once each, by their storages.
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names: dict[torch.Tensor, str] = {}
    for name, t in named:
        names.setdefault(t, name)
    loaded = {*model.state_dict(keep_vars=True).values()} if any(t.is_meta for t in names) else set()
    real_folder = Path(os.path.realpath(folder))
    moving: dict[int, list[torch.Tensor]] = {}
    for t, name in names.items():
        if _is_moved(t, name, real_folder, loaded):
            moving.setdefault(t.untyped_storage()._cdata, []).append(t)
    # Take all bytes before anything changes.
    groups = [*moving.values()]
    storages = map_storages([group[0].untyped_storage().nbytes() for group in groups], real_folder)
    copied = [(group, storage) for group, storage in zip(groups, storages, strict=True) if not group[0].is_meta]
    _swap([(t, s, names[t]) for group, s in zip(groups, storages, strict=True) for t in group if t.is_meta])
    # Copy one storage after another, so that one is there twice at a time.
    for group, storage in copied:
        storage.copy_(group[0].untyped_storage())
        HOMES[storage.data_ptr()].let_go()
        for t in group:
            t.data = within(storage, t)
    return model


def _is_moved(t: torch.Tensor, name: str, folder: Path, loaded: Container[torch.Tensor]) -> bool:
    """Tell whether a tensor is to move to a file of a folder, or raise `Unsupported`."""
    is_lazy = nn.parameter.is_lazy(t)
    is_plain = (
        not (is_lazy or t.is_inference() or t.is_quantized)
        and (t.device.type in ("cpu", "meta") and t.layout is torch.strided and type(t.data) is torch.Tensor)
        and not (t.is_conj() or t.is_neg())
    )
    if not is_plain:
        if is_lazy or t.is_meta or t.numel() * t.element_size() >= LEAST:
            raise Unsupported(
                f"{name}, a {type(t).__name__} of {t.dtype} and {t.layout} on {t.device}, cannot be in a file. in_file "
                "takes plain tensors on the CPU or on meta: call it before the model goes to a GPU or is sharded, "
                "quantized or run in inference mode, and after the first batch if its parameters are lazy."
            )
        return False
    if t.is_meta and t not in loaded:
        raise Unsupported(
            f"{name} is a buffer on meta that is not in the model's state_dict, so that nothing would load it. Make it "
            "on the CPU before in_file: have parameters alone on meta, or compute the buffer anew."
        )
    home = home_of(t)
    is_there = home is not None and home.place == folder
    return t.is_meta or (t.untyped_storage().nbytes() >= LEAST and not is_there)


def _swap(meta: Sequence[tuple[torch.Tensor, torch.UntypedStorage, str]]) -> None:
    """Give data to tensors on meta, which stay the same objects, or raise `Unsupported` and change nothing.

    Data on meta cannot be replaced (``t.data = ...``).
    """
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    for t, storage, name in meta:
        replacement = within(storage, t)
        replacement = nn.Parameter(replacement, t.requires_grad) if isinstance(t, nn.Parameter) else replacement
        replacement.__class__ = type(t)
        replacement.__dict__.update(t.__dict__)
        try:
            if t._backward_hooks or t._post_accumulate_grad_hooks:
                raise RuntimeError("its hooks would be lost")
            torch.utils.swap_tensors(t, replacement)
        except RuntimeError as error:
            for pair in swapped:
                torch.utils.swap_tensors(*pair)
            raise Unsupported(
                f"{name} on meta cannot become a tensor with data: {error}. Call in_file as soon as the model is made."
            ) from error
        swapped.append((t, replacement))


def within(storage: torch.UntypedStorage, t: torch.Tensor) -> torch.Tensor:
    """The tensor that lies in a storage as another one does in its own."""
    return torch.empty(0, dtype=t.dtype, device=storage.device).set_(storage, t.storage_offset(), t.shape, t.stride())


def map_storages(sizes: Sequence[int], folder: Path) -> list[torch.UntypedStorage]:
    """Make storages of zeros, of these bytes each; those of at least 1 MiB are at home in one file.

    Raises:
        HostError: if there is no such folder, or not so much room there, or it cannot be mapped.
    """
    places = [*accumulate((rounded(size) if size >= LEAST else 0 for size in sizes), initial=0)]
    another = "checkmate.in_file(model, '/fast/disk')"
    file = File(folder, places[-1], another) if places[-1] else None
    try:
        if file is not None and file.alignment > 1:
            _make_coherent(file)
        return [
            torch.zeros(size, dtype=torch.uint8, device="cpu").untyped_storage()
            if file is None or size < LEAST
            else _map(file, place, size)
            for place, size in zip(places, sizes, strict=False)
        ]
    except OSError as error:
        why = f"{error.strerror}. Name another folder, as {another}"
        raise HostError(f"A file in {folder} cannot be mapped: {why}.") from error


@dataclass(frozen=True, eq=False)
class _Mapped(Home):
    """A home in a `File`, mapped at an address by a process."""

    address: int
    process: int

    @property
    def place(self) -> Path:
        """The folder of the file."""
        return self.memory.folder

    def beside(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Make storages of these sizes in bytes, at home in one file of the folder."""
        return map_storages(sizes, self.place)

    def let_go(self) -> None:
        """Write the pages that only memory has, and free them there.

        Raises:
            HostError: if they cannot be written, or the process was forked from that which has mapped it.
        """
        if os.getpid() != self.process:
            raise HostError(
                f"A tensor was mapped to {self.name} by process {self.process}, from which this one was forked. Both "
                "share it: call in_file, and train, in one process."
            )
        # Pages are written once no mapping holds them, without a flush of the disk; locked ones stay.
        (extent,) = self.extents
        _libc.madvise(self.address, len(extent), mmap.MADV_DONTNEED)
        if _libc.sync_file_range(self.memory.fd, extent.start, len(extent), _WRITE_AND_WAIT):
            why = os.strerror(ctypes.get_errno())
            raise HostError(f"Changes of {exact_bytes(self.nbytes)} cannot be written to {self.name}: {why}. {TORN}")
        os.posix_fadvise(self.memory.fd, extent.start, len(extent), os.POSIX_FADV_DONTNEED)


def _map(file: File, place: int, nbytes: int) -> torch.UntypedStorage:
    """Map a part of a file, for as long as the storage lives."""
    extent = range(place, place + rounded(nbytes))
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, len(extent), access, mmap.MAP_SHARED, file.fd, place)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    HOMES[address] = home = _Mapped(nbytes, file.name, file, (extent,), address, os.getpid())
    # The tensor holds the array, and the array's end is that of the home; at the process's exit nothing has to be done.
    array = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(array, _unmap, home).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()


def _unmap(home: _Mapped) -> None:
    """Return a home's bytes to the machine and to the disk; a forked process leaves the latter to the first one."""
    (extent,) = home.extents
    del HOMES[home.address]
    _libc.munmap(home.address, len(extent))
    if os.getpid() == home.process:  # where the file system cannot, they return with the file
        _libc.fallocate(home.memory.fd, _PUNCH_HOLE, extent.start, len(extent))


def _make_coherent(file: File) -> None:
    """Have a file go by the page cache if direct reads and writes disagree with a mapping."""
    with mmap.mmap(file.fd, BLOCK) as shown, mmap.mmap(-1, BLOCK) as block:
        shown[:] = b"1" * BLOCK
        os.preadv(file.fd, [block], 0)
        is_read = block[:] == shown[:]
        block[:] = bytes(BLOCK)
        os.pwrite(file.fd, block, 0)
        if not is_read or block[:] != shown[:]:
            file.go_by_the_cache()
        shown[:] = bytes(BLOCK)
