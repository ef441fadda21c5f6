"""The command line: statuses, streams, files, and what it says when something is wrong."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from interp import cli, results, splice
from interp.results import load_result
from tests import tiny

ROOT = Path(__file__).parent.parent
FAST = {"--documents": "4", "--context": "24"}


@pytest.fixture
def where(checkpoint, tmp_path, monkeypatch):
    """A working folder with a text file; returns (checkpoint folder, text file)."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "some text.txt"
    text.write_text("\n\n".join(tiny.corpus(8)))
    return str(checkpoint("gpt2")), str(text)


@pytest.fixture
def heads(where, capsys):
    """Run `interp heads` on the tiny model and text: (status, stdout, stderr)."""

    def call(*arguments, model=None, data=None):
        model, data = model or where[0], data or where[1]
        status = cli.run(["heads", "--model", model, "--data", data, *fast(arguments), *arguments])
        return status, *capsys.readouterr()

    return call


def fast(arguments=()):
    """Options that keep a run short, but for those that are given."""
    words = [word for o, v in FAST.items() if o not in arguments for word in (o, v)]
    return [*words, "--no-progress"]


def run(*arguments):
    return cli.run(list(arguments))


def test_end_to_end(heads):
    status, out, err = heads("--out", "runs/first", "--prune")
    assert status == 0
    assert "heads | gpt2 | 4 documents" in " ".join(out.split())
    assert "interp: saved in runs/first" in err
    result = load_result("runs/first")
    assert set(result.tables) >= {"heads", "prune"}
    assert len(result.tables["heads"]) == 12
    assert result.complete
    assert result.data["documents"] == 4
    assert result.data["context"] == 24
    assert os.path.getsize("runs/first/report.html") > 1000


def test_one_json_object_and_nothing_else(heads):
    status, out, err = heads("--out", "r", "--format", "json")
    assert status == 0
    printed = json.loads(out)
    assert out.count("\n") == 1
    assert printed == json.loads(Path("r/result.json").read_text())
    assert printed["analyzer"] == "heads"
    assert "saved in r" in err


def test_no_json_where_there_is_no_result(heads):
    status, out, err = heads("--format", "json", model="gtp2")
    assert (status, out) == (1, "")
    assert "Did you mean 'gpt2'" in err


def test_default_run_folder(heads):
    assert heads()[0] == 0
    assert heads()[0] == 0
    first, second = sorted(os.listdir("runs"))
    assert first.startswith("heads-gpt2-")
    assert second.startswith("heads-gpt2-")
    assert load_result(f"runs/{first}").summary == load_result(f"runs/{second}").summary


def test_overwrite(heads):
    assert heads("--out", "r")[0] == 0
    status, out, err = heads("--out", "r")
    assert (status, out) == (1, "")
    assert "already exists" in err
    assert "--overwrite" in err
    assert heads("--out", "r", "--overwrite", "--seed", "3")[0] == 0
    assert load_result("r").seed == 3


def test_a_folder_that_cannot_be_is_told_before_the_work(heads, where, monkeypatch, tmp_path):
    from interp import model

    monkeypatch.setattr(model, "load_model", lambda *_a, **_k: pytest.fail("the work began"))
    os.mkdir("full")
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for out, words in (("full", "already exists"), ("file/r", "is a file"), ("..", "cannot name")):
        status, stdout, err = heads("--out", out)
        assert (status, stdout) == (1, "")
        assert words in err
    assert "not a saved run" in heads("--out", "full", "--overwrite")[2]
    if os.geteuid():  # root may write anywhere
        os.mkdir("locked", 0o500)
        assert "no permission" in heads("--out", "locked/r")[2]
    (tmp_path / "runs").write_text("in the way of the default folder")
    assert "is a file" in heads()[2]


