"""A run folder is whole or absent, strict JSON, and comes back as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from interp import results
from interp.errors import InterpError
from interp.results import Column, Result, check_folder, load_result


@pytest.fixture(autouse=True)
def quick_page(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The real page embeds plotly.js; these tests are about the folder."""
    module = types.ModuleType("quick_page")
    module.__dict__["render"] = lambda shown: f"<!doctype html><p>{shown[0].analyzer}"
    monkeypatch.setitem(sys.modules, "quick_page", module)
    monkeypatch.setattr(results, "REPORT_MODULE", "quick_page")
    return module


def make(**more: Any) -> Result:
    tables = {
        "items": pd.DataFrame(
            {
                "layer": np.array([0, 1, 2], dtype=np.int64),
                "small": np.array([1, 2, 3], dtype=np.int32),
                "score": [0.1, np.nan, -1e-300],
                "half": np.array([0.5, np.nan, 2], dtype=np.float32),
                "infinite": [np.inf, -np.inf, 0.0],
                "flag": [True, False, True],
                "token": ["a", None, "\u4e2d\u6587 \U0001f600 </script>"],
                "seed": pd.array([0, None, 2], dtype="Int64"),
                "ids": [[1, 2], [], [3]],
            }
        ),
        "empty": pd.DataFrame(
            {"layer": np.array([], dtype=np.int64), "score": np.array([], dtype=float)}
        ),
    }
    values: dict[str, Any] = {
        "analyzer": "items",
        "config": {"step": 0.1, "layers": (1, 2)},
        "model": {"name": "m \u4e2d", "n_layers": np.int64(3)},
        "data": {"documents": 2},
        "summary": {
            "loss": np.float32(0.5),
            "undefined": float("nan"),
            "nested": {"low": np.array([1.0, np.inf]), 0.05: True},
            "flag": np.bool_(True),
        },
        "tables": tables,
        "columns": {
            name: {column: Column("unit", f"What {column} is.") for column in table.columns}
            for name, table in tables.items()
        },
        "tensors": {
            "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
            "scalar": np.array(2.5),
            "mask": np.array([True, False]),
        },
        "notices": ["one", "zwei \u00fc"],
        "seed": 7,
        "seconds": 1.5,
        "complete": False,
        "command": "interp items",
        "summary_columns": {"loss": Column("nats per token", "Loss.")},
    }
    return Result(**(values | more))


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_result_comes_back_equal(tmp_path):
    made = make()
    assert made.save(tmp_path / "run") == tmp_path / "run"
    assert entries(tmp_path) == ["run"]
    assert entries(tmp_path / "run") == [
        "empty.parquet",
        "items.parquet",
        "report.html",
        "result.json",
        "tensors.safetensors",
    ]
    found = load_result(tmp_path / "run")
    for name in made.tables:
        pd.testing.assert_frame_equal(found.tables[name], made.tables[name])
    for name, value in made.tensors.items():
        assert found.tensors[name].dtype == value.dtype
        assert found.tensors[name].shape == value.shape
        assert np.array_equal(found.tensors[name], value)
    assert found.to_json() == made.to_json()
    for name in [
        "analyzer",
        "config",
        "model",
        "data",
        "summary",
        "columns",
        "notices",
        "environment",
        "seed",
        "started",
        "seconds",
        "complete",
        "command",
        "summary_columns",
    ]:
        assert getattr(found, name) == getattr(made, name), name
    found.save(tmp_path / "again")
    assert (tmp_path / "again/result.json").read_bytes() == (
        tmp_path / "run/result.json"
    ).read_bytes()


def test_result_json_has_the_documented_keys(tmp_path):
    make().save(tmp_path / "run")
    text = (tmp_path / "run/result.json").read_text(encoding="utf-8")
    raw = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))
    documented = (
        "schema_version analyzer complete config model data environment seed started seconds "
        "notices summary tables"
    )
    assert list(raw)[:13] == documented.split()
    assert set(raw) - set(documented.split()) == {"command", "files", "summary_columns", "tensors"}
    assert raw["schema_version"] == 1
    assert raw["tables"]["items"]["file"] == "items.parquet"
    assert raw["tables"]["items"]["rows"] == 3
    assert raw["tables"]["items"]["columns"]["score"] == {
        "unit": "unit",
        "description": "What score is.",
    }
    assert raw["tensors"]["turned"] == {
        "file": "tensors.safetensors",
        "shape": [3, 2],
        "dtype": "float32",
    }
    assert list(raw["environment"]) == [
        "interp",
        "torch",
        "transformers",
        "transformer_lens",
        "sae_lens",
        "numpy",
        "scipy",
        "tokenizers",
        "safetensors",
        "python",
        "platform",
    ]
    assert "\u4e2d" in text  # readable, not escaped


def test_numbers_are_json_numbers_in_memory_too():
    summary = make().summary
    assert summary == {
        "loss": 0.5,
        "undefined": None,
        "nested": {"low": [1.0, None], "0.05": True},
        "flag": True,
    }
    assert type(summary["loss"]) is float
    assert summary["flag"] is True
    json.dumps(make().to_json(), allow_nan=False)


