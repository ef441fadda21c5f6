"""`interp completion`: what a shell makes of it, where the locale is C."""

import os
import shutil
import subprocess

import pytest

from interp import cli
from interp.registry import ANALYZERS

BASH = shutil.which("bash")
ASK = """
source "$1"
COMP_WORDS=(interp "${@:2}"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_interp
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def complete(tmp_path, capsys):
    """The words typed so far, the last one unfinished -> what bash offers for it."""
    if BASH is None:
        pytest.skip("no bash on this machine")
    assert cli.run(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)

    def ask(*words):
        done = subprocess.run(
            [BASH, "--norc", "-c", ASK, "bash", script, *words],
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
        assert done.stderr == ""
        return {word.strip() for word in done.stdout.splitlines()}

    return ask


def test_commands(complete):
    assert complete("") >= {*ANALYZERS, "report", "assets", "completion"}
    assert complete("he") == {"heads"}
    assert complete("assets", "") >= {"list", "fetch"}


def test_options_are_those_of_the_command(complete):
    assert complete("heads", "--pr") == {"--prune", "--progress"}
    assert "--layer" in complete("ffn-keys", "--la")
    assert "--layer" not in complete("heads", "--la")


def test_values_where_there_are_few(complete):
    assert complete("heads", "--ablation", "") == {"zero", "mean", "resample"}
    assert complete("completion", "z") == {"zsh"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_plain_text(shell, capsys):
    assert cli.run(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.isascii()
    assert all(name in out for name in ANALYZERS)
    assert str(os.getcwd()) not in out


def test_another_shell_is_wrong_usage(capsys):
    assert cli.run(["completion", "tcsh"]) == 2
    assert '"bash", "zsh", "fish"' in capsys.readouterr().err
    assert cli.run(["completion"]) == 2
