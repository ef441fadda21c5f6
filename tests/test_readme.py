"""The READMEs: their commands are commands, they run, and both languages say the same ones."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from interp import cli
from interp.config import OutputOptions
from interp.errors import InterpError
from interp.registry import ANALYZERS
from tests import tiny

ROOT = Path(__file__).parent.parent
README, CHINESE = (ROOT / name for name in ("README.md", "README.zh-CN.md"))
CLAIMS = ROOT / "docs" / "claims.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FRAGMENT = re.compile(r"`([^`\n]+)`")
# So that a run takes a second: in place of what the README says, or added to it.
SMALL = {
    "heads": {"--step": "0.5"},
    "asymmetry": {},
    "ffn-keys": {"--mutation-keys": "2", "--sample-documents": "2", "--mixture-positions": "4"},
    "qkv": {"--fit-documents": "2", "--each": "none"},
    "superposition": {"--width": "1", "--k": "2", "--train-tokens": "200", "--train-batch": "64"},
}
PLACES = {"--layer": "1", "--heads": "1.1,2.0", "--key": "3"}  # that the tiny model has


def blocks(path: Path) -> list[tuple[str, str]]:
    """(language, contents) of the fenced blocks."""
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def prose(path: Path) -> str:
    """What is not in a fenced block, lines joined where a code fragment is broken over two."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`]*`", lambda m: re.sub(r"\s*\n\s*", " ", m[0]), text)


def fragments(path: Path) -> list[str]:
    return FRAGMENT.findall(prose(path))


def commands(path: Path) -> list[str]:
    """Every command line of interp, in the order of the file, each once."""
    lines = [
        part.strip()
        for language, block in blocks(path)
        if language == "sh"
        for line in block.splitlines()
        for part in line.split("&&")
    ]
    found = [c for c in [*lines, *fragments(path)] if c.startswith("interp ")]
    some = (
        c.replace("interp ... ", "interp heads ").replace("--layer N", "--layer 6") for c in found
    )
    return list(dict.fromkeys(some))


def options_of(name: str) -> set[str]:
    """Options of an analyzer's command."""
    analyzer = ANALYZERS[name]
    kinds = (analyzer.config, analyzer.models, analyzer.texts, OutputOptions)
    names = {field.name.replace("_", "-") for kind in kinds for field in fields(kind)}
    return {f"--{n}" for n in names} | {"--help", "--no-bos", "--no-concepts", "--no-controls"}


def parses(words: list[str]) -> None:
    """The command line as the real one reads it, options and their ranges checked."""
    _, bound, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert bound is not None


def test_there_is_something_to_check():
    found = commands(README)
    assert len(found) >= 12
    assert {command.split()[1] for command in found} >= {*ANALYZERS, "report"}
    assert "interp heads --prune" in found  # the first command, behind two others on its line


@pytest.mark.parametrize("path", [README, CHINESE, CLAIMS], ids=lambda path: path.name)
def test_every_command_is_one(path):
    for command in commands(path):
        words = shlex.split(command)[1:]
        try:
            parses(words)
        except (CycloptsError, InterpError) as error:
            pytest.fail(f"{path.name}: {command}: {error}")


@pytest.mark.parametrize(
    "command", ["interp heads --prun", "interp heads --step 2", "interp ffn-keys --layer x"]
)
def test_a_command_that_stopped_working_would_fail(command):
    with pytest.raises((CycloptsError, InterpError)):
        parses(shlex.split(command)[1:])


def sections(path: Path) -> list[tuple[str | None, str]]:
    """(analyzer whose section it is, text), by the headings."""
    parts = re.split(r"^## (.*)$", prose(path), flags=re.M)
    out: list[tuple[str | None, str]] = [(None, parts[0])]
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        named = re.search(r"`interp ([\w-]+)`", heading)
        out.append((named[1] if named and named[1] in ANALYZERS else None, text))
    return out


@pytest.mark.parametrize("path", [README, CHINESE], ids=lambda path: path.name)
def test_every_option_that_is_mentioned_exists(path):
    every = set.union(*map(options_of, ANALYZERS))
    checked = 0
    for name, text in sections(path):
        known = options_of(name) if name else every
        for fragment in FRAGMENT.findall(text):
            if fragment.startswith(("interp ", "--")):
                mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", fragment))
                shared = every if fragment.startswith("interp ") else known
                assert mentioned <= shared, f"{path.name}: {fragment}"
                checked += len(mentioned)
    assert checked > 40


