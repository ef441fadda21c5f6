"""Token strips: colours mean the numbers, the numbers can be reached, tokens stay text."""

from __future__ import annotations

import colorsys
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interp.errors import InterpError, UsageError
from interp.report import token_strip, words
from interp.results import Result
from tests.test_asymmetry_report import full  # noqa: F401  (a fixture)
from tests.test_ffn_report import browsable, result_of
from tests.test_report import CHROMIUM, HOSTILE, PROBE, fake_heads, in_browser
from tests.test_superposition_report import result as superposition  # noqa: F401  (a fixture)

LIGHT = [("#1a1a1a", "#ffffff"), ("#000000", "#f3f4f6")]
DARK = [("#e8e8e8", "#16181b"), ("#ffffff", "#111111")]


class Spans(html.parser.HTMLParser):
    """Attributes and text of the coloured tokens, without the scale above them; other text."""

    def __init__(self, strips: Any) -> None:
        super().__init__()
        self.tokens: list[tuple[dict[str, str], str]] = []
        self.tags: set[str] = set()
        self.text = ""
        self._open: list[dict[str, str]] = []
        self.feed(strips._repr_html_())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        assert not [name for name in known if name.startswith("on")]
        self.tags.add(tag)
        if tag == "span" and "tabindex" in known:
            self._open.append(known)

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._open.clear()

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open:
            self.tokens.append((self._open[-1], data))


def colour(attributes: dict[str, str]) -> tuple[float, ...]:
    found = re.search(r"rgba\((\d+),(\d+),(\d+),([\d.]+)\)", attributes["style"])
    assert found
    return tuple(float(part) for part in found.groups())


def rgb(text: str) -> tuple[float, ...]:
    return tuple(float(int(text[i : i + 2], 16)) for i in (1, 3, 5))


