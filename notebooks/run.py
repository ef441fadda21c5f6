"""Run the notebooks again and keep their outputs.

    python -m notebooks.run                 # all of them, in place
    python -m notebooks.run 01_heads        # one

Needs `pip install -e '.[notebook]'`. What a run leaves behind holds no time, no path and no name of
the machine, so that two runs of one machine differ only where numbers do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SECONDS = 900  # for one cell, on a busy machine
ENVIRONMENT = {
    # Figures as data only: with plotly.js in them every notebook would have 5 MB. Jupyter draws
    # them from that.
    "PLOTLY_RENDERER": "plotly_mimetype",
    # Progress bars are off; tqdm asks for widgets all the same, and names its own path.
    "PYTHONWARNINGS": "ignore:IProgress not found",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin slow a busy machine
}


def names() -> list[str]:
    """The notebooks, in their order."""
    return sorted(path.stem for path in HERE.glob("*.ipynb"))


def executed(name: str, folder: str | os.PathLike[str]) -> nbformat.NotebookNode:
    """One notebook, run from its first cell to its last in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # what a cell prints may come in two messages on a busy machine
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**os.environ, **ENVIRONMENT})
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(arguments: list[str]) -> None:
    """Run the notebooks named, or all."""
    import tempfile

    for name in arguments or names():
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(name, folder)
        nbformat.write(notebook, HERE / f"{name}.ipynb")
        print(f"{name}: {(HERE / f'{name}.ipynb').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
