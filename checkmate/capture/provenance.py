"""Trace an op back to the user's code."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

FRAME = re.compile(r'File "([^"]+)", line (\d+)')  # in the text of a stack
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_ROOTS = re.compile(
    r"^(?:fn|__closure__\.\d+|cell_contents|__wrapped__|__func__|args\.\d+|__import_\w+|___unnamed_scope_\w+|self)(?:\.|$)"
)


def is_users(file: str) -> bool:
    """Tell whether a file is the user's code, not Python's, PyTorch's or checkmate's."""
    return not file.startswith(_LIBRARIES) and (not file.startswith(_PYTHON) or "-packages" in file)


def where(node: fx.Node) -> str:
    """The module of a node and the line of the user's code, if tracing kept them.

    For example ``layer1.0.conv2 (Conv2d, resnet.py:31)``, or ``In[3]:31`` for a line of a notebook's third cell.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = [*stack.values()][-1] if stack else ("", None)
    facts = [getattr(kind, "__name__", str(kind))] if kind is not None else []
    facts += [f"{source_name(file)}:{line}" for file, line in _users_frame(node.meta.get("stack_trace") or "")]
    name = module_path(path)
    if name and facts:
        return f"{name} ({', '.join(facts)})"
    return name or ", ".join(facts) or "generated code"


def named(node: fx.Node) -> str:
    """An op for a message: ``gelu_backward of net.1 (GELU, train.py:14)``."""
    return f"{node.name} of {where(node)}"


@lru_cache(maxsize=1024)  # the blocks of a network have all but the same stacks
def _users_frame(stack: str) -> list[tuple[str, str]]:
    """File and line of the innermost user frame in the text of a stack; empty if there is none."""
    return [frame for frame in FRAME.findall(stack) if is_users(frame[0])][-1:]


def source_name(file: str) -> str:
    """The name of a source file without folders; ``In[3]`` for a notebook cell."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    compiler: Any = getattr(ask() if ask else None, "compile", None)
    names = compiler.format_code_name(file) if hasattr(compiler, "format_code_name") else None  # ("Cell", "In[3]")
    return names[1] if names else file.rpartition(os.sep)[2]


@lru_cache(maxsize=4096)
def module_path(path: str) -> str:
    """``layer1.0``, as a person writes ``L['fn'].__closure__[0].cell_contents._modules['layer1'][0]``."""
    path = re.sub(r"\._(?:modules|parameters|buffers|orig_mod|compiled_mod)\b", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)
    path = re.sub(r"^[A-Z]\.", "", path)
    while _ROOTS.match(path):
        path = _ROOTS.sub("", path)
    return path


def input_names(module: fx.GraphModule) -> list[str]:
    """Readable names of tensors that Dynamo found outside a step: ``layer1.0.weight``, ``args.0``."""
    sources = {node: getattr(node, "_dynamo_source", None) for node in module.graph.find_nodes(op="placeholder")}
    return [readable(node.name if source is None else source.name) for node, source in sources.items()]


def readable(traced: str) -> str:
    """The readable name of what Dynamo calls ``L['self']._modules['layer1']``."""
    return module_path(traced) or re.sub(r"\W+", ".", traced).strip(".").removeprefix("L.")
