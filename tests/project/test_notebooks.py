"""Every notebook runs from its first cell to its last, and stands in the repository with what it shows."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

from notebooks.run import executed, smaller, without_progress

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = ["inside_the_milp", "largest_batch", "plan_for_a_gpu_from_a_laptop", "quickstart"]
LARGEST = 400_000  # bytes of a file: web pages show no larger ones
PLACES = re.compile(r"/(?:home|Users|root|tmp|work|opt|usr|var)/|[A-Z]:\\\\|site-packages|ipykernel_\d")


def test_the_notebooks_are_there_and_the_readme_leads_to_them() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES
    readme = (FOLDER.parent / "README.md").read_text()
    assert all(f"notebooks/{name}.ipynb" in readme for name in NAMES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_is_committed(path: Path) -> None:
    """No error stands there, and no place of a machine; its links lead somewhere."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run notebooks/run.py"
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert sum(output.output_type == "stream" for output in outputs) >= 2
    assert path.stat().st_size < LARGEST
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert output.get("data", {}).get("text/plain") != "", "a line of progress was here"
        data = (text for kind, text in output.get("data", {}).items() if "png" not in kind)
        for text in (output.get("text", ""), *data):
            assert "Traceback" not in text
            assert not PLACES.search(text), text
    assert not any(PLACES.search(cell.source) for cell in notebook.cells)
    words = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#]+)\)", words):
        assert (FOLDER / link).exists(), link


def test_a_line_shows_what_goes_on_in_a_kernel_and_nothing_of_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel without widgets has an output that is written over, and empty in the end."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    work = """
import time
from checkmate import statusline
print("before")
for quiet in (0.0, 600.0):
    statusline.QUIET_SECONDS = quiet
    with statusline.showing(lambda: "looking at <b>", share=lambda: 0.5):
        begin = time.monotonic()
        while statusline._line.parts and time.monotonic() < begin + 0.5:
            time.sleep(0.05)
print("after")
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(work)])
    lines: list[str] = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                lines.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=120).execute()
    assert lines[0] == lines[-1] == ""
    assert set(lines[1:-1]) == {"checkmate |████    | looking at <b>"}
    (cell,) = notebook.cells
    assert [output.output_type for output in cell.outputs] == ["stream", "display_data", "stream"]
    (left,) = without_progress(cell.outputs)
    assert (left.name, left.text) == ("stdout", "before\nafter\n")


def test_a_picture_keeps_the_hues_of_its_areas() -> None:
    """A palette by frequency alone once turned thin green lines blue, and a grey area greenish."""
    pixels = np.random.default_rng(0).integers(120, 136, (60, 60, 3), dtype=np.uint8)  # greys that are alike
    pixels[:40] = (127, 127, 127)
    pixels[0, :5] = (0, 158, 115)
    raw = io.BytesIO()
    Image.fromarray(pixels).save(raw, "PNG")
    small = base64.b64decode(smaller(base64.b64encode(raw.getvalue()).decode()))
    again = np.asarray(Image.open(io.BytesIO(small)).convert("RGB"))
    assert (again[0, :5] == (0, 158, 115)).all()
    assert (again[1:] == (127, 127, 127)).all()
    assert len(small) < len(raw.getvalue()) / 10


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    committed, fresh = nbformat.read(path, as_version=4), executed(path)
    assert [cell.source for cell in fresh.cells] == [cell.source for cell in committed.cells]

    def kinds(notebook: nbformat.NotebookNode) -> list[set[str]]:
        """Whether each cell writes, and whether it draws."""
        outputs = (cell.get("outputs", ()) for cell in notebook.cells)
        return [{"picture" if "data" in output else "text" for output in of_cell} for of_cell in outputs]

    assert kinds(fresh) == kinds(committed)
    for shown, again in zip(_largest_sizes(committed), _largest_sizes(fresh), strict=True):
        assert shown >= 0.8 * again, "the committed figures are of a busy machine: run notebooks/run.py on an idle one"


def _largest_sizes(notebook: nbformat.NotebookNode) -> list[int]:
    """The answers of `max_batch_size`, each printed on the first line of a table."""
    text = "\n".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    return [int(size) for size in re.findall(r"^largest size within .*: (\d+)$", text, re.MULTILINE)]
