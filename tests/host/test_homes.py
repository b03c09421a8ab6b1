"""Tensors at home in a file: what stays of them, what is refused, and copies past the page cache beside them."""

from __future__ import annotations

import copy
import ctypes
import errno
import fcntl
import gc
import io
import mmap
import os
import pickle
import re
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.errors import HostError, Unsupported
from checkmate.host import home_of, homes, open_store
from checkmate.host.homes import map_storages
from checkmate.host.store import BLOCK, HOMES
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.processes import run_python

CPU = torch.device("cpu")
WIDE = 512  # of a layer whose weight is of 1 MiB


class Tied(nn.Module):
    """Parameters and buffers of many kinds: tied, views of one storage, in channels last, frozen, small, of half."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.head.weight = self.embedding.weight
        self.convolution = nn.Conv2d(64, 512, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Parameter(torch.randn(WIDE + 1, WIDE, dtype=torch.bfloat16).repeat(2, 1), requires_grad=False)
        flat = torch.randn(2 * WIDE * WIDE)
        self.first = nn.Parameter(flat[: WIDE * WIDE].view(WIDE, WIDE))
        self.second = nn.Parameter(flat[WIDE * WIDE :].view(WIDE, WIDE).t())
        self.register_buffer("table", torch.randn(WIDE, WIDE), persistent=False)
        self.register_buffer("count", torch.tensor(3))


def layout(t: Tensor) -> Any:
    return t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, type(t), t.is_leaf


def all_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def test_a_model_keeps_bits_layouts_ties_and_objects(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    before, plain = all_of(model), {name: t.detach().clone() for name, t in all_of(model).items()}
    layouts, optimizer = {name: layout(t) for name, t in before.items()}, torch.optim.SGD(model.parameters(), lr=0.1)

    assert checkmate.in_file(model, tmp_path) is model

    after = all_of(model)
    assert all(after[name] is t for name, t in before.items())
    assert {name: layout(t) for name, t in after.items()} == layouts
    assert_same_bits(after, plain)
    assert {name for name, t in after.items() if home_of(t) is None} == {"head.bias", "convolution.bias", "count"}
    assert home_of(model.first) is home_of(model.second)
    assert list(tmp_path.iterdir()) == []
    # The optimizer has them too, and a call more leaves them where they are.
    homes_before = {name: home_of(t) for name, t in after.items()}
    model.first.grad = torch.ones_like(model.first)
    optimizer.step()
    checkmate.in_file(model, str(tmp_path))
    assert {name: home_of(t) for name, t in all_of(model).items()} == homes_before
    assert_same_bits(model.first.detach(), plain["first"].sub(0.1))


def test_a_model_moves_to_another_folder_and_its_bytes_return_to_the_disk(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    model = checkmate.in_file(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2 * WIDE)), tmp_path)
    bits, home = model[0].weight.detach().clone(), home_of(model[1].weight)
    fd = os.dup(home.memory.fd)
    assert os.fstat(fd).st_blocks * 512 >= 3 << 20
    model[0].weight.data = model[0].weight.detach().clone()
    assert os.fstat(fd).st_blocks * 512 <= (2 << 20) + 64 * BLOCK  # of it, those of the other weight
    checkmate.in_file(model, tmp_path / "other")
    assert os.fstat(fd).st_blocks * 512 <= 64 * BLOCK
    assert home_of(model[1].weight) is not home
    assert {home_of(m.weight).memory.folder.name for m in model} == {"other"}
    assert_same_bits(model[0].weight.detach(), bits)
    os.close(fd)


def test_no_descriptor_and_no_address_stays(tmp_path: Path) -> None:
    gc.collect()
    descriptors = lambda: len([*Path("/proc/self/fd").iterdir()])  # noqa: E731
    before = descriptors(), len(HOMES)
    model = checkmate.in_file(nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(20))), tmp_path)
    assert len(HOMES) == before[1] + 20
    assert descriptors() == before[0] + 1  # however many tensors
    view = model[0].weight.detach()[3]
    home, kept = weakref.ref(home_of(view)), view.clone()
    del model
    gc.collect()
    assert home() is home_of(view)  # a view keeps it
    assert_same_bits(view, kept)
    del view
    gc.collect()
    assert home() is None
    assert (descriptors(), len(HOMES)) == before


def test_they_are_saved_copied_and_shown_as_ordinary_tensors(tmp_path: Path) -> None:
    model, file = Tied(), io.BytesIO()
    text = repr(model.first)
    checkmate.in_file(model, tmp_path)
    assert repr(model.first) == text
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert_same_bits(torch.load(file), model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(all_of(other), all_of(model))
        assert other.head.weight is other.embedding.weight
        assert all(home_of(t) is None for t in all_of(other).values())
    assert model.half().first.dtype == torch.half


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = checkmate.in_file(nn.Linear(WIDE, WIDE), tmp_path)
    safetensors.save_model(model, str(tmp_path / "model"))
    other = checkmate.in_file(nn.Linear(WIDE, WIDE), tmp_path)
    safetensors.load_model(other, str(tmp_path / "model"))
    assert home_of(other.weight) is not None
    assert_same_bits(other.state_dict(), model.state_dict())


def test_a_model_on_meta_is_loaded_into_its_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE, bias=False))
    plain[2].weight = plain[0].weight
    with torch.device("meta"):
        model = copy.deepcopy(plain).to("meta")
        model[2].weight = model[0].weight
    model[0].weight.about, weight = "kept", model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())

    checkmate.in_file(model, tmp_path)

    assert model[0].weight is weight is model[2].weight is optimizer.param_groups[0]["params"][0]
    assert weight.about == "kept"
    assert type(weight) is nn.Parameter
    assert weight.is_leaf
    assert [t.requires_grad for t in model.parameters()] == [True, False, True, True]
    assert {t.device for t in all_of(model).values()} == {CPU}
    assert_same_bits([*all_of(model).values()], [torch.zeros_like(t) for t in all_of(model).values()])
    home = home_of(weight)
    model.load_state_dict(plain.state_dict())
    assert home_of(weight) is home is not None
    assert_same_bits(model.state_dict(), plain.state_dict())
    x = torch.randn(4, WIDE)
    for one in (model, plain):
        one(x).square().sum().backward()
    assert_same_bits(weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, partial(torch.device, "meta")])
def test_modes_around_the_call_change_nothing(around: Any, tmp_path: Path) -> None:
    for model in (nn.Linear(WIDE, WIDE), _on_meta(lambda: nn.Linear(WIDE, WIDE))):
        with around():
            checkmate.in_file(model, tmp_path)
        assert home_of(model.weight) is not None
        model(torch.ones(1, WIDE)).sum().backward()
        assert_same_bits(model.weight.grad, torch.ones(WIDE, WIDE))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE))
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


def _on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def _sparse() -> nn.Module:
    model = nn.Linear(WIDE, WIDE)
    model.register_buffer("links", torch.eye(WIDE).to_sparse())
    return model


def _watched() -> nn.Module:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))
    model.watch = [weakref.ref(model[1].weight)]
    return model


def _hooked() -> nn.Module:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))
    model[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


def _inferred() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(WIDE, WIDE)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a buffer that nothing loads": (lambda: _on_meta(Rotary), "frequencies is a buffer on meta .* nothing would load"),
    "lazy": (lambda: nn.LazyLinear(WIDE), "weight, a UninitializedParameter .* after the first batch"),
    "sparse": (_sparse, r"links, a Tensor of torch.float32 and torch.sparse_coo on cpu, cannot be in a file"),
    "in inference mode": (_inferred, "weight, a Parameter of .* cannot be in a file"),
    "held weakly on meta": (_watched, "1.weight on meta cannot become a tensor with data: Cannot swap .* weakref"),
    "hooked on meta": (_hooked, "1.weight on meta cannot become a tensor with data: its hooks would be lost"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_in_a_file_is_refused_and_the_model_stays(name: str, tmp_path: Path) -> None:
    make, says = REFUSED[name]
    model = make()
    before = {name: (t, t.device) for name, t in all_of(model).items()}
    with pytest.raises(Unsupported, match=says):
        checkmate.in_file(model, tmp_path)
    assert all(after is before[name][0] for name, after in all_of(model).items())
    assert all(after.device == before[name][1] for name, after in all_of(model).items())
    gc.collect()
    assert all(nn.parameter.is_lazy(t) or home_of(t) is None for t in all_of(model).values())


def test_subclasses_are_refused(tmp_path: Path) -> None:
    class Scaled(Tensor):
        pass

    model = nn.Module()
    model.register_buffer("table", torch.randn(WIDE, WIDE).as_subclass(Scaled))
    with pytest.raises(Unsupported, match="table, a Scaled of"):
        checkmate.in_file(model, tmp_path)


@pytest.mark.parametrize("meta", [False, True])
def test_a_full_disk_is_told_and_the_model_stays(meta: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: nn.Linear(WIDE, WIDE)  # noqa: E731
    model = _on_meta(make) if meta else make()
    weight, device = model.weight, model.weight.device
    address = 0 if meta else weight.data_ptr()

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        says = rf"No room for a file of 1.05 MB \(1_048_576 bytes\) in {tmp_path}: .* free there .*checkmate.in_file"
        with pytest.raises(HostError, match=says):
            checkmate.in_file(model, tmp_path)
    with pytest.raises(HostError, match=r"No file can be made in .*missing: .*checkmate.in_file"):
        checkmate.in_file(model, tmp_path / "missing")
    assert (model.weight is weight, weight.device, 0 if meta else weight.data_ptr()) == (True, device, address)


def test_a_folder_whose_files_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes.mmap, "MAP_SHARED", 0)  # the kernel refuses it
    with pytest.raises(HostError, match=f"A file in {tmp_path} cannot be mapped: .*checkmate.in_file"):
        map_storages([1 << 20], tmp_path)


# A step's copies, beside what the user sees.


def filled(nbytes: int, folder: Path) -> Tensor:
    (storage,) = map_storages([nbytes], folder)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert not tensor.any()
    return tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))


@pytest.fixture(params=["direct", "stale", "unseen", "cached"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; two where what goes past the page cache and a mapping are not the same; one without such a way."""

    def is_direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    if request.param == "stale":
        read = os.preadv

        def stale(fd: int, pieces: list[Any], at: int) -> int:
            count = read(fd, pieces, at)
            if is_direct(fd):
                memoryview(pieces[0]).cast("B")[:4] = b"old."
            return count

        monkeypatch.setattr(os, "preadv", stale)
    if request.param == "unseen":
        write = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, piece, at: len(piece) if is_direct(fd) else write(fd, piece, at))
    if request.param == "cached":
        monkeypatch.setattr("checkmate.host.files.ALIGNMENTS", ())
    return tmp_path


