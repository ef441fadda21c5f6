"""Several runs on one page and in Markdown, and `interp report`."""

import dataclasses
import re

import pytest

import interp
from interp import cli
from interp.errors import InterpError
from interp.report import compare, markdown, render
from interp.text import load_text
from tests import tiny


@pytest.fixture(scope="module")
def runs(load):
    """Two heads runs of two models on the same text, and one of another analyzer."""
    made = []
    for family in ("gpt2", "llama"):
        model, _ = load(family)
        text = load_text(tiny.corpus(8), model, documents=6, context=24, bos=False)
        made.append(interp.heads(model, text, prune=True, step=0.5, progress=False))
    return [*made, interp.asymmetry(load("gpt2")[0], progress=False)]


def test_runs_of_one_analyzer_stand_side_by_side(runs):
    (table,) = compare.comparisons(runs)
    assert table.head == ("quantity", "gpt2", "llama")
    values = {row[0]: row[1:] for row in table.rows}
    keys = ("baseline_loss", "baseline_low", "baseline_high")
    losses = tuple(
        "{:.4f} [{:.4f}, {:.4f}]".format(*map(run.summary.get, keys)) for run in runs[:2]
    )
    assert values["loss before (nats per token)"] == losses
    at = values["heads that can go within 0.05 nats per token, best order"]
    for run, shown in zip(runs, at, strict=False):
        best = run.summary["best_order"]["0.05"]
        assert shown.startswith(f"{run.summary['prunable'][best]['0.05']:.0%} [")
    assert table.note == "Data and options are the same."
    assert not compare.comparisons(runs[1:])


def test_what_else_differs_is_said(runs):
    first = runs[0]
    other = dataclasses.replace(
        first,
        data={**first.data, "context": 99},
        config={**first.config, "step": 0.25},
        complete=False,
    )
    (table,) = compare.comparisons([first, other])
    assert "context, step, complete" in table.note
    assert table.head[1:] == ("gpt2 (1)", "gpt2 (2)")


def test_many_runs_are_bounded_with_a_notice(runs):
    (table,) = compare.comparisons([runs[0]] * 11)
    assert len(table.head) == 1 + compare.MOST
    assert "3 further runs are not in this table" in table.note


def test_a_page_of_several_runs_starts_with_what_they_say(runs):
    page = render(runs)
    start = page[page.index("<main>") : page.index('<section id="r0"')]
    assert "Headlines" in start and "side by side" in start
    for i in range(3):
        assert f'<a href="#r{i}">' in start
    assert page.count("plotly.js v") <= 1
    assert "Headlines" not in render(runs[:1])


def test_markdown_says_the_same_and_escapes_foreign_text(runs):
    hostile = "*x* <b>[a](http://b)</b> `c` | d\n# e"
    run = dataclasses.replace(runs[0], notices=[hostile], command="interp heads --model 'a```b'")
    text = markdown([run, runs[1]])
    assert "heads: gpt2" in text and "side by side" in text
    assert "Loss of the intact model" in text
    line = next(line for line in text.splitlines() if "http" in line)
    assert r"\*x\* \<b\>\[a\](http://b)\</b\> \`c\` \| d" in line and r"\# e" in line
    assert "````sh\ninterp heads --model 'a```b'\n````" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table[:5]} == {4}
    with pytest.raises(InterpError, match="at least one"):
        markdown([])


def test_the_command(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i, run in enumerate(runs):
        run.save(f"r{i}")
    assert cli.run(["report", "r0", "r1", "r2"]) == 0
    assert "3 runs in report.html" in capsys.readouterr().err
    assert "Headlines" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert cli.run(["report", "r0"]) == 2
    assert "report.html exists" in capsys.readouterr().err
    assert cli.run(["report", "r0", "--overwrite", "--out", "report.html"]) == 0
    assert cli.run(["report", "r0", "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("## heads: gpt2\n")
    for wrong, words in (
        (["report"], "at least one run folder"),
        (["report", "nowhere", "--out", "x.html"], "nowhere does not exist"),
        (["report", "r0", "--out", "."], "is a folder"),
        (["report", "r0", "--out", "no/x.html"], "does not exist"),
    ):
        assert cli.run(wrong) in (1, 2)
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err