def luminance(colour: tuple[float, ...]) -> float:
    """WCAG 2's relative luminance."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (part / 255 for part in colour)
    ]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    high, low = sorted([luminance(a), luminance(b)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_are_the_values():
    strip = token_strip(["a", " b", " c", " d", " e"], [2.0, -1.0, 0.0, None, -2], unit="nats")
    tokens = Spans(strip).tokens
    assert [text for _, text in tokens] == ["a", " b", " c", " e"]  # " d" has no number
    a, b, c, e = (colour(attributes) for attributes, _ in tokens)
    assert a[0] > a[2] and b[2] > b[0]  # red above zero, blue below
    assert c[3] == 0
    assert a[3] == e[3] == pytest.approx(2 * b[3])
    assert [attributes["title"] for attributes, _ in tokens] == [
        "+2 nats",
        "-1 nats",
        "0 nats",
        "-2 nats",
    ]
    assert " d" in Spans(strip).text


def test_every_number_is_reached_by_mouse_keyboard_and_screen_reader():
    for attributes, text in Spans(token_strip(["x", "y"], [0.5, 0.25], unit="share")).tokens:
        assert attributes["tabindex"] == "0"
        assert attributes["title"] == attributes["data-number"]
        assert attributes["aria-label"] == f"{text}: {attributes['title']}"
        assert attributes["role"] == "img"


@pytest.mark.parametrize("value", [1.0, -1.0, 0.3])
@pytest.mark.parametrize(("ink", "paper"), LIGHT + DARK)
def test_letters_stay_readable_in_light_and_dark(value, ink, paper):
    red, green, blue, alpha = colour(
        Spans(token_strip(["x"], [value], unit="u", limit=1)).tokens[0][0]
    )
    mixed = tuple(
        alpha * c + (1 - alpha) * p for c, p in zip((red, green, blue), rgb(paper), strict=True)
    )
    assert contrast(rgb(ink), mixed) >= 4.5
    assert contrast(mixed, rgb(paper)) > (1.3 if abs(value) == 1 else 1.05)


def test_the_two_colours_are_told_apart_without_red_and_green():
    """Hues on both sides of the axis that red-green blindness leaves: blue and orange."""
    strip = token_strip(["x", "y"], [1, -1], unit="u")
    hues = [colorsys.rgb_to_hsv(*colour(a)[:3])[0] * 360 for a, _ in Spans(strip).tokens]
    assert 15 < hues[0] < 60 and 190 < hues[1] < 260


def test_a_limit_makes_strips_comparable():
    small, large = (token_strip(["x"], [v], unit="u", limit=4) for v in (1, 2))
    assert colour(Spans(large).tokens[0][0])[3] == pytest.approx(
        2 * colour(Spans(small).tokens[0][0])[3], abs=1e-3
    )
    assert colour(Spans(token_strip(["x"], [9], unit="u", limit=4)).tokens[0][0])[3] == 0.6


def test_a_scale_is_shown():
    assert "-0.5" in Spans(token_strip(["x", "y"], [0.25, -0.5], unit="nats")).text
    shown = Spans(token_strip(["x", "y"], [0.25, 0.5], unit="nats per token")).text
    assert "0.5" in shown and "-0.5" not in shown and "nats per token" in shown
    for values in ([0, 0], [None, float("nan")], []):
        strip = token_strip(["x", "y"][: len(values)], values, unit="nats")
        assert all(colour(attributes)[3] == 0 for attributes, _ in Spans(strip).tokens)


def test_hostile_tokens_are_text():
    strip = token_strip(HOSTILE, range(len(HOSTILE)), unit=HOSTILE[1], title=HOSTILE[0])
    page = Spans(strip)
    assert page.tags == {"div", "style", "p", "b", "span", "bdi"}
    assert [text for _, text in page.tokens] == [words.visible(token, 200) for token in HOSTILE]
    for attributes, _ in page.tokens:
        assert set(attributes) == {
            *("class", "style", "tabindex", "role", "title", "aria-label", "data-number"),
        }
        assert words.visible(HOSTILE[1], 60) in attributes["title"]
    for hidden in ("\u202e", "\u200b", "\x1b", "\ud800"):
        assert hidden not in strip._repr_html_()
    assert len(strip._repr_html_()) < 12_000
    assert HOSTILE[0] in page.text


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_any_tokens_come_back_as_they_are_shown(tokens):
    found = Spans(token_strip(tokens, range(1, len(tokens) + 1), unit="u")).tokens
    assert [text for _, text in found] == [words.visible(token) for token in tokens if token]
    assert [attributes["aria-label"] for attributes, _ in found] == [
        f"{words.visible(token)}: {i} u" for i, token in enumerate(tokens, 1) if token
    ]


def test_a_right_to_left_text_runs_from_right_to_left():
    def direction(*tokens: str) -> str:
        found = re.search(
            r'dir="(\w+)"', token_strip(tokens, [1] * len(tokens), unit="u")._repr_html_()
        )
        assert found
        return found[1]

    arabic = "\u0627\u0644"
    assert direction(arabic, " b") == "rtl"
    assert direction("1", "a", arabic) == "ltr"
    assert direction("12", "!") == "ltr"


def test_values_come_from_anywhere_and_must_fit():
    for values in (np.array([1.5, np.nan]), pd.array([1.5, pd.NA], dtype="Float64")):
        strip = token_strip(["a", "b"], values, unit="u")
        assert [a["title"] for a, _ in Spans(strip).tokens] == ["1.5 u"]
    with pytest.raises(UsageError, match="2 tokens and 1 values"):
        token_strip(["a", "b"], [1], unit="u")
    with pytest.raises(UsageError, match="'high'"):
        token_strip(["a"], ["high"], unit="u")
    with pytest.raises(UsageError, match="limit"):
        token_strip(["a"], [1], unit="u", limit=0)
    infinite = Spans(token_strip(["a", "b"], [1, float("-inf")], unit="u")).tokens
    assert infinite[1][0]["title"] == "-inf u"
    assert colour(infinite[1][0])[3] == 0.6


def test_a_long_text_says_what_it_leaves_out():
    strip = token_strip(["x"] * 1000, range(1000), unit="u")
    assert len(Spans(strip).tokens) == 600
    assert "400 more tokens" in Spans(strip).text


# Of results ---------------------------------------------------------------------------------------


def test_triggers_show_their_coefficient_at_their_token():
    result = result_of(browsable(layers=2, sign=True))
    rows = result.tables["triggers"].query("layer == 1 and key == 5")
    strips = result.tokens("triggers", layer=1, key=5)
    assert len(strips) == len(rows) == 6
    assert strips.unit == "coefficient"
    assert strips.title == "key 1.5"
    tokens = Spans(strips).tokens
    for (attributes, text), row in zip(tokens, rows.itertuples(), strict=True):
        assert text == row.token
        assert attributes["title"].startswith(f"{row.coefficient:+.4g} ")
    texts = ["".join(strip.tokens) for strip in strips.strips]
    for text, row in zip(texts, rows.itertuples(), strict=True):
        assert text.lstrip("\u2026") in row.prefix + row.following
        assert (row.prefix + row.following[:100]).endswith(text.lstrip("\u2026"))
    one = result.tokens("triggers", layer=1, key=5, sign=-1, rows=2)
    assert len(one) == 2 and "2 of 3" in one.note
    assert [strip.label.split(", ")[0] for strip in strips.strips] == ["sign 1"] * 3 + [
        "sign -1"
    ] * 3
    assert all(strip.label.startswith("rank") for strip in one.strips)


def test_a_notebook_says_that_there_are_strips():
    assert (
        "<code>result.tokens(&#x27;triggers&#x27;)</code>" in result_of(browsable())._repr_html_()
    )
    assert "result.tokens(" not in fake_heads()._repr_html_()


def test_without_a_key_it_is_the_pages_first():
    result = result_of(browsable())
    keys = result.tables["keys"]
    agree = keys[keys["agreement_folded"].fillna(False)]
    first = (agree if len(agree) else keys).sort_values("same_last_token").iloc[-1]
    assert result.tokens().title == f"key {first['layer']}.{first['key']}"


def test_contexts_show_every_token_at_which_the_feature_fires(superposition):  # noqa: F811
    strips = superposition.tokens("contexts", feature=0)
    assert [a["title"].split()[0] for a, _ in Spans(strips).tokens] == ["1", "3", "1.5"]
    first, second = strips.strips
    assert first.tokens == ("The", " big", " cat", " sat down")
    assert first.values == (None, 1.0, 3.0, None)
    assert first.tokens[first.marked] == " cat"
    assert second.tokens == ("So\n", "\U0001f642", "!")
    assert "So\\n" in Spans(strips).text
    assert superposition.tokens(feature=2).title == "feature 2"


def test_a_long_prefix_is_cut_and_keeps_its_places(superposition):  # noqa: F811
    table = superposition.tables["contexts"]
    table.at[0, "prefix"] = "w" * 500 + "The big cat"
    table.at[0, "active_from"], table.at[0, "active_to"] = [10, 503, 507], [13, 507, 511]
    table.at[0, "active_value"] = [9.0, 1.0, 3.0]
    (strip, _) = superposition.tokens(feature=0).strips
    assert strip.tokens[0] == "\u2026"
    assert dict(zip(strip.tokens, strip.values, strict=True)) | {" big": 1.0, " cat": 3.0} == dict(
        zip(strip.tokens, strip.values, strict=True)
    )
    assert 9.0 not in strip.values


def test_pairs_of_tokens_show_who_asks(full):  # noqa: F811
    table = full.tables["examples"]
    layer, head = (int(table[name].iloc[-1]) for name in ("layer", "head"))
    own = table.query("layer == @layer and head == @head")
    strips = full.tokens("examples", layer=layer, head=head, value="score", rows=100)
    assert len(strips) == own["query"].nunique()
    for strip, (query, rows) in zip(strips.strips, own.groupby("query"), strict=True):
        assert strip.tokens == tuple(rows["key_token"])
        assert strip.values == tuple(rows["score"])
        assert rows["key"].iloc[strip.marked] == query
    assert full.tokens(layer=layer, head=head).unit.startswith("content")


def test_what_cannot_be_shown_is_told(superposition):  # noqa: F811
    with pytest.raises(InterpError, match="stored no tokens"):
        fake_heads().tokens()
    with pytest.raises(InterpError, match="it has them in contexts"):
        superposition.tokens("features")
    with pytest.raises(UsageError, match="Did you mean 'feature'"):
        superposition.tokens(featur=1)
    with pytest.raises(InterpError, match="no rows of feature 1"):
        superposition.tokens(feature=1)
    with pytest.raises(UsageError, match="coloured by activation"):
        superposition.tokens(value="rank")
    with pytest.raises(UsageError, match="rows"):
        superposition.tokens(rows=0)


FOCUS = """
<script>
window.addEventListener("load", function () {
  var tokens = document.querySelectorAll("[tabindex]");
  tokens[0].focus();
  seen.focused = document.activeElement === tokens[0];
  seen.shown = getComputedStyle(tokens[0], "::after").content;
  seen.hidden = getComputedStyle(tokens[1], "::after").content;
  seen.tokens = tokens.length;
  seen.broken = window.broken === undefined ? null : window.broken;
  seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.body.innerHTML = "";
  document.body.appendChild(document.createElement("pre")).textContent = JSON.stringify(seen);
});
</script>
"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_hostile_strips_in_a_browser(tmp_path: Path):
    strip = token_strip(HOSTILE, np.linspace(-1, 1, len(HOSTILE)), unit="nats", title=HOSTILE[2])
    page = f'<!doctype html><meta charset="utf-8">{PROBE}{strip._repr_html_()}{FOCUS}'
    seen = in_browser(page, tmp_path, 500)
    assert seen["errors"] == [] and seen["broken"] is None
    assert seen["tokens"] == len(HOSTILE)
    assert seen["focused"]
    assert json.loads(seen["shown"]) == "-1 nats"
    assert seen["hidden"] == "none"
    assert seen["wide"] <= 0


def test_a_result_with_strips_needs_no_model(tmp_path: Path):
    from interp.results import load_result

    made = result_of(browsable())
    made.save(tmp_path / "r")
    loaded: Result = load_result(tmp_path / "r")
    assert loaded.tokens()._repr_html_() == made.tokens()._repr_html_()
