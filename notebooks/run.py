"""Run notebooks and write them back with what they show: python notebooks/run.py [NAME ...].

Times at which cells ran are left out, as are the empty outputs that lines of progress leave, and pictures have few
colours, so that the files stay small.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from pathlib import Path

import nbformat
import numpy as np
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
ALIKE = 24  # steps of 256 in which colours may differ that are taken for one


def executed(path: Path, timeout: int = 900) -> nbformat.NotebookNode:
    """The notebook with fresh outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=timeout, record_timing=False, resources=resources)
    client.execute(env={**os.environ, "PYTHONPATH": str(path.parent.parent)})  # the checkmate of this checkout
    notebook.metadata.language_info = {"name": "python"}  # and not its version
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = without_progress(cell.outputs)
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    return notebook


def without_progress(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs without empty ones, and what was printed before and after such a one together."""
    left: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.get("data", {}).get("text/plain") == "":
            continue
        if left and output.output_type == "stream" == left[-1].output_type and output.name == left[-1].name:
            left[-1].text += output.text
        else:
            left.append(output)
    return left


def smaller(png: str) -> str:
    """A picture in base64 with fewer colours: of those that are alike the most frequent one."""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))
    colours, which, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    left = colours[np.argsort(-counts, kind="stable")].astype(int)
    palette: list[np.ndarray] = []
    while len(left) and len(palette) < 256:
        palette.append(left[0])
        left = left[np.abs(left - left[0]).max(axis=1) > ALIKE]
    nearest = [np.abs(colour - np.array(palette)).sum(axis=1).argmin() for colour in colours.astype(int)]
    picture = Image.fromarray(np.array(nearest, dtype=np.uint8)[which.reshape(-1)].reshape(pixels.shape[:2]))
    picture.putpalette(np.concatenate(palette).tolist())
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
