"""Marks of the tests, and the state of PyTorch that each begins with and leaves."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

_PATCHES = "checkmate.backends.compilation"  # imports all changes of PyTorch's tracing


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long the cases of long.txt, as slow those and the functions of slow.txt; begin with what takes minutes.

    Without a CUDA device what is marked ``cuda`` is skipped.

    ``-m "not slow"`` takes the place of the option that leaves out what is long.
    """
    listed = {name: {*Path(__file__).with_name(f"{name}.txt").read_text().splitlines()} for name in ("long", "slow")}
    for item in items:
        if item.nodeid in listed["long"]:
            item.add_marker("long")
        if item.get_closest_marker("long") or item.nodeid.partition("[")[0] in listed["slow"]:
            item.add_marker("slow")
        if item.get_closest_marker("cuda") and not sys.modules["torch"].cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("minutes") is None)


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make, and not each time among all that is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed each test, whichever ran before it. Tests without PyTorch do not load it for this."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _guards_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo times the guards of each capture for its log, with empty caches: a tenth of what a tiny one takes."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        monkeypatch.setattr(guards, "profile_guard_manager", lambda *args: 0.0, raising=False)


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    """Check that settings of all of PyTorch are as before the test, also where steps were refused in it."""
    torch = sys.modules.get("torch")
    patched = _PATCHES in sys.modules
    before = torch and _settings(torch, patched)
    yield
    assert torch is None or _settings(torch, patched) == before


def _settings(torch: Any, patched: bool) -> tuple[Any, ...]:
    """List settings of the process; of configurations only once ``patched``, as what is patched first may set some."""
    depth = torch.autocast_increment_nesting()  # a region that nobody leaves keeps weights as they were once converted
    torch.autocast_decrement_nesting()
    functorch, modules, dynamo = (
        torch._C._functorch,
        torch.nn.modules.module,
        sys.modules["torch._dynamo"] if patched else None,
    )
    return (
        functorch.maybe_current_level(),
        functorch.get_inplace_requires_grad_allowed(),
        _has_forward_level(torch),
        torch._C._is_fwd_grad_enabled(),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        [len(hooks) for name, hooks in vars(modules).items() if name.startswith("_global_") and hasattr(hooks, "keys")],
        dynamo and dynamo.config.get_config_copy(),
        dynamo and sys.modules["torch._functorch.config"].get_config_copy(),
        depth,
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


def _has_forward_level(torch: Any) -> bool:
    """Tell whether a level of forward mode is open, of which PyTorch allows one: Python's count misses some."""
    try:
        torch._C._exit_dual_level(level=torch._C._enter_dual_level())
    except RuntimeError:
        return True
    return False


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one thread, where bytes and numbers repeat exactly."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run a command line, which has to end with a code, and give what it prints to standard output and error."""
    from checkmate.cli.app import main

    def run(command: str, code: int = 0) -> tuple[str, str]:
        assert main(command.split()) == code
        out, err = capsys.readouterr()
        return out, err

    return run


@pytest.fixture
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` finds the backend by its name as in an installed version: by what `pyproject.toml` says."""
    import torch
    from torch._dynamo.backends import registry

    group = "torch_dynamo_backends"
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (target,) = re.findall(rf'^\[project.entry-points.{group}\]\ncheckmate = "(.+)"$', project, flags=re.MULTILINE)
    monkeypatch.setitem(registry._BACKENDS, "checkmate", EntryPoint("checkmate", target, group))
    registry._COMPILER_FNS.pop("checkmate", None)
    yield
    registry._COMPILER_FNS.pop("checkmate", None)
    torch._dynamo.reset()