def test_a_summary_changed_after_the_fact_is_still_strict(tmp_path):
    made = make()
    made.summary["late"] = np.float64("nan")
    made.save(tmp_path / "run")
    assert load_result(tmp_path / "run").summary["late"] is None


def test_undecodable_file_names_do_not_break_a_save(tmp_path):
    made = make(data={"source": "caf\udce9.txt"}, notices=["caf\udce9"])
    made.save(tmp_path / "run")
    assert load_result(tmp_path / "run").data["source"] == "caf\ufffd.txt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": {"items": {}, "empty": {}}}, "no unit and description for layer"),
        ({"columns": {}}, "no unit and description"),
        ({"summary_columns": {"loss": Column("", "x")}}, "needs a Column with a unit"),
        ({"summary": {"x": object()}}, "summary.x is a object"),
        ({"tensors": {"t": np.array(["a"])}}, "only numbers"),
        ({"tensors": {"t": np.array([None])}}, "only numbers"),
        ({"files": {"../up": b""}}, "cannot name a file"),
        ({"files": {"a/../../up": b""}}, "cannot name a file"),
        ({"files": {"result.json": b""}}, "cannot name a file"),
        ({"tables": {"../up": pd.DataFrame({"a": [1]})}}, "cannot name a table"),
        ({"tables": {"t": pd.DataFrame([[1, 2]], columns=["a", "a"])}}, "distinct strings"),
        ({"tables": {"t": pd.DataFrame({0: [1]})}}, "distinct strings"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(change, message):
    with pytest.raises(InterpError, match=message):
        make(**change)


def test_a_shuffled_table_keeps_its_order_and_a_named_index_its_values(tmp_path):
    table = pd.DataFrame({"a": [1, 2, 3]}).loc[[2, 0, 1]]
    columns = {"t": {"a": Column("u", "d"), "name": Column("u", "d")}}
    made = make(tables={"t": table}, columns=columns)
    made.save(tmp_path / "run")
    assert list(load_result(tmp_path / "run").tables["t"]["a"]) == [3, 1, 2]
    named = make(tables={"t": table.rename_axis("name")}, columns=columns)
    assert list(named.tables["t"]["name"]) == [2, 0, 1]


# Whole or absent ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")]
)
@pytest.mark.parametrize("step", ["_write_table", "_write_tensors", "move_into_place"])
def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, step, error):
    real = getattr(results, step)

    def fail(*args: Any) -> None:
        if step == "_write_table":
            real(*args)  # something is on disk already
        raise error

    monkeypatch.setattr(results, step, fail)
    expected = InterpError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        make().save(tmp_path / "run")
    assert entries(tmp_path) == []


def test_a_failed_overwrite_leaves_the_earlier_run(tmp_path, monkeypatch):
    make(seed=1).save(tmp_path / "run")
    real = os.rename

    def fail(source: Any, target: Any) -> None:
        if str(source).endswith(".partial"):
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(results.os, "rename", fail)
    with pytest.raises(InterpError, match="Input/output error"):
        make(seed=2).save(tmp_path / "run", overwrite=True)
    monkeypatch.undo()
    assert entries(tmp_path) == ["run"]
    assert load_result(tmp_path / "run").seed == 1


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path):
    make(seed=1).save(tmp_path / "run")
    with pytest.raises(InterpError, match="--overwrite"):
        make(seed=2).save(tmp_path / "run")
    assert load_result(tmp_path / "run").seed == 1
    make(seed=2, tables={}, tensors={}).save(tmp_path / "run", overwrite=True)
    assert load_result(tmp_path / "run").seed == 2
    assert entries(tmp_path) == ["run"]
    assert entries(tmp_path / "run") == [
        "report.html",
        "result.json",
    ]


