"""Frames of the user's own code are told from others; module paths are written as people write them."""

from __future__ import annotations

import pytest
import torch

import checkmate
from checkmate.capture.provenance import is_users, module_path, source_name


def test_a_users_folder_may_have_any_name() -> None:
    """A checkout in a folder named checkmate once hid every line of the user's code."""
    own = checkmate.__path__[0]
    for file in ("/home/ann/checkmate/train.py", "/home/ann/torch/train.py", "train.py", f"{own}_x/a.py"):
        assert is_users(file)
    for file in (torch.nn.functional.__file__, f"{own}/compiler.py"):
        assert not is_users(file)


def test_a_cell_of_a_notebook_is_called_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's name for its file is a number that says nothing to a person: once 3371390298.py:24."""
    shells = pytest.importorskip("IPython.core.interactiveshell")
    shell = shells.InteractiveShell()
    name = shell.compile.cache("1 + 1", 3)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert source_name(name) == "In[3]"
    assert source_name("/home/ann/resnet.py") == "resnet.py"
    monkeypatch.setattr("IPython.get_ipython", lambda: None)  # imported, but not running
    assert source_name("/home/ann/resnet.py") == "resnet.py"


@pytest.mark.parametrize(
    ("traced", "read"),
    [
        ("L['fn'].__closure__[0].cell_contents._modules['layer1'][0]", "layer1.0"),
        ("L['fn'].__closure__[0].cell_contents._modules['layer1'][0].conv", "layer1.0.conv"),
        ("L['args'][0]._modules['2']", "2"),
        ("L['fn']", ""),
        ("L['self']", ""),
        ("L['self']._modules['head']", "head"),
        ("L['self'].encoder._orig_mod.layer[3]", "encoder.layer.3"),
        ("G['__import_train_dot_main'].model.head", "model.head"),
        ("G['net']._modules['1']._buffers['running_mean']", "net.1.running_mean"),
        ("G['___unnamed_scope_139872976024000_c5']._modules['3']", "3"),
        ("", ""),
    ],
)
def test_module_paths_as_people_write_them(traced: str, read: str) -> None:
    assert module_path(traced).strip(".") == read