@pytest.mark.parametrize("nbytes", [(1 << 20) + 1, 3 << 20, (5 << 20) + BLOCK + 64])
def test_copies_of_a_step_agree_with_what_the_user_sees(nbytes: int, folder: Path) -> None:
    tensor, other = filled(nbytes, folder), filled(nbytes, folder)
    store = open_store(f"file:{folder}", 8 * BLOCK, CPU)
    # One that lies as PyTorch allocates it, and one at a page's begin.
    for n, here in enumerate([torch.UntypedStorage(nbytes), *map_storages([nbytes], folder)]):
        store.adopt(0, home_of(tensor))
        store.fetch(0, here)
        store.wait(0)
        landed = torch.empty(0, dtype=torch.uint8).set_(here)
        assert_same_bits(landed, tensor)
        landed += 1
        store.send(0, here)
        store.wait(0)
        assert_same_bits(tensor, landed)  # by the mapping
        store.reset()
        tensor.copy_(other).add_(n)  # the user goes on, and syncs nothing
    assert store.bytes_there == 0
    store.close()


def test_what_a_plan_must_not_do_with_a_home_is_refused(tmp_path: Path) -> None:
    tensor, small = filled(1 << 20, tmp_path), torch.UntypedStorage(8)
    store = open_store(f"file:{tmp_path}", BLOCK, CPU)
    store.adopt(0, home_of(tensor))
    for call, says in (
        (lambda: store.adopt(0, home_of(tensor)), "Value 0 is in .* already: it cannot be in .* too"),
        (lambda: store.drop(0), "Value 0 is at home in .* cannot be dropped"),
        (lambda: store.fetch(0, small), "Value 0 has 1.05 MB .* there, and 8 B here"),
        (lambda: store.send(0, small), "Value 0 has 1.05 MB .* there, and 8 B here"),
    ):
        with pytest.raises(HostError, match=says):
            call()
    store.send(1, torch.UntypedStorage(BLOCK))  # all of the capacity
    assert store.bytes_there == BLOCK
    store.close()


