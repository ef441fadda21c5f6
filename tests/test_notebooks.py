"""The notebooks run from first cell to last, are small, and tell nothing of a machine."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="pip install -e '.[notebook]'")
pytest.importorskip("ipykernel", reason="pip install -e '.[notebook]'")

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from interp import assets
from interp.errors import InterpError
from notebooks import run
from tests.test_report import fake_heads

NAMES = ["00_start", "01_heads", "02_asymmetry", "03_ffn_keys", "04_superposition", "05_qkv"]
HERE = [NAMES[0], NAMES[1], NAMES[4]]
"""Run again by this file; the others by test_notebooks_more, in another process of pytest-xdist."""
LARGEST = 500_000


def stored(name: str) -> nbformat.NotebookNode:
    return nbformat.read(run.HERE / f"{name}.ipynb", as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def kinds(notebook: nbformat.NotebookNode) -> set[str]:
    return {kind for output in outputs(notebook) for kind in output.get("data", {})}


def test_there_is_one_for_every_question():
    assert run.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_whole_and_small(name):
    notebook = stored(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # All of it, in order, in one go: no cell was edited afterwards and left unrun.
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for o in outputs(notebook) if o.output_type == "error"]
    assert not [o for o in outputs(notebook) if o.get("name") == "stderr"]
    assert "application/vnd.plotly.v1+json" in kinds(notebook)
    assert (run.HERE / f"{name}.ipynb").stat().st_size < LARGEST
    assert notebook.cells[0].source.startswith("# ")
    assert notebook.cells[-1].cell_type == "markdown"


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_question_ends_with_what_was_and_was_not_shown(name):
    ending = stored(name).cells[-1].source
    assert "## What was shown" in ending
    assert "## What was not shown" in ending
    assert any("objection" in cell.source for cell in stored(name).cells)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_tells_of_the_machine_or_the_time(name):
    text = (run.HERE / f"{name}.ipynb").read_text(encoding="utf-8")
    found = [
        word
        for word in (socket.gethostname(), str(Path.home()), str(run.HERE.parent))
        if len(word) > 3 and word in text
    ]
    assert not found
    assert not re.search(r"(?<![\w.])/(tmp|home|root|usr|var|work|Users)/", text)
    assert not re.search(r"20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", text)
    assert not re.search(r"<script|plotly\.js v|cdn\.plot", text)
    assert not re.search(r"0x[0-9a-f]{8,}", text)  # an address of an object


@pytest.mark.embedded
@pytest.mark.parametrize("name", HERE)
def test_it_runs_again(name, tmp_path):
    runs_again(name, tmp_path)


def runs_again(name: str, tmp_path: Path) -> None:
    """It does, and shows the same sorts of things as what is kept."""
    try:
        for asset in assets.ASSETS:
            assets.fetch(asset)
    except InterpError as error:
        pytest.skip(f"the embedded model and text cannot be had here: {error}")
    notebook = run.executed(name, tmp_path)
    assert not list(tmp_path.iterdir())  # a reader's folder stays as it was
    for ours, kept in zip(notebook.cells, stored(name).cells, strict=True):
        assert ours.source == kept.source
        if ours.cell_type == "code":
            assert shown(ours) == shown(kept)


def shown(cell: nbformat.NotebookNode) -> list[tuple[str, ...]]:
    """What sorts of things a cell shows; the numbers in them may differ in their last digits."""
    return [(o.output_type, *sorted(o.get("data", {}))) for o in cell.outputs]


def executed(tmp_path: Path, *sources: str) -> list[nbformat.NotebookNode]:
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    return [o for cell in notebook.cells for o in cell.outputs]


def test_a_result_shows_tables_and_figures_in_a_notebook(tmp_path, monkeypatch):
    """A real kernel: plotly draws where IPython displays, and a figure is data to it."""
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
    made = fake_heads(3, 5, prune=False)
    made.save(tmp_path / "r")
    found = executed(
        tmp_path,
        "import interp\nresult = interp.load_result('r')\nresult",
        "result.figure('kl')",
        "result.tables['heads'].head(2)",
    )
    data = [output.data for output in found]
    assert ["text/html" in d for d in data] == [True, *[False] * 6, True]
    assert "<table" in data[0]["text/html"]
    figures = [d["application/vnd.plotly.v1+json"] for d in data[1:7]]
    assert len(figures) == len(made.figures) + 1
    titles = [figure["layout"]["meta"]["title"] for figure in figures]
    assert len(set(titles)) == len(made.figures)
    assert titles[-1] == titles[-2]  # kl is the last one of the result's own
    assert "dataframe" in data[7]["text/html"]
    assert len(json.dumps(data[0])) < 100_000
