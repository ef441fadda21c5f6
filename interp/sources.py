"""Where documents come from: the embedded news, files, folders, a Hub data set, a list of strings.

A source is read into rows in a fixed order, one per document; a row's place is its `document` index
in every table. What a row holds is taken as it is: no stripping, no normalising, except that a
.txt file's line ends become \\n. Torch-free.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from interp import assets, hub
from interp.errors import InterpError

WELL_KNOWN = ("content", "document", "article", "body", "sentence", "story")
HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?")
HUB_ROWS = 10_000
EXPECTED = (
    "'news', a .txt, .jsonl, .csv or .parquet file, a folder of those, a Hub data set (owner/name "
    "or owner/name:config); in Python also a list of strings"
)


@dataclass(frozen=True)
class Source:
    """A source's rows in order; None where a row holds no text."""

    name: str
    rows: list[str | None]
    column: str | None
    """The column the text came from; None where there are no columns, or they differ by file."""
    notices: list[str]


def read_source(
    source: str | Path | Sequence[str],
    *,
    text_column: str | None = None,
    split: str = "train",
    documents: int = 32,
    offline: bool = False,
) -> Source:
    """Read every row of a source (of a Hub data set: the first 10,000, or more for more documents).

    Args:
        source: "news"; a file or folder; a Hub data set id, "owner/name" or "owner/name:config"; or
            the documents themselves as a list of strings.
        text_column: The column to read; default "text", else the only column of text, else the only
            one of a few well-known names.
        split: The Hub data set's split; no other source has any.
        documents: How many documents are wanted: a Hub stream is read for at least ten times that.
        offline: Ask nothing of the network.

    Raises:
        InterpError: Nothing there, unreadable, malformed, no column to read, or no text in it: all
            that can be known without a tokenizer.
    """
    read = _rows_of(source, text_column, split, documents, offline)
    if not read.rows:
        raise InterpError(f"{read.name} is empty: it holds no document.")
    if not any(row and row.strip() for row in read.rows):
        where = f" in column {read.column!r}" if read.column else ""
        raise InterpError(
            f"{read.name} has no usable document: all {len(read.rows)} are blank{where}."
        )
    return read


def _rows_of(
    source: str | Path | Sequence[str],
    text_column: str | None,
    split: str,
    documents: int,
    offline: bool,
) -> Source:
    if not isinstance(source, str | Path):
        _no_columns("a list of strings", text_column)
        _no_splits("a list of strings", split)
        return _listed(source)
    path = expect_source(source, text_column=text_column, split=split)
    if path is None:
        notices: list[str] = []
        texts = assets.news_documents(offline, notify=_teller(notices))
        return Source("news", list(texts), None, notices)
    if path.is_dir():
        return _folder(path, str(source), text_column)
    if path.is_file():
        return _read(path, text_column)
    match = HUB_ID.fullmatch(str(source))
    assert match is not None
    return _hub(match["id"], match["config"], split, text_column, documents, offline, _hint(path))


def expect_source(
    source: str | Path, *, text_column: str | None = None, split: str = "train"
) -> Path | None:
    """Refuse what cannot be a source before anything slow is done; reads nothing.

    Returns:
        The path, which exists or is named as a Hub data set is; None for the embedded news.

    Raises:
        InterpError: see `read_source`.
    """
    if source == "news":
        _no_columns("news", text_column)
        _no_splits("news", split)
        return None
    path = Path(source).expanduser()
    try:
        there = path.exists() and bool(str(source).strip())
    except OSError:  # a text given in place of a name is longer than a path may be
        there = False
    if there:
        _no_splits(str(source), split)
        if path.is_file() and path.suffix.lower() not in READERS:
            raise InterpError(f"cannot read {_short(source)}: expected {EXPECTED}.")
        if path.is_dir() or path.is_file():
            return path
    match = HUB_ID.fullmatch(source) if isinstance(source, str) else None
    if match is None or path.suffix.lower() in READERS:
        raise InterpError(f"no data source {_short(source)}: expected {EXPECTED}.{_hint(path)}")
    return path