def failing(*args: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("end", ["wait", "reset", "close"])
def test_a_copy_home_that_fails_is_told(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = filled(1 << 20, tmp_path)
    store = open_store(f"file:{tmp_path}", BLOCK, CPU)
    store.adopt(0, home_of(tensor))
    says = r"The copy of 1.05 MB \(1_048_576 bytes\) to the file in .* failed: .*Input/output error. A tensor may"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        store.send(0, torch.UntypedStorage(1 << 20))
        if end == "close":
            store.close()
            assert re.search(says, caplog.text)
            return
        with pytest.raises(HostError, match=says):
            store.wait(0) if end == "wait" else store.reset()
    if end == "wait":
        with pytest.raises(HostError, match="Value 0 is not in"):
            store.fetch(0, torch.UntypedStorage(1 << 20))
    store.reset()
    store.adopt(0, home_of(tensor))  # and then all goes on
    store.send(0, torch.UntypedStorage(1 << 20).fill_(7))
    store.wait(0)
    assert bool((tensor == 7).all())
    store.close()


def test_copies_home_end_before_a_step_that_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued to go home goes there; a value without a home would be given up."""
    tensors = [filled(1 << 20, tmp_path) for _ in range(3)]
    store = open_store(f"file:{tmp_path}", 1 << 20, CPU)
    write = os.pwrite

    def slowly(fd: int, piece: Any, at: int) -> int:
        time.sleep(0.02)
        return write(fd, piece, at)

    monkeypatch.setattr(os, "pwrite", slowly)
    for key, tensor in enumerate(tensors):
        store.adopt(key, home_of(tensor))
        store.send(key, torch.UntypedStorage(1 << 20).fill_(key + 1))
    store.reset()
    assert [set(t.tolist()) for t in tensors] == [{1}, {2}, {3}]
    store.close()


def test_changes_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = filled(1 << 20, tmp_path)
    monkeypatch.setattr(homes, "_WRITE_AND_WAIT", 1 << 20)  # no such flag: the kernel refuses it
    with pytest.raises(HostError, match=r"Changes of 1.05 MB .* cannot be written to .*: Invalid argument. A ten"):
        home_of(tensor).let_go()


def resident(t: Tensor) -> int:
    """Bytes of a mapped tensor's pages in the page cache."""
    pages = (ctypes.c_ubyte * (t.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(t.nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_pages_are_let_go_of(folder: Path) -> None:
    """After `in_file`, before a step, and in its copies."""
    model = checkmate.in_file(nn.Linear(2 * WIDE, 2 * WIDE), folder)
    assert resident(model.weight) == 0
    assert float(model.weight.sum()) != 0
    model.weight.data.fill_(3)
    assert resident(model.weight) == model.weight.nbytes
    store = open_store(f"file:{folder}", BLOCK, CPU)
    store.adopt(0, home_of(model.weight))
    here = torch.UntypedStorage(model.weight.nbytes)
    for call in (store.fetch, store.send):
        call(0, here)
        store.wait(0)
        assert resident(model.weight) == 0
    store.close()
    assert bool((model.weight == 3).all())


FORKED = """
import os, sys, torch, checkmate
from checkmate.host import home_of
model = checkmate.in_file(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)), sys.argv[1])
kept = [m.weight.detach().clone() for m in model]
if (child := os.fork()) == 0:
    try:
        home_of(model[0].weight).let_go()
    except checkmate.errors.HostError as error:
        assert "from which this one was forked" in str(error)
        model[1].weight.data.add_(1)
        model[0].weight.data = torch.zeros(2, 2)  # of the child alone, with its mapping, and not with the bytes
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
home_of(model[0].weight).let_go()
print(torch.equal(model[0].weight, kept[0]), torch.equal(model[1].weight, kept[1] + 1), os.listdir(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_forked_process_shares_them_and_takes_nothing(tmp_path: Path) -> None:
    assert run_python("-c", FORKED, str(tmp_path)).stdout == "True True []\n"
    assert list(tmp_path.iterdir()) == []


def test_no_more_than_one_tensor_is_there_twice(tmp_path: Path) -> None:
    """Counted as PyTorch allocates: mapping allocates nothing, on meta and in memory."""
    for model in (
        _on_meta(lambda: nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4)))),
        nn.Linear(WIDE, 4 * WIDE),
    ):
        use = measure_peak(lambda: checkmate.in_file(model, tmp_path))  # noqa: B023
        assert use.peak <= 4 * 4 * WIDE  # of biases