def test_overwrite_never_takes_a_folder_that_is_no_run(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(InterpError, match="not a saved run"):
        make().save(home, overwrite=True)
    with pytest.raises(InterpError, match="not a folder"):
        make().save(home / "thesis.tex", overwrite=True)
    assert (home / "thesis.tex").read_text() == "years of work"


def test_leftovers_of_a_killed_save_do_not_join_the_next(tmp_path):
    partial = tmp_path / "run.partial"
    (partial / "checkpoint").mkdir(parents=True)
    (partial / "stale.parquet").write_text("old")
    make().save(tmp_path / "run")
    assert entries(tmp_path) == ["run"]
    assert "stale.parquet" not in entries(tmp_path / "run")
    assert "checkpoint" in entries(tmp_path / "run")


def test_files_of_other_formats(tmp_path):
    made = make(files={"sae/cfg.json": b"{}", "sae/deep/w": b"\x00\x01"})
    made.save(tmp_path / "run")
    found = load_result(tmp_path / "run")
    assert found.to_json() == made.to_json()
    assert (tmp_path / "run/sae/deep/w").read_bytes() == b"\x00\x01"
    found.save(tmp_path / "copy")  # of files that lie in another run
    assert (tmp_path / "copy/sae/cfg.json").read_bytes() == b"{}"
    found.save(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run/sae/cfg.json").read_bytes() == b"{}"
    (tmp_path / "copy/sae/cfg.json").write_bytes(b"{ }")
    with pytest.raises(InterpError, match=r"sae/cfg\.json is missing or has another size"):
        load_result(tmp_path / "copy")


def test_a_failure_keeps_a_checkpoint_that_was_there(tmp_path, monkeypatch):
    (tmp_path / "run.partial/checkpoint").mkdir(parents=True)
    monkeypatch.setattr(
        results, "_write_tensors", lambda *args: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(InterpError, match="full"):
        make().save(tmp_path / "run")
    assert entries(tmp_path / "run.partial") == ["checkpoint"]
    assert entries(tmp_path) == ["run.partial"]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, message in [
        (tmp_path / "file/run", "is a file"),
        (tmp_path / "file", "already exists"),
        (tmp_path, "already exists"),
        ("", "cannot name"),
        ("..", "cannot name"),
        (str(tmp_path / "a\0b"), "null"),
        (tmp_path / ("x" * 300), "too long"),
    ]:
        with pytest.raises(InterpError, match=message):
            check_folder(folder)
        with pytest.raises(InterpError, match=message):
            make().save(folder)
    assert entries(tmp_path) == ["file"]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InterpError, match="permission"):
        check_folder(tmp_path / "run")


def test_folders_with_spaces_parents_and_slashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make().save("deep/er/a run/")
    assert load_result("deep/er/a run/").seed == 7
    assert load_result(Path("deep/er/a run/result.json")).seed == 7


def test_a_page_that_cannot_be_drawn_does_not_cost_the_numbers(tmp_path, quick_page):
    def fail(shown: Any) -> str:
        raise RuntimeError("no figure today")

    quick_page.__dict__["render"] = fail
    with pytest.warns(UserWarning, match="no figure today"):
        make().save(tmp_path / "run")
    found = load_result(tmp_path / "run")
    assert len(found.tables["items"]) == 3
    assert "no figure today" in found.notices[-1]
    assert "could not be drawn" in (tmp_path / "run/report.html").read_text(encoding="utf-8")


# Loading ------------------------------------------------------------------------------------------


def edited(folder: Path, **changes: Any) -> Path:
    raw = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    raw |= changes
    (folder / "result.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(InterpError, match="does not exist"):
        load_result(tmp_path / "none")
    with pytest.raises(InterpError, match="not a run folder"):
        load_result(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InterpError, match="is a file"):
        load_result(tmp_path / "file")
    (tmp_path / "begun.partial").mkdir()
    with pytest.raises(InterpError, match="unfinished run"):
        load_result(tmp_path / "begun")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema_version": NaN}',
        "\xff\xfe",
        "[" * 100_000,
        "{}",
        '{"schema_version": "1"}',
        '{"schema_version": 1}',
    ],
)
def test_a_damaged_result_json(tmp_path, text):
    (tmp_path / "result.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InterpError, match=r"damaged|no saved run"):
        load_result(tmp_path)


def test_damaged_and_newer_runs(tmp_path):
    def fresh(name: str) -> Path:
        return make().save(tmp_path / name)

    with pytest.raises(InterpError, match=r"schema_version 2.*Upgrade"):
        load_result(edited(fresh("newer"), schema_version=2))
    with pytest.raises(InterpError, match="expected form"):
        load_result(edited(fresh("form"), tables={"items": 3}))
    with pytest.raises(InterpError, match="not a file of the run"):
        load_result(
            edited(
                fresh("escape"),
                tables={"items": {"file": "../x.parquet", "rows": 1, "columns": {}}},
            )
        )
    folder = fresh("missing")
    (folder / "items.parquet").unlink()
    with pytest.raises(InterpError, match=r"items.parquet is missing"):
        load_result(folder)
    folder = fresh("cut")
    (folder / "items.parquet").write_bytes((folder / "items.parquet").read_bytes()[:100])
    with pytest.raises(InterpError, match="cannot be read"):
        load_result(folder)
    folder = fresh("swapped")
    pd.DataFrame({"layer": [1]}).to_parquet(folder / "items.parquet")
    with pytest.raises(InterpError, match="does not match"):
        load_result(folder)
    folder = fresh("tensors")
    (folder / "tensors.safetensors").write_bytes(b"short")
    with pytest.raises(InterpError, match="cannot be read"):
        load_result(folder)
    (folder / "tensors.safetensors").unlink()
    with pytest.raises(InterpError, match=r"tensors.safetensors is missing"):
        load_result(folder)


def test_a_run_without_the_later_additions_still_loads(tmp_path):
    folder = make(tensors={}).save(tmp_path / "run")
    raw = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    for key in ("command", "summary_columns", "tensors"):
        del raw[key]
    (folder / "result.json").write_text(json.dumps(raw | {"from_the_future": 1}), encoding="utf-8")
    found = load_result(folder)
    assert found.command is None
    assert found.summary_columns == {}
    assert found.seed == 7


def test_importing_results_brings_no_heavy_library():
    code = (
        "import sys, interp.results, interp.report\n"
        "print([m for m in ('torch', 'plotly', 'rich', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