def test_numbers_that_cannot_be_saved_are_shown(heads, monkeypatch):
    from interp.errors import InterpError
    from interp.results import Result

    def full(*_args, **_more):
        raise InterpError("cannot write r: no space left.")

    monkeypatch.setattr(Result, "save", full)
    status, out, err = heads("--out", "r")
    assert status == 1
    assert "12 heads" in out or "heads | gpt2" in out
    assert "no space left" in err
    assert "saved in" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "0"], "--step must be above 0 and at most 1; it is 0.0"),
        (["--step", "nan"], "--step must be above 0"),
        (["--step", "x"], "--step"),
        (["--documents", "0"], "--documents must be 1 or more"),
        (["--context", "1"], "--context must be 2 or more"),
        (["--min-tokens", "1"], "--min-tokens must be 2 or more"),
        (["--rows", "-1"], "--rows must be 0 or more"),
        (["--seed", "-1"], "--seed must be 0 or more"),
        (["--batch-size", "0"], "--batch-size must be 1 or more"),
        (["--batch-size", "some"], "--batch-size"),
        (["--unit", "layer"], '"head", "kv"'),
        (["--format", "xml"], '"table", "json"'),
        (["--dtype", "int8"], "float16"),
        (["--prun"], "Did you mean --prune"),
        (["--no-prune"], "--no-prune"),
        (["--model"], "--model"),
        (["surplus"], "surplus"),
    ],
)
def test_wrong_usage(capsys, arguments, words):
    assert run("heads", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("interp: ")
    assert len(err.splitlines()) <= 2


def test_wrong_commands(capsys):
    assert run("haeds") == 2
    assert 'Did you mean "heads"' in capsys.readouterr().err
    assert run("assets", "remove") == 2
    assert run() == 0
    assert "Usage: interp COMMAND" in capsys.readouterr().out
    assert run("--version") == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "no-such-model-at-all"}, "There is no model"),
        ({"model": "some/model", "more": ["--offline"]}, "--offline"),
        ({"more": ["--revision", "step1"]}, "no revisions"),
        ({"data": "missing.txt"}, "missing.txt"),
        ({"data": "empty.txt"}, "empty.txt"),
        ({"more": ["--context", "65"]}, "context 65"),
        ({"more": ["--device", "cuda:99"]}, "cuda:99"),
        ({"more": ["--text-column", "body"], "data": "t.csv"}, "body"),
    ],
)
def test_failures_are_told_in_a_line_or_two(heads, change, words):
    Path("empty.txt").write_text("\n\n \n")
    Path("t.csv").write_text("text,n\na lamp,1\n")
    change = dict(change)
    more = change.pop("more", [])
    for debug in ([], ["--debug"]):
        status, out, err = heads(*more, *debug, **change)
        assert (status, out) == (1, "")
        assert words in err
        assert ("Traceback" in err) == bool(debug)
        assert len(err.splitlines()) <= 2 or debug
        assert err.splitlines()[-1].startswith("interp: ")