def choose_column(columns: dict[str, bool], wanted: str | None, where: str) -> tuple[str, str]:
    """The column that holds the documents, and a notice ("" where there is nothing to say).

    Args:
        columns: Name of each column, and whether it holds text.
        wanted: The one asked for; None to find one.
        where: The source's name, for messages.
    """
    names = ", ".join(map(repr, columns)) or "none"
    if wanted is None and "text" in columns:
        wanted = "text"
    if wanted is not None:
        if wanted not in columns:
            close = get_close_matches(wanted, columns, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InterpError(f"{where} has no column {wanted!r}; its columns: {names}.{hint}")
        if not columns[wanted]:
            raise InterpError(f"column {wanted!r} of {where} holds no text; its columns: {names}.")
        return wanted, ""
    textual = [name for name, text in columns.items() if text]
    known = [name for name in textual if name.lower() in ("text", *WELL_KNOWN)]
    for candidates in (textual, known):
        if len(candidates) == 1:
            return candidates[0], f"{where}: the documents are column {candidates[0]!r}"
    raise InterpError(
        f"{where} has no column 'text', and which one holds the documents is unclear; its columns: "
        f"{names}. Name one with --text-column."
    )


def _no_columns(where: str, text_column: str | None) -> None:
    if text_column is not None:
        raise InterpError(f"{where} has no columns: leave out the text column {text_column!r}.")


def _no_splits(where: str, split: str) -> None:
    if split != "train":
        raise InterpError(f"{where} has no splits, Hub data sets have: leave out {split!r}.")


def _listed(source: Iterable[Any]) -> Source:
    rows: list[str | None] = []
    for index, text in enumerate(source):
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InterpError(f"document {index} of the list is not a string but {kind}")
        rows.append(text)
    return Source(f"list of {len(rows)} documents", rows, None, [])


def _folder(folder: Path, name: str, text_column: str | None) -> Source:
    files = sorted(
        (path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )
    usable = [path for _, path in files if path.suffix.lower() in READERS]
    if not usable:
        raise InterpError(f"folder {name} holds no {', '.join(READERS)} file.")
    tables = [_read(path, text_column) for path in usable]
    notices = [notice for table in tables for notice in table.notices]
    if others := len(files) - len(usable):
        notices.append(f"{name}: {others} file(s) of other kinds are not read")
    columns = {table.column for table in tables}
    column = columns.pop() if len(columns) == 1 else None
    return Source(name, [row for table in tables for row in table.rows], column, notices)


def _read(path: Path, text_column: str | None) -> Source:
    try:
        return READERS[path.suffix.lower()](path, text_column)
    except OSError as error:
        raise InterpError(f"cannot read {path}: {error.strerror or error}") from error


def _decoded(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a leading byte order mark is not text
    except UnicodeDecodeError as error:
        raise InterpError(
            f"{path} is not UTF-8 (byte {error.start}: 0x{error.object[error.start]:02x}). "
            "Convert it, for instance with `iconv -f LATIN1 -t UTF-8`."
        ) from error
    if text.startswith("\0") or text[1:2] == "\0":  # UTF-16 without a mark, or no text at all
        raise InterpError(
            f"{path} begins with NUL characters: it is no UTF-8 text. Convert it, for instance "
            "with `iconv -f UTF-16 -t UTF-8`."
        )
    return text


def _txt(path: Path, text_column: str | None) -> Source:
    _no_columns(str(path), text_column)
    lines = _decoded(path).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    documents: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    rows: list[str | None] = ["\n".join(document) for document in documents if document]
    return Source(str(path), rows, None, [])


def _jsonl(path: Path, text_column: str | None) -> Source:
    records: list[tuple[str, dict[str, Any]]] = []
    # Split at \n only: str.splitlines would also split inside a string, at U+2028 for one.
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InterpError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise InterpError(f"{path}, line {number}: expected a JSON object, found {kind}")
        records.append((f"{path}, line {number}", record))
    return _records(records, text_column, str(path))


def _records(
    records: list[tuple[str, dict[str, Any]]], text_column: str | None, where: str
) -> Source:
    """Rows whose fields may differ: a row without the column has no text."""
    if not records:
        return Source(where, [], None, [])
    columns: dict[str, bool] = {}
    for _, record in records:
        for name, value in record.items():
            columns[name] = columns.get(name, False) or isinstance(value, str)
    column, notice = choose_column(columns, text_column, where)
    rows: list[str | None] = []
    for place, record in records:
        value = record.get(column)
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise InterpError(f"{place}: {column!r} is not a string but {kind}")
        rows.append(value)
    return Source(where, rows, column, [notice] if notice else [])


def _csv(path: Path, text_column: str | None) -> Source:
    content = _decoded(path)
    # Strict, since an unclosed quote otherwise swallows the rest of the file as one document.
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(content) + 1))
    try:
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise InterpError(f"{path}, line {reader.line_num}: malformed CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)
    if not rows:
        return Source(str(path), [], None, [])
    header, *body = rows
    names = [name.strip() for name in header]
    if len(names) == 1 and (other := re.search("[;\t|]", names[0])):
        raise InterpError(f"{path} seems separated by {other[0]!r}; expected commas.")
    # Every field of a CSV is a string: text is what some row does not write as a number.
    columns = {
        name: any(not _number(row[i]) for row in body if i < len(row)) or not body
        for i, name in enumerate(names)
    }
    column, notice = choose_column(columns, text_column, str(path))
    if names.count(column) > 1:
        raise InterpError(f"{path} has {names.count(column)} columns named {column!r}")
    place = names.index(column)
    notices = [notice] if notice else []
    if longer := sum(len(row) > len(names) for row in body):
        notices.append(f"{path}: {longer} row(s) with more fields than the header: stray commas?")
    texts = [row[place] if place < len(row) else None for row in body]
    return Source(str(path), texts, column, notices)


def _number(field: str) -> bool:
    try:
        float(field or "0")
    except ValueError:
        return not field.strip()
    return True


def _parquet(path: Path, text_column: str | None) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def textual(kind: pa.DataType) -> bool:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        return any(test(kind) for test in tests)

    try:
        with pq.ParquetFile(path) as file:
            columns = {field.name: textual(field.type) for field in file.schema_arrow}
            column, notice = choose_column(columns, text_column, str(path))
            rows = file.read(columns=[column]).column(column).to_pylist()
    except (pa.ArrowException, KeyError) as error:
        raise InterpError(f"{path} is not a readable parquet file ({_first(error)})") from error
    return Source(str(path), rows, column, [notice] if notice else [])


READERS: dict[str, Callable[[Path, str | None], Source]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _hub(
    name: str,
    config: str | None,
    split: str,
    text_column: str | None,
    documents: int,
    offline: bool,
    hint: str,
) -> Source:
    """The first rows of a streamed data set: what lies beyond them is never drawn, and said so."""
    if offline:
        raise InterpError(
            f"{name!r} is no file or folder here, and offline forbids asking the Hub for it.{hint}"
        )
    if not hub.reachable():
        raise InterpError(
            f"{name!r} is no file or folder here, and no Hub answers. Give a file, or 'news'.{hint}"
        )
    import datasets

    size = max(HUB_ROWS, 10 * documents)
    try:
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
        if text_column and stream.column_names and text_column in stream.column_names:
            stream = stream.select_columns([text_column])  # do not fetch images to drop them
        # One more than is kept, to know whether there is more.
        records = list(islice(iter(stream), size + 1))
    except Exception as error:  # a hub library raises anything: what it says is all there is
        raise InterpError(
            f"Hub data set {name!r}, split {split!r}: {_first(error)}{hint}"
        ) from error
    kept = [(f"{name}, row {i}", dict(record)) for i, record in enumerate(records[:size])]
    source = _records(kept, text_column, name if config is None else f"{name}:{config}")
    if len(records) > size:
        source.notices.append(f"{name}: the sample is of the first {size:,} rows, as streamed")
    return source


def _hint(path: Path) -> str:
    """Did-you-mean for a path that is not there."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        names = []
    close = {name.lower(): str(path.with_name(name)) for name in names}
    if path.parent == Path():
        close["news"] = "news"
    match = get_close_matches(path.name.lower(), close, n=1, cutoff=0.7)
    return f" Did you mean {close[match[0]]!r}?" if match else ""


def _short(source: str | Path) -> str:
    name = str(source)
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _first(error: BaseException) -> str:
    """The first line of another library's error, with its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _teller(notices: list[str]) -> Callable[[str], None]:
    """Say it at once, as a fetch takes a while, and keep it for the result."""

    def tell(message: str) -> None:
        assets.say(message)
        notices.append(message)

    return tell
