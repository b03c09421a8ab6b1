"""How Sphinx makes the pages: `make docs`.

Notebooks are rendered with what they show, and run nowhere here. The page of a plan is made anew of a small step.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from torch import Tensor, nn

import checkmate

project = "checkmate"
release = version = checkmate.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "exclude-members": "__init__"}
default_role = "py:obj"  # `solve` in a docstring is a link
html_theme = "furo"
html_title = "checkmate"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"  # drawn by the browser: no script, no network
HERE = Path(__file__).parent
MADE = HERE / "made"  # copies of what is pages, too, though it lies elsewhere in the repository
TAG = re.compile(r"\\tag\{([^}]*)\}")  # of a formula
COPIED = {"notebooks": ("*.ipynb",), "benchmarks/results": ("*.md", "*.png", "peers/*.png"), ".": ("CONTRIBUTING.md",)}


class Reader(nn.Module):
    """Tokens in, the loss of each next token out: a transformer of two layers."""

    def __init__(self, words: int = 512, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy."""
        logits = self.head(self.layers(self.embed(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def write_plan(app: Any, failure: Exception | None) -> None:
    """Write the page that `look.md` shows: a step planned within half of the bytes of the plain one."""
    if failure is None and app.builder.format == "html":
        logging.getLogger("checkmate").setLevel(logging.WARNING)
        torch.manual_seed(0)
        problem = checkmate.trace(Reader(), torch.randint(512, (16, 65)), profile="roofline:h100")
        solution = checkmate.solve(problem, problem.keep_all_peak // 2, time_limit=5, progress=False)
        checkmate.report(solution, Path(app.outdir) / "_static" / "plan.html")


def copy_pages(app: Any, config: Any) -> None:
    """Copy what is beside this folder to within it, where Sphinx looks for pages."""
    for folder, patterns in COPIED.items():
        for path in (path for pattern in patterns for path in (HERE.parent / folder).glob(pattern)):
            copy = MADE / folder / path.relative_to(HERE.parent / folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists() or copy.read_bytes() != path.read_bytes():
                copy.write_bytes(path.read_bytes())


def follow_links(app: Any, page: str, text: list[str]) -> None:
    """Let links that lead somewhere in the repository lead to the copies."""
    if page.startswith("made/"):
        text[0] = text[0].replace("](../docs/", "](../../")
    else:
        for folder in COPIED:
            text[0] = text[0].replace(f"](../{folder}/", f"](made/{folder}/")


def write_math(writer: Any, node: Any) -> None:
    """Write a formula as MathML, with its tag at the right."""
    tex, is_block = node.astext(), isinstance(node, nodes.math_block)
    formula = tex2mathml(TAG.sub("", tex), as_block=is_block)
    tags = "".join(f'<span class="eqno">({tag})</span>' for tag in TAG.findall(tex))
    writer.body.append(
        f'<div class="math-wrapper"><div class="math">{formula}{tags}</div></div>' if is_block else formula
    )
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """What Sphinx calls."""
    app.add_html_math_renderer("mathml", inline_renderers=(write_math, None), block_renderers=(write_math, None))
    app.connect("config-inited", copy_pages)
    app.connect("source-read", follow_links)
    app.connect("build-finished", write_plan)