WRONG_DATA = {  # name -> (contents, options, what is said)
    "empty.txt": (b"", [], "is empty"),
    "blank.txt": (b"\n \n\n\t\n", [], "is empty"),
    "latin1.txt": (b"caf\xe9", [], "not UTF-8"),
    "utf16.txt": ("a lamp".encode("utf-16-le"), [], "begins with NUL characters"),
    "broken.jsonl": (b'{"text": "a lamp"}\n{"text": ', [], "line 2: not valid JSON"),
    "list.jsonl": (b"[1, 2]\n", [], "expected a JSON object"),
    "number.jsonl": (b'{"text": 3}\n', [], "holds no text"),
    "blank.jsonl": (b'{"text": " "}\n{"text": null}\n', [], "all 2 are blank in column 'text'"),
    "two.csv": (b"a,b\nx,y\n", [], "which one holds the documents is unclear"),
    "column.csv": (b"text,n\na lamp,1\n", ["--text-column", "txt"], "Did you mean 'text'"),
    "numbers.csv": (b"a,b\n1,2\n", [], "has no column 'text'"),
    "quote.csv": (b'text\n"a lamp\n', [], "malformed CSV"),
    "tabs.csv": (b"text\tn\na lamp\t1\n", [], "seems separated"),
    "broken.parquet": (b"PAR1 and nothing else", [], "not a readable parquet file"),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_wrong_data_is_told_before_the_model_loads(heads, monkeypatch, name):
    from interp import model

    monkeypatch.setattr(model, "load_model", lambda *_a, **_k: pytest.fail("the model loads"))
    contents, more, words = WRONG_DATA[name]
    Path(name).write_bytes(contents)
    status, out, err = heads(*more, data=name)
    assert (status, out) == (1, "")
    assert words in err
    assert len(err.splitlines()) == 1
    os.mkdir("folder")  # and of a folder of several, whichever of them it is
    Path("folder", "a.jsonl").write_text('{"text": "a lamp"}\n')
    Path("folder", name).write_bytes(contents)
    if words in ("is empty", "all 2 are blank in column 'text'"):
        return  # the other file is enough
    assert words in heads(*more, data="folder")[2]


@pytest.mark.parametrize(
    "command",
    [["heads"], ["asymmetry", "--activations"], ["ffn-keys"], ["qkv"], ["superposition"]],
    ids=lambda words: words[0],
)
def test_wrong_data_is_told_before_the_model_loads_by_every_command(
    where, capsys, monkeypatch, command
):
    from interp import model

    monkeypatch.setattr(model, "load_model", lambda *_a, **_k: pytest.fail("the model loads"))
    Path("two.csv").write_text("a,b\nx,y\n")
    assert run(*command, "--model", where[0], "--data", "two.csv") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Name one with --text-column" in err


def test_options_of_a_text_that_is_not_read_are_told(where, capsys):
    assert run("asymmetry", "--model", where[0], "--data", "news", "--documents", "4") == 0
    assert "No text is read for this" in capsys.readouterr().err
    assert run("asymmetry", "--model", where[0]) == 0
    assert "No text is read" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ffn-keys", "--layer", "-1"], "--layer must be 0 or more, or all; it is -1."),
        (
            ["ffn-keys", "--layer", "0", "--layer", "-2"],
            "--layer must be 0 or more, or all; it is -2.",
        ),
        (["ffn-keys", "--layer", "3", "--layer", "3"], "--layer 3 is given more than once;"),
        (["ffn-keys", "--layer", "3", "--layer", "all"], "--layer all is every layer:"),
        (["ffn-keys", "--key", "-7"], "--key must be 0 or more; it is -7."),
        (["ffn-keys", "--key", "7", "--key", "7"], "--key 7 is given more than once;"),
        (["superposition", "--width", "8", "--width", "0"], "--width must be 1 or more; it is 0."),
        (["superposition", "--width", "4", "--width", "4"], "--width 4 is given more than once;"),
        (["asymmetry", "--model", "m", "--model", "m"], "--model m is given more than once;"),
        (
            ["asymmetry", "--revision", "a", "--revision", "a"],
            "--revision a is given more than once;",
        ),
    ],
)
def test_an_option_of_several_values_names_the_wrong_one(capsys, arguments, said):
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"interp: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ffn-keys", "--layer", "2nd"], "--layer must be a whole number or all; it is '2nd'."),
        (["heads", "--documents", "2.5"], "--documents must be a whole number; it is '2.5'."),
        (["ffn-keys", "--layer", "2.5"], "--layer must be a whole number; it is '2.5'."),
        (["ffn-keys", "--key", "x"], "--key must be a whole number; it is 'x'."),
        (["superposition", "--width", "wide"], "--width must be a whole number; it is 'wide'."),
        (["heads", "--step", "some"], "--step must be a number; it is 'some'."),
        (["heads", "--batch-size", "many"], "--batch-size must be a whole number or auto; it is"),
    ],
)
def test_a_value_of_another_kind_is_told_in_words(capsys, arguments, said):
    assert run(*arguments) == 2
    assert capsys.readouterr().err.startswith(f"interp: {said}")