def with_options(words: list[str], options: dict[str, str], instead: bool) -> list[str]:
    """Options given a value: in place of theirs, or where they are not given."""
    out = list(words)
    for option, value in options.items():
        if option not in out:
            out += [option, value]
        elif instead:
            out[out.index(option) + 1] = value
    return out


@pytest.fixture(scope="module")
def ran(checkpoint, tmp_path_factory):
    """command -> (status, stdout), each run on a tiny model, in the README's order."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        texts = folder / "some.txt"
        texts.write_text("\n\n".join(tiny.corpus(24)))
        for name in ("a", "b"):
            run(
                ["heads", *of_tiny("heads", [], checkpoint("gpt2"), texts), "--out", f"runs/{name}"]
            )
        found, done = {}, {}
        for command in commands(README):
            name, *words = shlex.split(command)[1:]
            if "--toy" in words:  # ten seconds, and tests/test_probes_toy.py has it
                continue
            if name in ANALYZERS:
                words = of_tiny(name, words, checkpoint("gpt2"), texts)
            elif name == "doctor":
                words = ["--model", str(checkpoint("gpt2"))]
            elif name == "report" and not words:  # the table names the command alone
                words = ["runs/a"]
            line = (name, *words)
            done[line] = found[command] = done[line] if line in done else run(list(line))
    return found


def of_tiny(name: str, words: list[str], model: Path, texts: Path) -> list[str]:
    if "--help" in words:
        return words
    words = with_options(words, {o: v for o, v in PLACES.items() if o in words}, True)
    words = with_options(words, {"--documents": "6", "--context": "24"}, True)
    words = with_options(words, SMALL[name], True)
    words = with_options(words, {"--model": str(model), "--data": str(texts)}, False)
    return [*words, "--no-progress"]


def run(words: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(words)
    return status, out.getvalue() + ("" if status == 0 else err.getvalue())


def test_every_command_runs(ran):
    assert len(ran) >= 12
    failed = {command: out for command, (status, out) in ran.items() if status != 0}
    assert not failed


# Which command printed what the README quotes; a run on another model has other numbers, and the
# same words.
QUOTED = {"interp heads --prune": 0, "interp asymmetry": 1, "interp qkv --documents 8": 3}


@pytest.mark.parametrize("command", QUOTED)
def test_what_is_quoted_is_what_is_printed(command, ran):
    quoted = [block for language, block in blocks(README) if not language][QUOTED[command]]
    labels = {line.split("  ")[0].strip() for line in quoted.splitlines() if "  " in line.strip()}
    assert len(labels) >= 3
    printed = " ".join(ran[command][1].split())
    assert not [label for label in labels if label not in printed]


# The Chinese one ----------------------------------------------------------------------------------


def test_both_languages_have_the_same_blocks():
    assert blocks(README) == blocks(CHINESE)
    assert commands(README) == commands(CHINESE)


def test_both_languages_name_the_same_code():
    """Commands, options, columns, files: whatever is set as code, as often."""
    english, chinese = (Counter(fragments(path)) for path in (README, CHINESE))
    assert english - chinese == Counter()
    assert chinese - english == Counter()


def test_there_is_a_small_picture_at_the_top():
    for path in (README, CHINESE):
        top = path.read_text(encoding="utf-8").split("\n## ")[0]
        (source,) = re.findall(r'<img src="(.*?)" width="\d+" alt=".+">', top)
        assert (ROOT / source).read_bytes().startswith(b"\x89PNG")
        assert (ROOT / source).stat().st_size < 300_000


def test_both_languages_have_the_same_parts_and_point_at_each_other():
    headings = [re.findall(r"^#+", prose(path), re.M) for path in (README, CHINESE)]
    assert headings[0] == headings[1]
    assert "(README.zh-CN.md)" in README.read_text(encoding="utf-8")
    assert "(README.md)" in CHINESE.read_text(encoding="utf-8")
    numbers = [
        Counter(re.findall(r"\d[\d,.:]*\d|\d", re.sub(r"\]\([^)]*\)", "", prose(path))))
        for path in (README, CHINESE)
    ]
    # "five seeds" and the like are words in one language and may be figures in the other.
    assert sum(((numbers[0] - numbers[1]) + (numbers[1] - numbers[0])).values()) <= 12


@pytest.mark.parametrize("path", [README, CHINESE, CLAIMS], ids=lambda path: path.name)
def test_what_is_linked_is_there(path):
    links = re.findall(r"\]\(([^)#]+)\)", prose(path)) + re.findall(r'src="(.*?)"', prose(path))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert links or path == CLAIMS
    assert not missing
