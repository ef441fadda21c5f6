"""The other notebooks, from first cell to last, in a process of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("nbclient", reason="pip install -e '.[notebook]'")
pytest.importorskip("ipykernel", reason="pip install -e '.[notebook]'")

from tests.test_notebooks import HERE, NAMES, runs_again


@pytest.mark.embedded
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HERE])
def test_it_runs_again(name, tmp_path):
    runs_again(name, tmp_path)