def test_several_values_of_a_library_call():
    from interp.config import FfnKeysConfig, ModelsOptions
    from interp.errors import UsageError

    for make, said in (
        (
            lambda: FfnKeysConfig(layer=(1, "some")),
            "--layer must be a whole number or all; it is 'some'.",
        ),
        (lambda: FfnKeysConfig(key=(1.5,)), "--key must be a whole number; it is 1.5."),
        (
            lambda: FfnKeysConfig(layer=3),
            "--layer must be a tuple, each part a whole number or all",
        ),
        (lambda: ModelsOptions(model=("m", 3)), "--model must be text; it is 3."),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("documents", "freedom"), [("2", "1 degree of freedom"), ("7", "6 degrees")]
)
def test_few_documents_are_told_once(heads, documents, freedom):
    status, out, err = heads("--documents", documents, "--out", "r")
    assert status == 0
    (notice,) = [n for n in load_result("r").notices if "95% intervals over them" in n]
    assert notice.startswith(f"Only {documents} documents")
    assert freedom in notice
    assert (out + err).count(notice) == 1
    assert err.index(notice) < err.index("saved in")


def test_eight_documents_are_not_few(heads):
    assert heads("--documents", "8", "--out", "r")[0] == 0
    assert not [n for n in load_result("r").notices if "intervals" in n]


@pytest.mark.parametrize(
    "command",
    [
        ["asymmetry", "--activations"],
        ["ffn-keys", "--layer", "1", "--mutation-keys", "0"],
        ["qkv", "--each", "none", "--fit-documents", "2"],
        ["superposition", "--width", "1", "--k", "2", "--train-tokens", "200", "--no-concepts"],
    ],
    ids=lambda words: words[0],
)
def test_few_documents_are_told_by_every_command(where, command):
    shown = ["--model", where[0], "--data", where[1], *fast(), "--out", "r"]
    assert run(*command, *shown) == 0
    assert sum("Only 4 documents" in n for n in load_result("r").notices) == 1


def test_an_unforeseen_error(heads, monkeypatch):
    def fail(*_args, **_more):
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr(splice, "run_edited", fail)
    status, out, err = heads("--prune", "--step", "1")
    assert (status, out) == (1, "")
    assert "unexpected ZeroDivisionError: first second" in err
    assert "--debug shows where" in err
    assert "Traceback" not in err
    status, out, err = heads("--prune", "--step", "1", "--debug")
    assert status == 1
    assert "Traceback" in err


def test_interrupted_in_the_middle(heads, monkeypatch):
    edited, calls = splice.run_edited, []

    def interrupt(*args, **more):
        calls.append(1)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return edited(*args, **more)

    monkeypatch.setattr(splice, "run_edited", interrupt)
    status, out, err = heads("--exact", "--out", "r")
    assert status == 130
    assert "Traceback" not in err
    assert "INTERRUPTED" in out
    # Once on each stream: either may be all that is kept.
    assert out.lower().count("interrupted") == 1
    assert err.lower().count("interrupted") == 1
    last = err.splitlines()[-1]
    assert last.startswith("interp: interrupted; what was measured is saved in r (open r/report")
    assert last.endswith("; the same command with --resume --out r goes on from there.")
    result = load_result("r")
    assert not result.complete
    assert json.loads(Path("r/result.json").read_text())["complete"] is False
    assert len(result.tables["heads"]) == 12
    assert not os.path.exists("r.partial")


