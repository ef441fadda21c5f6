"""One self-contained HTML page from any results: it opens from disk, without a network, in any
browser.

plotly.js is embedded once; a content security policy forbids every request. All text that came from
a model or a document is escaped here, and nowhere else, by `_text`; figures travel as JSON in which
`<`, `>` and `&` are written as escapes, so that no string can close the script element.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.offline

from interp.errors import InterpError
from interp.report import browser as browsing
from interp.report.browser import Browser, script_json
from interp.report.compare import comparisons, names
from interp.report.figures import figure, figure_names
from interp.report.outline import Outline
from interp.report.spec import CONFIG
from interp.report.strips import token_tables
from interp.report.view import Digest, View, ranked
from interp.report.views import view_of
from interp.report.words import (
    DASH,
    count,
    interruption,
    model_name,
    number,
    other_notices,
    plain,
    sample,
    visible,
)
from interp.results import Column, Result

ROWS = 1500  # of one table; more would make the page slow
NOTEBOOK_ROWS = 10
NO_TEXT = "no documents were read"
_LONG = 300  # characters of one cell
_NOTICES = 50
_MEANINGS = ("column", "unit", "meaning")
# 'unsafe-inline' is what a page without a server has; no source at all is allowed for requests.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def render(results: Sequence[Result]) -> str:
    """The page.

    Args:
        results: one section each, in this order.

    Raises:
        InterpError: there is nothing to render.
    """
    results = list(results)
    if not results:
        raise InterpError("a report needs at least one result.")
    titles = names(results)
    title = titles[0] if len(results) == 1 else f"{len(results)} results"
    sections = [
        _section(result, f"r{i}", titles[i] if len(results) > 1 else None, len(results), i + 1)
        for i, result in enumerate(results)
    ]
    if len(results) > 1:
        sections.insert(0, _headlines(results, titles))
    contents = ""
    if len(results) > 1:
        links = "".join(
            f'<li><a href="#r{i}">{_text(entry)}</a>{_incomplete(result)}</li>'
            for i, (entry, result) in enumerate(zip(titles, results, strict=True))
        )
        contents = f'<nav aria-label="Results"><ol>{links}</ol></nav>'
    drawn = any(figure_names(result) for result in results)
    library = f"<script>{_plotly_js()}</script>" if drawn else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>interp {html.escape(title)}</title>\n"
        f'<link rel="icon" href="data:,">\n<style>\n{_asset("page.css")}</style>\n</head>\n<body>\n'
        f'<header><p class="brand">interp</p><h1>{_text(title)}</h1>{contents}</header>\n'
        f"<main>\n{''.join(sections)}</main>\n{library}\n"
        f"<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def fragment(result: Result, figures: bool) -> str:
    """For a notebook: findings, the first rows, and with `figures` the figures and plotly.js."""
    view = view_of(result)
    parts = [
        f"<p><b>{_text(result.analyzer)}</b>: {_text(model_name(result))}, "
        f"{_text(sample(result))}</p>"
    ]
    parts.append(_notices(result))
    parts.append(_list(view.findings(result)))
    for name, table in result.tables.items():
        if name in view.quiet:
            continue
        table, order = ranked(view, name, table)
        parts.append(_table(table.head(NOTEBOOK_ROWS), result.columns[name], buttons=False))
        parts.append(
            f"<p>{min(len(table), NOTEBOOK_ROWS)} of {len(table):,} rows, {_text(order)}: "
            f"<code>result.tables[{_text(repr(name))}]</code></p>"
        )
    for name in token_tables(result):
        parts.append(
            f"<p><code>result.tokens({_text(repr(name))})</code> shows its texts, the tokens "
            "coloured by their numbers.</p>"
        )
    if figures:
        for i, name in enumerate(figure_names(result)):
            drawn = figure(result, name)
            parts.append(drawn.to_html(full_html=False, include_plotlyjs=not i, config=CONFIG))
    return f"<div>{''.join(parts)}</div>"


# Pieces -------------------------------------------------------------------------------------------


def _asset(name: str) -> str:
    return resources.files("interp.report").joinpath(name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    return plotly.offline.get_plotlyjs().replace("</script", "<\\/script")


def _text(value: Any, limit: int | None = None) -> str:
    """Foreign text as HTML; <bdi> keeps right-to-left text from reordering its surroundings."""
    shown = visible(value, limit)
    escaped = html.escape(shown)
    return escaped if shown.isascii() else f"<bdi>{escaped}</bdi>"


def _incomplete(result: Result) -> str:
    return "" if result.complete else ' <strong class="warn">interrupted</strong>'


def _headlines(results: Sequence[Result], titles: Sequence[str]) -> str:
    """The first finding of each result, and the runs that can be compared side by side."""
    told = [
        f'<li><a href="#r{i}">{_text(title)}</a>: {_text(found[0])}{_incomplete(result)}</li>'
        for i, (title, result) in enumerate(zip(titles, results, strict=True))
        if (found := view_of(result).findings(result))
    ]
    outline = Outline("headlines", "H")
    parts = ['<section id="headlines"><h2>Headlines</h2>']
    if told:
        parts.append(f"<ul>{''.join(told)}</ul>")
    parts += [_digest(digest, outline) for digest in comparisons(results)]
    return "\n".join([*parts, "</section>\n"])


def _section(result: Result, anchor: str, title: str | None, results: int, place: int) -> str:
    """One result; with a title where the page has several, whose place it then has."""
    view = view_of(result)
    outline = Outline(anchor, f"{place}." if title else "")
    parts = [f'<section id="{anchor}">', f"<h2>{place} {_text(title)}</h2>" if title else ""]
    if view.question:
        parts.append(f'<p class="question">{_text(view.question)}</p>')
    parts.append(f'<p class="sample">{_text(sample(result) or NO_TEXT)}{_incomplete(result)}</p>')
    parts.append(_notices(result))
    body: list[str] = []
    findings = view.findings(result)
    if findings:
        body.append(outline.heading("Findings"))
        body.append(f'<div class="findings">{_list(findings)}</div>')
    body += [_digest(digest, outline) for digest in view.digests(result) if digest.page]
    drawn = figure_names(result)
    if drawn:
        body.append(outline.heading("Figures"))
    for name in drawn:
        body.append(_figure(figure(result, name), f"{anchor}-{name}", outline.figure()))
    limits = view.limits(result)
    if limits:
        body.append(outline.heading("What these numbers are, and are not") + _list(limits))
    browser = view.browser if view.browser and view.browser.available(result) else None
    if browser is not None:
        shown = _browser(browser, result, f"{anchor}-browser", browsing.BYTES // results)
        body.append(outline.heading(_text(browser.title)) + shown)
    covered = (browser.table, browser.examples) if browser else ()
    for name, table in result.tables.items():
        if name not in covered:
            heading = outline.heading(f"Table {_text(name)}")
            body.append(heading + _full_table(result, view, name, table))
    body.append(_summary(result, outline))
    body.append(outline.heading("Where this comes from") + _provenance(result))
    parts += [outline.contents(), *body, "</section>\n"]
    return "\n".join(part for part in parts if part)


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _notices(result: Result) -> str:
    stopped, others = interruption(result), other_notices(result)
    notices = [*([stopped] if stopped else []), *others[:_NOTICES]]
    if len(others) > _NOTICES:
        notices.append(f"{len(others) - _NOTICES} more notices are in result.json.")
    if not notices:
        return ""
    items = "".join(f"<li>{_text(notice, 1000)}</li>" for notice in notices)
    return f'<aside class="notices" aria-label="Notices"><h3>Notices</h3><ul>{items}</ul></aside>'


def _figure(drawn: go.Figure, anchor: str, label: str) -> str:
    """The caption is HTML, since plotly's titles do not wrap on a phone."""
    meta = drawn.layout.meta or {}
    title, subtitle = str(meta.get("title", "")), str(meta.get("subtitle", ""))
    drawn.update_layout(
        title=None,
        margin={"t": 50 if drawn.layout.annotations else 30},  # of panels their titles
        dragmode=False,  # else a finger on the figure cannot scroll the page
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    data = script_json({**json.loads(drawn.to_json() or "{}"), "config": CONFIG})
    height = int(drawn.layout.height or 450)
    return (
        f"<figure><figcaption><strong>{label}. {_text(title)}</strong><br>"
        f"<span>{_text(subtitle)}</span></figcaption>"
        f'<div class="plot"><div class="chart" id="{anchor}" role="img" '
        f'aria-label="{html.escape(visible(title))}" style="min-height:{height}px"></div></div>'
        f'<script type="application/json" class="figure" data-for="{anchor}">{data}</script>'
        "</figure>"
    )


def _digest(digest: Digest, outline: Outline) -> str:
    head = "".join(f'<th scope="col">{_text(item)}</th>' for item in digest.head)
    rows = "".join(_row(row[0], *(_text(item) for item in row[1:])) for row in digest.rows)
    note = f'<p class="note">{_text(digest.note)}</p>' if digest.note else ""
    return (
        f"{outline.heading(_text(digest.title))}"
        '<div class="scroll short" role="region" tabindex="0" '
        f'aria-label="{html.escape(visible(digest.title))}"><table class="digest">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _row(label: str, *cells: str) -> str:
    """A row of a table; the label is text, the cells are HTML."""
    inside = "".join(f"<td>{item}</td>" for item in cells)
    return f"<tr><th scope='row'>{_text(label)}</th>{inside}</tr>"


def _details(title: str, rows: str, headings: Sequence[str]) -> str:
    head = "".join(f"<th scope='col'>{_text(heading)}</th>" for heading in headings)
    return (
        f"<details><summary>{_text(title)}</summary><div class='scroll short'>"
        f"<table class='meaning'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "</div></details>"
    )


def _full_table(result: Result, view: View, name: str, table: pd.DataFrame) -> str:
    table, order = ranked(view, name, table)
    shown = table.head(ROWS)
    note = f"{count(len(table))} rows, {order}."
    if len(shown) < len(table):
        note = (
            f"{count(len(shown))} of {count(len(table))} rows, {order}. Sorting and searching "
            f"cover these rows only; all of them are in {name}.parquet."
        )
    described = _meanings(result.columns[name], table)
    return (
        f'<p class="note">{_text(note)}</p>'
        f'<p class="search"><label>Search <input type="search" autocomplete="off"></label> '
        '<span role="status"></span></p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="Table {html.escape(name)}">'
        f"{_table(shown, result.columns[name], buttons=True)}</div>"
        f"{_details('What the columns mean', described, _MEANINGS)}"
    )


def _meanings(columns: dict[str, Column], table: pd.DataFrame) -> str:
    return "".join(
        _row(column, _text(meaning.unit), _text(meaning.description))
        for column, meaning in columns.items()
        if column in table.columns
    )


def _browser(browser: Browser, result: Result, anchor: str, limit: int) -> str:
    """The frame of a browser; page.js fills it with rows as they are wanted."""
    packed = browsing.pack(browser, result, limit)
    described = [
        _details(
            f"What the columns of {name} mean",
            _meanings(result.columns[name], result.tables[name]),
            _MEANINGS,
        )
        for name in (browser.table, browser.examples)
    ]
    return (
        f'<p class="note">{_text(packed.note)}</p>'
        f'<div class="browser" id="{anchor}">'
        '<p class="search"><label>Search <input type="search" autocomplete="off"></label> '
        "<label>Sort by <select></select></label> "
        '<button type="button" class="turn">largest first</button> <span role="status"></span></p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(browser.title)}">'
        "<table><thead><tr></tr></thead><tbody></tbody></table></div>"
        '<p><button type="button" class="more" hidden></button></p></div>'
        f'<script type="application/json" class="browse" data-for="{anchor}">{packed.text}'
        f"</script>{''.join(described)}"
    )


def _table(table: pd.DataFrame, columns: dict[str, Column], buttons: bool) -> str:
    head = []
    for name in table.columns:
        unit = f'<span class="unit">{_text(columns[name].unit)}</span>'
        label = (
            f"<button type='button'>{_text(name)}</button>{unit}"
            if buttons
            else f"{_text(name)} {unit}"
        )
        meaning = html.escape(visible(columns[name].description))
        head.append(f'<th scope="col" title="{meaning}">{label}</th>')
    cells = {name: [_cell(value) for value in table[name]] for name in table.columns}
    rows = "".join(
        "<tr>" + "".join(cells[name][i] for name in table.columns) + "</tr>"
        for i in range(len(table))
    )
    kind = ' class="sortable"' if buttons else ""
    return f"<table{kind}><thead><tr>{''.join(head)}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Any) -> str:
    """One cell; `data-v` carries the full number for sorting."""
    value = plain(value)
    if value is None:
        return f'<td class="none">{DASH}</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        shown = str(value) if isinstance(value, int) else f"{value:.4g}"
        exact = repr(value).replace("inf", "Infinity")  # as JavaScript reads it
        return f'<td class="n" data-v="{exact}">{shown}</td>'
    short = ' class="s"' if len(str(value)) <= 24 else ""
    return f"<td{short}>{_text(value, _LONG)}</td>"


def _provenance(result: Result) -> str:
    command = (
        "<p>The command that made this:</p>"
        f'<pre tabindex="0"><code>{_text(result.command, 2000)}</code></pre>'
        if result.command
        else ""
    )
    run = {
        "started": result.started,
        "seconds": round(result.seconds, 1),
        "seed": result.seed,
        "complete": result.complete,
    }
    groups = {
        "Model": result.model,
        "Data": result.data,
        "Options": result.config,
        "Environment": result.environment,
        "Run": run,
    }
    boxes = "".join(
        f"<div><h4>{title}</h4><table class='pairs'><tbody>{_pairs(values)}</tbody></table></div>"
        for title, values in groups.items()
        if values
    )
    return f"{command}<div class='boxes'>{boxes}</div>"


def _summary(result: Result, outline: Outline) -> str:
    if not result.summary:
        return ""
    rows = "".join(
        _row(key, _value(value), _meaning(result, key)) for key, value in result.summary.items()
    )
    shown = _details("All numbers of the summary", rows, ("key", "value", "meaning"))
    return outline.heading("Summary") + shown


def _meaning(result: Result, key: str) -> str:
    column = result.summary_columns.get(key)
    return _text(f"{column.unit}: {column.description}") if column else ""


def _pairs(values: dict[str, Any]) -> str:
    return "".join(_row(key, _value(value)) for key, value in values.items())


def _value(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value) if isinstance(value, int) else f"{number(value):.6g}"
    if isinstance(value, str):
        return _text(value, _LONG)
    return _text(json.dumps(value, ensure_ascii=False), _LONG)