def test_interrupted_at_once(heads, monkeypatch):
    from interp.analyzers.heads import importance

    def interrupt(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(importance, "gradients", interrupt)
    status, out, err = heads("--out", "r")
    assert (status, out) == (130, "")
    assert "interrupted" in err
    assert not os.path.exists("r")


def raises(*_args, **_more):
    raise KeyboardInterrupt


def terminate(*_args, **_more):
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        pytest.fail("SIGTERM would end the tests")
    signal.raise_signal(signal.SIGTERM)


def after(calls, function, act):
    """The function, which acts instead from a number of calls on."""
    made = []

    def wrapped(*args, **more):
        made.append(1)
        return (act if len(made) > calls else function)(*args, **more)

    return wrapped


@pytest.mark.parametrize("overwrite", [False, True])
def test_interrupted_again_while_saving(heads, monkeypatch, overwrite):
    if overwrite:
        assert heads("--out", "r")[0] == 0
    monkeypatch.setattr(splice, "run_edited", after(5, splice.run_edited, raises))
    monkeypatch.setattr(results, "_write_table", raises)
    more = ["--overwrite"] if overwrite else []
    status, out, err = heads("--exact", "--out", "r", *more)
    assert (status, out) == (130, "")  # stopped there and then
    assert "Traceback" not in err
    assert os.listdir("r.partial") == [results.PROGRESS]
    last = err.splitlines()[-1]
    go_on = "; the same command with --resume --out r goes on from there."
    if overwrite:
        what = "nothing of this run was saved, r still holds the earlier one"
        assert last == f"interp: interrupted; {what}{go_on}"
        assert load_result("r").complete
    else:
        assert last == f"interp: interrupted; nothing was saved{go_on}"
        assert not os.path.exists("r")


@pytest.mark.parametrize("when", ["saved", "shown"])
@pytest.mark.parametrize("complete", [True, False])
def test_interrupted_when_all_is_on_disk(heads, monkeypatch, when, complete):
    from interp import report

    if when == "shown":
        monkeypatch.setattr(report, "print_result", raises)
    else:
        real = results.Result.save
        monkeypatch.setattr(results.Result, "save", lambda *a, **m: raises(real(*a, **m)))
    if not complete:
        monkeypatch.setattr(splice, "run_edited", after(5, splice.run_edited, raises))
    status, out, err = heads("--exact", "--out", "r")
    assert (status, out) == (130, "")
    what = "the run is saved in r." if complete else "what was measured is saved in r; the same "
    assert err.splitlines()[-1].startswith(f"interp: interrupted; {what}")
    assert (Path("r") / results.PROGRESS).exists() is not complete
    assert load_result("r").complete is complete


def test_sigterm_saves_what_was_measured(heads, monkeypatch):
    monkeypatch.setattr(splice, "run_edited", after(5, splice.run_edited, terminate))
    status, out, err = heads("--exact", "--out", "r")
    assert status == 143
    assert "INTERRUPTED" in out
    assert "saved in r" in err
    assert "Traceback" not in err
    assert not load_result("r").complete
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_at_once_and_again(heads, monkeypatch):
    from interp.analyzers.heads import importance

    with monkeypatch.context() as patch:
        patch.setattr(importance, "gradients", terminate)
        status, out, err = heads("--out", "r")
    assert (status, out) == (143, "")
    assert err.splitlines()[-1] == "interp: interrupted; nothing was saved."
    monkeypatch.setattr(cli, "ONE_SIGNAL_SECONDS", 0)
    monkeypatch.setattr(splice, "run_edited", after(5, splice.run_edited, terminate))
    monkeypatch.setattr(results, "_write_table", terminate)
    status, out, err = heads("--exact", "--out", "r")
    assert (status, out) == (143, "")
    assert "nothing was saved" in err
    assert not os.path.exists("r")
    assert os.listdir("r.partial") == [results.PROGRESS]


def test_one_sigterm_that_arrives_twice(heads, monkeypatch):
    """As `timeout` sends it: to the process, and to its group."""
    monkeypatch.setattr(splice, "run_edited", after(5, splice.run_edited, terminate))
    table = results._write_table

    def late(*args, **more):
        terminate()
        return table(*args, **more)

    monkeypatch.setattr(cli, "ONE_SIGNAL_SECONDS", 1e6)
    monkeypatch.setattr(results, "_write_table", late)
    status, _, err = heads("--exact", "--out", "r")
    assert status == 143
    assert "saved in r" in err
    assert not load_result("r").complete


def test_a_sigterm_handler_of_ones_own_stays():
    from concurrent.futures import ThreadPoolExecutor

    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        assert run("--version") == 0
        signal.raise_signal(signal.SIGTERM)
        assert seen == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
    with ThreadPoolExecutor(1) as pool:  # where no handler can be set
        assert pool.submit(run, "--version").result() == 0


def test_rows(heads):
    table = heads("--rows", "3")[1]
    nothing = heads("--rows", "0")[1]
    assert len(nothing.splitlines()) < len(table.splitlines())


def test_notices_are_said_once(heads, where):
    status, out, err = heads("--documents", "64", "--format", "json")
    assert status == 0
    notices = json.loads(out)["notices"]
    assert any("8 usable documents, of 64 asked for" in n for n in notices)
    for notice in notices:
        assert err.count(notice) == 1
    status, out, err = heads("--documents", "64")
    for notice in notices:
        assert (out + err).count(notice) == 1


def test_notices_that_come_while_measuring_are_said(heads):
    _, out, err = heads("--documents", "64", "--rescore", "--format", "json")
    notices = json.loads(out)["notices"]
    late = [n for n in notices if "no further documents" in n]
    assert late
    assert err.count(late[0]) == 1


def test_no_number_depends_on_the_batch(heads):
    tables = []
    for size in ("1", "4", "auto"):
        assert heads("--batch-size", size, "--out", f"b{size}")[0] == 0
        tables.append(load_result(f"b{size}").tables["heads"]["importance"].to_numpy())
    assert abs(tables[0] - tables[1]).max() < 1e-5
    assert abs(tables[0] - tables[2]).max() < 1e-5


@pytest.mark.parametrize("bos", ["--bos", "--no-bos", None])
def test_the_command_reproduces_the_run(heads, checkpoint, capsys, bos):
    more = [bos] if bos else []
    more += ["--seed", "2", "--step", "0.5", "--prune", "--windows"]
    assert heads(*more, "--out", "a", model=str(checkpoint("llama")))[0] == 0
    first = load_result("a")
    assert first.data["bos"] is (bos != "--no-bos")
    words = shlex.split(first.command)
    assert words[:2] == ["interp", "heads"]
    assert ("--bos" in words, "--no-bos" in words) == (bos == "--bos", bos == "--no-bos")
    assert "--documents 4" in first.command
    assert "--out" not in words
    assert run(*words[1:], "--out", "b", "--no-progress") == 0
    second = load_result("b")
    assert second.command == first.command
    assert second.config == first.config | {"progress": second.config.get("progress")}
    assert second.data == first.data
    for name, table in first.tables.items():
        assert table.equals(second.tables[name]), name


def test_the_command_names_the_model_that_was_taken(where, capsys, monkeypatch, checkpoint):
    from interp import names

    folder = checkpoint("llama")
    monkeypatch.setattr(names.assets, "fetch", lambda name, offline=False: folder)
    monkeypatch.setattr(names.hub, "cached_snapshot", lambda *_a, **_k: None)
    assert run("heads", "--data", where[1], *fast(), "--out", "r") == 0
    lines = [
        line for line in capsys.readouterr().err.splitlines() if "No --model was given" in line
    ]
    assert len(lines) == 1
    result = load_result("r")
    assert sum("No --model was given" in n for n in result.notices) == 1
    assert "--model smollm2-135m" in result.command
    assert result.data["bos_id"] == 0


def test_options_that_begin_with_a_dash():
    from interp.config import HeadsConfig, TextOptions

    command = cli._command("heads", [TextOptions(data="-odd name.txt"), HeadsConfig()])
    assert command == "interp heads '--data=-odd name.txt'"


def test_a_log_handler_of_ones_own_stays(heads):
    import logging

    logger = logging.getLogger("interp")
    before = logger.handlers[:], logger.level, logger.propagate
    heads()
    assert (logger.handlers[:], logger.level, logger.propagate) == before


def test_assets(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path))
    assert run("assets", "list") == 0
    out, err = capsys.readouterr()
    assert "smollm2-135m" in out
    assert "news" in out
    assert out.count("absent") == 2
    assert err == ""
    assert list(tmp_path.iterdir()) == []
    assert run("assets", "fetch", "nwes") == 1
    assert "Did you mean news" in capsys.readouterr().err


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run("heads", "--help") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.index("--prune") < out.index("--data") < out.index("--model") < out.index("--seed")
    assert "--no-bos" in out
    assert "--no-progress" in out
    assert "--no-prune" not in out
    assert "None" not in out
    assert "[default: 32]" in out
    from dataclasses import fields

    from interp.config import HeadsConfig, ModelOptions, OutputOptions, TextOptions

    for group in (HeadsConfig, ModelOptions, OutputOptions, TextOptions):
        for field in fields(group):
            assert f"--{field.name.replace('_', '-')}" in out


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={
            k: v
            for k, v in (os.environ | {"PYTHONPATH": str(ROOT)} | environment).items()
            if v is not None
        },
    )


MAIN = "import sys; from interp.cli import main; main({})"


def test_help_imports_little():
    code = (
        "import sys\nfrom interp.cli import run\n"
        "assert run([]) == run(['--help']) == run(['heads', '--help']) == run(['--version']) == 0\n"
        "assert run(['doctor', '--help']) == 0\n"
        "heavy = {'torch', 'pandas', 'numpy', 'transformers', 'transformer_lens', 'plotly'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""


def test_a_reader_who_goes_away(heads, monkeypatch):
    """As in `interp heads | head -1`: the run is saved, and nothing is said of the pipe."""
    read, write = os.pipe()
    os.close(read)
    for form in ("table", "json"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", os.fdopen(os.dup(write), "w"))
            status, _, err = heads("--out", form, "--format", form)
            sys.stdout.close()
        assert status == 0
        assert f"saved in {form}" in err
        assert "roken" not in err
        assert load_result(form).complete


def test_help_to_a_reader_who_goes_away():
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -c {shlex.quote(MAIN.format(['heads', '--help']))} | true",
        shell=True,
        capture_output=True,
    )
    assert done.stderr == b""


def test_a_terminal_that_is_not_utf8(heads, monkeypatch):
    for form in ("table", "json"):
        raw = io.BytesIO()
        with monkeypatch.context() as patch:
            stream = io.TextIOWrapper(raw, "ascii")
            patch.setattr(sys, "stdout", stream)
            assert heads("--format", form)[0] == 0
        shown = raw.getvalue().decode("ascii")
        assert "heads" in shown
    assert json.loads(shown)["analyzer"] == "heads"


def test_a_cold_start(where, tmp_path):
    """A process of its own, LC_ALL=C and nothing switched off: only interp speaks on stderr."""
    arguments = ["heads", "--model", where[0], "--data", where[1], *fast(), "--out", "r"]
    clean = dict.fromkeys(["HF_HUB_OFFLINE", "OMP_WAIT_POLICY", "PYTHONIOENCODING"])
    done = python(MAIN.format(arguments), LC_ALL="C", **clean)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stderr.decode().splitlines()
    assert all(line.startswith("interp: ") for line in lines)
    assert "saved in r" in lines[-1]
    assert b"heads | gpt2" in done.stdout


def test_a_name_without_its_option(capsys):
    assert run("heads", "gpt2") == 2
    assert "unexpected 'gpt2'" in (err := capsys.readouterr().err)
    assert "--model gpt2" in err


def test_a_run_folder_named_like_a_file(heads):
    status, _, err = heads("--out", "page.html")
    assert status == 2
    assert "--out must be a folder" in err


def test_a_mistyped_source_is_told_before_the_model_is_loaded(where, capsys, monkeypatch):
    def never(*_args, **_options):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("interp.model.load_model", never)
    assert run("heads", "--model", where[0], "--data", "newz") == 1
    assert "no data source 'newz'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ablation", "mean"), "--ablation mean is for --exact"),
        (("--unit", "kv"), "--unit kv is as --unit head"),
        (("--step", "0.2"), "--step is for --prune"),
    ],
)
def test_an_option_without_effect_is_told(heads, arguments, words):
    status, _, err = heads(*arguments, "--out", "runs/a")
    assert status == 0
    assert err.count(words) == 1
    assert any(words in notice for notice in load_result("runs/a").notices)


def test_whole_groups_are_named(checkpoint, where, capsys):
    run("heads", "--model", str(checkpoint("llama")), "--data", where[1], *fast(), "--prune",
        "--unit", "kv", "--exact", "--out", "runs/kv")  # fmt: skip
    found = capsys.readouterr()
    assert "in whole KV groups," in " ".join(found.out.split())
    assert "--exact removes single query heads" in found.err


def test_a_line_is_said_once(where, capsys, monkeypatch):
    from interp import sources

    text = tiny.corpus(8)

    def news(_offline, notify):
        notify("fetching news once")
        return text

    monkeypatch.setattr(sources.assets, "news_documents", news)
    assert run("heads", "--model", where[0], *fast()) == 0
    assert capsys.readouterr().err.count("fetching news once") == 1
