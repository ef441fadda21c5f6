"""How an ffn-keys run is told, on made-up results: true words, one page that stays small."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.cells import cell_len

from interp import report
from interp.analyzers.ffn_keys import columns, kinds_columns
from interp.report import browser, words
from interp.report.ffn_keys import VIEW
from interp.report.ffn_keys_tables import marked
from interp.results import Column, Result, load_result
from tests.test_report import CHROMIUM, HOSTILE, PROBE, Page, in_browser, text_of

DESCRIBED: dict[str, dict[str, Column]] = {
    "keys": columns.KEYS | kinds_columns.KEYS,
    "triggers": columns.TRIGGERS,
    "ffn_layers": columns.LAYERS | kinds_columns.LAYERS,
    "mutation": kinds_columns.MUTATION,
    "histogram": kinds_columns.HISTOGRAM,
    "prompt_keys": kinds_columns.PROMPT_KEYS,
    "prompt_layers": kinds_columns.PROMPT_LAYERS,
}
TEXT = """the court held that high levels of acid in popular soft drinks could pose a risk to Paris
when 1998 costs rose by half a million na\u00efve \U0001f600 caf\u00e9 owners said on Monday"""
WORDS = TEXT.split()


def result_of(tables: dict[str, pd.DataFrame], **values: Any) -> Result:
    described = {
        name: {column: DESCRIBED[name][column] for column in table}
        for name, table in tables.items()
    }
    known: dict[str, Any] = {
        "analyzer": "ffn-keys",
        "config": {"key": [], "layer": []},
        "model": {"name": "tiny", "n_layers": 30},
        "data": {"source": "news", "documents": 1000, "predicted_tokens": 62549, "context": 64},
        "summary": {"triggers_per_key": 25, "reconstruction_error": 3e-7},
        "tables": tables,
        "columns": described,
    }
    return Result(**(known | values))


def layer_row(layer: int, *, agree: int = 15, last: float = 0.19, **more: Any) -> dict[str, Any]:
    """A layer of 1,536 keys; chance is 0.3 keys (99th percentile 2), by frequency 0.5 (3)."""
    row: dict[str, Any] = {"layer": layer, "keys": 1536, "agreement_keys": 1536}
    for suffix, count in (("", agree + 1), ("_folded", agree)):
        row |= {
            f"agreement_count{suffix}": count,
            f"agreement_rate{suffix}": count / 1536,
            f"agreement_low{suffix}": count / 3072,
            f"agreement_high{suffix}": (count + 4) / 1536,
            f"agreement_null{suffix}": 0.3 / 1536,
            f"agreement_null_99{suffix}": 2 / 1536,
            f"agreement_p{suffix}": 1e-4 if agree > 2 else 0.6,
            f"agreement_q{suffix}": 2e-4 if agree > 2 else 0.6,
            f"agreement_unigram{suffix}": 0.5 / 1536,
            f"agreement_unigram_99{suffix}": 3 / 1536,
        }
    for name, share, null in (
        ("same_last_token", last, 0.08),
        ("same_last_bigram", last / 2, 0.04),
        ("same_last_shape", 0.59, 0.57),
    ):
        row |= {name: share, f"{name}_null": null, f"{name}_null_99": 2 * null}
        row |= {f"{name}_beyond_99": 2 * max(0.0, share - null), f"{name}_chance_99": 0.005}
    row |= {"earlier_similarity": 0.025, "earlier_similarity_null": 0.0205}
    row |= {"earlier_gap": 0.0045, "earlier_gap_low": 0.0037, "earlier_gap_high": 0.0054}
    row |= {"earlier_similarity_beyond": 0.3, "sampled_positions": 1000.0}
    for name, value in (
        ("active_share_90", 0.25),
        ("active_share_99", 0.57),
        ("zero_agreement", 0.5),
        ("zero_agreement_null", 0.695),
        ("unchanged", 0.71),
        ("refined", 0.27),
        ("overridden", 0.02),
    ):
        row |= {name: value, f"{name}_low": value - 0.01, f"{name}_high": value + 0.01}
    row["overridden_low"] = -0.01  # as a t interval may
    return row | more


def layers_result(rows: list[dict[str, Any]], **values: Any) -> Result:
    return result_of({"ffn_layers": pd.DataFrame(rows)}, **values)


def mutation_table(layers: list[int]) -> pd.DataFrame:
    changes = {"first": -0.03, "random": -0.1, "last": -0.94, "all": -1.0}
    return pd.DataFrame(
        [
            {
                **{"layer": layer, "sign": 1, "dropped": dropped, "keys": 100, "triggers": 498},
                **{"change": change, "change_low": change - 0.02, "change_high": change + 0.02},
                **{"change_median": change, "flipped": 0.0},
            }
            for layer in layers
            for dropped, change in changes.items()
        ]
    )


def browsable(
    layers: int = 1,
    keys: int = 8,
    top: int = 3,
    documents: int = 40,
    *,
    sign: bool = False,
    seed: int = 0,
) -> dict[str, pd.DataFrame]:
    """`keys` and `triggers` as a run has them: prefixes of a document are nested."""
    rng = np.random.default_rng(seed)
    n = layers * keys
    tokens = [[" " * (i > 0) + str(rng.choice(WORDS)) for i in range(62)] for _ in range(documents)]
    signs = (1, -1) if sign else (1,)
    rows = []
    for row in range(n):
        for s in signs:
            chosen = rng.choice(documents, top, replace=False)
            size = np.sort(rng.gamma(2.0, 1.0, top))[::-1]
            for rank, (document, c) in enumerate(zip(chosen, size, strict=True), 1):
                at = int(rng.integers(0, 60))
                own = tokens[document]
                rows.append(
                    {
                        **{"layer": row // keys, "key": row % keys, "sign": s, "rank": rank},
                        **{"coefficient": s * c, "document": int(document) * 3},
                        **{"position": at + 1, "token_id": 7, "token": own[at]},
                        **{"next_token_id": 8, "next_token": own[at + 1]},
                        **{"prefix": "".join(own[: at + 1])},
                        **{"following": "".join(own[at + 1 : at + 13])},
                    }
                )
    agrees = pd.array(rng.random(n) < 0.05, dtype="boolean")
    agrees[0] = pd.NA
    vocabulary = [f" token{i}" for i in range(5000)]

    def ends() -> list[list[str]]:
        return [[vocabulary[i] for i in rng.integers(0, 5000, 10)] for _ in range(n)]

    table = pd.DataFrame(
        {
            "layer": np.repeat(np.arange(layers), keys),
            "key": np.tile(np.arange(keys), layers),
            "coefficient_mean": rng.normal(size=n),
            "coefficient_max": rng.gamma(3.0, 1.0, n),
            "active_fraction": rng.random(n),
            "value_norm": rng.gamma(3.0, 1.0, n),
            "value_top_ids": [[1, 2]] * n,
            "value_top_tokens": ends(),
            "value_bottom_tokens": ends(),
            "value_kurtosis": rng.normal(size=n),
            "value_top_tokens_folded": ends(),
            "value_bottom_tokens_folded": ends(),
            "agreement_folded": agrees,
            "next_token_rank_folded": pd.array(rng.integers(1, 5000, n), dtype="Int64"),
            "same_last_token": rng.random(n),
            "same_last_token_null": 0.08,
            "earlier_similarity": rng.random(n),
        }
    )
    return {"keys": table, "triggers": pd.DataFrame(rows)}


def prompt_result(**values: Any) -> Result:
    n = 25
    direct = np.linspace(1.5, 0.1, n) * np.where(np.arange(n) % 5 == 3, -1, 1)
    keys = pd.DataFrame(
        {
            "rank": np.arange(1, n + 1),
            "layer": 29 - np.arange(n) // 4,
            "key": np.arange(n) * 11,
            "coefficient": 2.0,
            "contribution": direct,
            "contribution_centred": direct - 0.1,
            "ablated_logit": -0.8 * direct,
            "ablated_log_prob": -0.5 * direct,
            "value_top_tokens": [[" Paris", " Lyon", "<b>x</b>"]] * n,
            "value_bottom_tokens": [[" Rome"]] * n,
        }
    )
    raised, lowered = np.linspace(0.2, 4, 30), -np.linspace(0.1, 3, 30)
    layers = pd.DataFrame(
        {
            **{"layer": np.arange(30), "ffn": raised + lowered, "keys": raised + lowered},
            **{"bias": 0.0, "error": 1e-7, "raised": raised, "lowered": lowered},
            **{"ffn_centred": raised + lowered},
        }
    )
    summary = {
        "prompt": {
            **{"target": " Paris", "rank": 1, "says": " Paris", "logit": 18.5, "log_prob": -0.7},
            **{"ffn": 7.25, "rest": 11.25, "sum_error": 2e-6, "logit_error": 1e-5},
            **{"contribution_and_ablation": 0.97},
        }
    }
    config = {"prompt": "The capital of France is", "target": " Paris", "key": []}
    made = {"prompt_keys": keys, "prompt_layers": layers}
    return result_of(made, **({"summary": summary, "config": config, "data": {}} | values))


def told(result: Result) -> str:
    return "\n".join(VIEW.findings(result))


def sentence(result: Result, part: str) -> str:
    found = [s for s in VIEW.findings(result) if part in s]
    assert len(found) == 1, (part, VIEW.findings(result))
    return found[0]


# Findings -----------------------------------------------------------------------------------------


def test_agreement_beyond_both_nulls_is_told_with_its_count_interval_and_nulls():
    first = VIEW.findings(layers_result([layer_row(27)]))[0]
    assert first.startswith("Layer 27: for 15 of 1,536 keys (0.98% [0.49%, 1.2%])")
    assert "0.3 with next tokens shuffled over the keys (99th percentile 2)" in first
    assert "0.5 with next tokens drawn by frequency (99th percentile 3)" in first
    assert "more than chance (p 1e-04), and still few keys" in first
    assert "raw: 16" in first


@pytest.mark.parametrize(
    "row",
    [
        layer_row(6, agree=0),
        layer_row(6, agree=2),  # as many as the shuffles' 99th percentile
        layer_row(6, agree_folded=3) | {"agreement_rate_folded": 3 / 1536},  # beyond one null only
        layer_row(6) | {"agreement_q_folded": 0.2},  # not after correction over the layers
    ],
)
def test_agreement_within_a_null_is_no_more_than_chance(row):
    row.pop("agree_folded", None)
    result = layers_result([])
    result.tables["ffn_layers"] = pd.DataFrame([row])
    first = VIEW.findings(result)[0]
    assert "no more than chance" in first
    assert "still few" not in first


def test_many_layers_are_told_by_how_many_are_beyond_chance_and_the_strongest():
    rows = [layer_row(i, agree=20 if i == 28 else 9 if i > 24 else 0) for i in range(30)]
    found = VIEW.findings(layers_result(rows))
    assert found[0].startswith("In 5 of 30 layers")
    assert found[0].endswith("over the layers): 25, 26, 27, 28, 29.")
    assert found[1].startswith("Most in layer 28: for 20 of 1,536 keys")
    none = VIEW.findings(layers_result([layer_row(i, agree=0) for i in range(30)]))
    assert none[0].startswith("In 0 of 30 layers")
    assert "Most in" not in "".join(none)
    # The first, the middle and the last stand for all.
    assert [s for s in found if "layer 0:" in s and "layer 15:" in s and "layer 29:" in s]


def test_last_tokens_stand_against_random_positions():
    strong = sentence(layers_result([layer_row(6, last=0.19)]), "end in the same token")
    assert "against as many random positions" in strong
    assert "19% against 8% (22% of keys, by chance 0.5%)" in strong
    weak = layers_result([layer_row(6, last=0.081) | {"same_last_token_beyond_99": 0.006}])
    assert "(0.6% of keys, by chance 0.5%: no more than chance)" in sentence(
        weak, "end in the same token"
    )


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.001, 0.002, "the triggers' texts have more in common"),
        (-0.002, 0.002, "not told from 0"),
        (-0.3, -0.1, "the triggers' texts have less in common"),
    ],
)
def test_the_interval_decides_about_earlier_text(low, high, verdict):
    row = layer_row(6, earlier_gap_low=low, earlier_gap_high=high)
    told = sentence(layers_result([row]), "texts before a key's triggers")
    assert verdict in told
    # What is compared with what, which way is which, and what chance gives.
    assert "than the texts before other positions with the same last token?" in told
    assert "the triggers' minus the others': " in told
    assert "By chance 5% of keys lie above all draws." in told


def test_mutation_names_each_dropped_token_and_what_unrelated_text_gives():
    result = result_of({"mutation": mutation_table([6])})
    text = sentence(result, "token of its prefix is dropped")
    assert "100 sampled keys" in text
    for part in (
        "the last token -94% [-96%, -92%]",
        "a random one -10% [-12%, -8%]",
        "the first -3% [-5%, -1%]",
        "an unrelated text -100%",
    ):
        assert part in text


def test_mixture_is_told_with_intervals_and_its_null():
    result = layers_result([layer_row(6)])
    assert "25% [24%, 26%] (all but 1%: 57% [56%, 58%])" in sentence(result, "Many keys make one")
    zero = sentence(result, "none of these keys")
    assert "as the null: 50% [49%, 51%], against 70% [68%, 70%]" in zero
    assert "not told from chance" not in zero
    same = layers_result([layer_row(6) | {"zero_agreement_high": 0.69}])
    assert "not told from chance" in sentence(same, "none of these keys")
    moved = sentence(result, "stream's top token")
    assert "71% [70%, 72%] unchanged, 27% [26%, 28%] refined" in moved
    assert "2% [0%, 3%] overridden" in moved
    assert "1,000 positions" in moved


def test_a_trend_is_told_only_where_it_was_measured():
    one = {"layers": 1, "not_measurable": "1 layers were measured"}
    result = layers_result([layer_row(6)], summary={"depth": one})
    assert "From layer to layer" not in told(result)
    depth = {"layers": 30, "same_last_token": {"rho": -0.9, "low": -0.92, "high": -0.85}}
    depth["same_last_token"]["trend"] = "falls"
    text = sentence(layers_result([layer_row(6)], summary={"depth": depth}), "From layer to layer")
    assert "the same last token (beyond chance) falls (rho -0.90 [-0.92, -0.85])" in text
    assert "random weights" in text
    assert "bigram" not in text


def test_what_was_not_measured_is_left_out():
    row = {"layer": 6, "keys": 4, "documents": 9, "positions": 90, "agreement_keys": 0}
    row |= {"agreement_rate_folded": np.nan, "same_last_token": np.nan, "unchanged": np.nan}
    result = layers_result([row], summary={})
    assert VIEW.findings(result) == []
    assert result.figures == []
    assert not re.search(r"\bnan\b|None", text_of(result))


def test_a_prompt_is_told_with_parts_keys_removal_and_check():
    result = prompt_result()
    text = told(result)
    assert (
        'After "The capital of France is" the token " Paris" has rank 1, probability 50%.' in text
    )
    assert "Of its logit of +18.50 the FFNs of all layers add +7.25" in text
    assert "in logits: 29.0 (+1.50, above the mean of all tokens +1.40; here it raises" in text
    assert 'raises " Paris" " Lyon" "<b>x</b>")' in text
    assert "25 of 25 of the largest keys move the logit the way" in text
    assert "(rank correlation +0.97)" in text
    assert "29.0: -1.20 logits, directly -1.50 was expected" in text
    assert "within 2e-06 logits, all parts to the logit within 1e-05" in text
    table = result.tables["prompt_keys"]
    table["ablated_logit"] = np.where(table["rank"] <= 5, 0.4, -0.4) * table["contribution"]
    assert "20 of 25 of the largest" in told(result)


def test_with_a_negative_coefficient_a_key_raises_what_its_value_lowers():
    result = prompt_result()
    result.tables["prompt_keys"]["coefficient"] = -2.0
    assert '29.0 (+1.50, above the mean of all tokens +1.40; here it raises " Rome")' in told(
        result
    )
    assert '" Rome"' in text_of(result, rows=1)
    assert "Rome" in result.figure("prompt_keys").data[0].hovertext[0]


def test_a_prompt_says_what_the_model_says_instead():
    summary = prompt_result().summary
    summary["prompt"] |= {"rank": 12, "says": " the", "log_prob": -5.0}
    assert 'has rank 12, probability 1%; the model says " the".' in told(
        prompt_result(summary=summary)
    )


# The terminal -------------------------------------------------------------------------------------


def everything(**values: Any) -> Result:
    tables = browsable(2, 8, sign=True) | {
        "ffn_layers": pd.DataFrame([layer_row(0), layer_row(1)]),
        "mutation": mutation_table([0, 1]),
        **prompt_result().tables,
    }
    return result_of(tables, **({"summary": prompt_result().summary} | values))


def histogram(layer: int = 0, key: int = 3) -> pd.DataFrame:
    edges = np.linspace(-0.5, 3.5, 41)
    counts = np.r_[5000, 300, np.zeros(37, dtype=int), 2]
    bins = {"low": edges[:-1], "high": edges[1:], "positions": counts[:40]}
    return pd.DataFrame({"layer": layer, "key": key, **bins})


def test_everything_fits_80_columns():
    result = everything()
    shown = text_of(result)
    assert max(cell_len(line) for line in shown.splitlines()) <= 80
    assert "[[" in shown
    assert not re.search(r"\bnan\b|None|NA>", shown)
    assert text_of(result, rows=0)


def test_keys_that_agree_come_first_with_their_best_triggers():
    result = everything()
    keys, triggers = result.tables["keys"], result.tables["triggers"]
    keys["agreement_folded"] = pd.array(keys.index == 9, dtype="boolean")
    own = triggers[(triggers["layer"] == 1) & (triggers["key"] == 1) & (triggers["sign"] == 1)]
    first = VIEW.digests(result)[0]
    assert first.title.startswith("Key 1.1:")
    assert len(first.rows) == 3
    token = own.iloc[0]["token"]
    assert f"[[{token}]]" in first.rows[0][0]
    assert first.rows[0][1] == f"{own.iloc[0]['coefficient']:.3g}"
    assert "not a typical one" in first.note
    assert not first.page


def test_a_key_asked_for_is_told_in_full_with_its_histogram():
    tables = browsable(1, 1, top=7) | {"histogram": histogram(0, 0)}
    result = result_of(tables, config={"key": [0], "layer": [0]})
    story, bins = VIEW.digests(result)
    assert len(story.rows) == 7
    assert "not a typical one" not in story.note
    assert [row[1] for row in bins.rows] == ["5,300", *["0"] * 8, "2"]
    assert bins.rows[0][0].endswith("-0.5 to      -0.1  ####")
    assert [row[2] for row in bins.rows] == [">99.9%", *["0%"] * 8, "<0.1%"]
    assert max(cell_len(line) for line in text_of(result).splitlines()) <= 80


def test_single_keys_are_told_by_themselves_and_not_as_rates_of_their_layer():
    tables = browsable(1, 2, top=7) | {"ffn_layers": pd.DataFrame([layer_row(0)])}
    tables["keys"]["same_last_token"] = [0.8, 0.2]
    tables["keys"]["next_token_rank_folded"] = pd.array([4, pd.NA], dtype="Int64")
    result = result_of(tables, config={"key": [0, 1], "layer": [0]})
    first, second, *_ = VIEW.findings(result)
    assert first.startswith("Key 0.0: largest coefficient")
    assert "80% of its triggers end in the same token, of as many random positions 8%" in first
    assert "the token after its first trigger has rank 4 there" in first
    assert "rank" not in second
    assert "more than chance" not in told(result)
    assert {"agreement", "last_token"}.isdisjoint(result.figures)


@pytest.mark.parametrize(
    ("prefix", "token", "following", "shown"),
    [
        ("in Paris", " Paris", " and", "in[[ Paris]] and"),
        ("Paris", " Paris", "", "[[Paris]]"),  # a piece whose space the text does not have
        ("so \U0001f600", "\\xf0\\x9f", " x", "so [[\U0001f600]] x"),  # a part of a character
        ("a" * 60 + "b", "b", "", ".." + "a" * 36 + "[[b]]"),
        ("x\ny", "\n y", "", "x\\n[[y]]"),
        ("", "a", "", "[[]]"),
    ],
)
def test_the_token_is_marked_in_its_text(prefix, token, following, shown):
    assert marked(prefix, token, following) == shown


# Figures ------------------------------------------------------------------------------------------


def test_every_figure_is_drawn_with_title_axes_and_the_tables_numbers():
    result = everything()
    result.tables["histogram"] = histogram()
    assert set(result.figures) == {
        *("prompt_keys", "prompt_layers", "histogram", "agreement", "last_token", "mutation"),
        *("mixture", "prediction"),
    }
    for name in result.figures:
        figure = result.figure(name)
        assert figure.layout.meta["title"]
        assert figure.layout.xaxis.title.text or figure.layout.xaxis2.title.text, name
        assert figure.layout.yaxis.title.text, name
        assert not any(
            trace.mode and "lines" in trace.mode for trace in figure.data if "mode" in trace
        )
    measured = result.figure("agreement").data[-1]
    np.testing.assert_allclose(measured.y, [100 * 15 / 1536] * 2)
    np.testing.assert_allclose(measured.error_y.array, [100 * 4 / 1536] * 2)
    np.testing.assert_allclose(measured.error_y.arrayminus, [100 * 7.5 / 1536] * 2)
    null = result.figure("agreement").data[0]
    np.testing.assert_allclose(null.y, [100 * 2 / 1536] * 2)
    last = next(t for t in result.figure("mutation").data if t.name == "last token dropped")
    np.testing.assert_allclose(last.y, [-94, -94])
    bars, removed = result.figure("prompt_keys").data
    np.testing.assert_allclose(bars.x, result.tables["prompt_keys"]["contribution"])
    np.testing.assert_allclose(removed.x, -result.tables["prompt_keys"]["ablated_logit"])
    assert "&lt;b&gt;x&lt;/b&gt;" in bars.hovertext[0]


def test_the_interval_of_last_tokens_is_over_the_layers_keys():
    result = everything()
    dots = result.figure("last_token").data[1]
    values = result.tables["keys"].query("layer == 1")["same_last_token"]
    half = 2.3646 * values.std(ddof=1) / np.sqrt(8)  # t of 7 degrees of freedom
    top = dots.y[1] + dots.error_y.array[1]
    assert top == pytest.approx(100 * (values.mean() + half), rel=1e-4)


# The browser --------------------------------------------------------------------------------------


def packed(result: Result, limit: int = browser.BYTES) -> tuple[dict[str, Any], str]:
    assert VIEW.browser is not None
    found = browser.pack(VIEW.browser, result, limit)
    assert not set("<>&") & set(found.text)
    return json.loads(found.text), found.note


def units(text: str, low: int, high: int) -> str:
    """text.slice(low, high) of JavaScript."""
    return text.encode("utf-16-le")[2 * low : 2 * high].decode("utf-16-le")


def opened(data: dict[str, Any]) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Per row its examples, as page.js shows them."""
    out: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    where = {w["name"]: w for w in data["where"]}
    for i, name in enumerate(zip(*data["by"], strict=True)):
        own = []
        for e in range(data["start"][i], data["start"][i + 1]):
            p = data["place"][e]
            text = data["texts"][data["text"][p]]
            cuts = [data[k][p] for k in ("from", "mark", "end", "to")]
            own.append(
                (
                    *(units(text, a, b) for a, b in itertools.pairwise(cuts)),
                    data["strings"][where["next_token"]["values"][p]],
                    where["document"]["values"][p],
                    where["position"]["values"][p],
                    data["measured"][0]["values"][e],
                    data["groups"][data["group"][e]],
                )
            )
        out[name] = own
    return out


def test_the_browser_holds_what_the_tables_hold():
    result = result_of(browsable(2, 20, top=4, sign=True))
    data, note = packed(result)
    keys, triggers = result.tables["keys"], result.tables["triggers"]
    assert note.startswith("All 40 keys, by agreement_folded, then same_last_token,")
    rows = list(zip(*data["by"], strict=True))
    ordered = keys.assign(a=keys["agreement_folded"].astype("Float64").fillna(-1)).sort_values(
        ["a", "same_last_token"], ascending=False
    )
    assert rows == list(zip(ordered["layer"], ordered["key"], strict=True))
    by_key = keys.set_index(["layer", "key"])
    named = {c["name"]: c for c in data["columns"]}
    assert "value_top_ids" not in named
    for name in ("same_last_token", "coefficient_max", "value_kurtosis"):
        np.testing.assert_allclose(named[name]["values"], by_key.loc[rows, name], rtol=1e-4)
    agrees = [None if v is pd.NA else bool(v) for v in by_key.loc[rows, "agreement_folded"]]
    assert named["agreement_folded"]["values"] == agrees
    assert None in agrees
    assert named["next_token_rank_folded"]["values"] == list(
        by_key.loc[rows, "next_token_rank_folded"]
    )
    raises = data["tokens"][0]
    assert raises["heading"] == "value raises"
    assert [[data["strings"][t] for t in row] for row in raises["values"]] == list(
        by_key.loc[rows, "value_top_tokens_folded"]
    )
    found = opened(data)
    groups: Any = triggers.groupby(["layer", "key"])
    for name, part in groups:
        want = []
        for row in part.to_dict("records"):
            prefix, token = row["prefix"], row["token"]
            before = prefix[: len(prefix) - len(token)][-browser.BEFORE :]
            group = data["groups"][0 if row["sign"] == 1 else 1]
            want.append(
                (
                    *(before, token, row["following"][: browser.AFTER], row["next_token"]),
                    *(row["document"], row["position"]),
                    *(pytest.approx(row["coefficient"], rel=1e-4), group),
                )
            )
        assert found[name] == want
    # Nested prefixes are one text, not many.
    assert len(data["texts"]) <= 40


def test_hostile_texts_are_shown_by_their_escapes_and_cut_where_the_token_ends():
    tables = browsable(1, len(HOSTILE), top=1)
    triggers = tables["triggers"]
    prefixes = [f"before {i} {text}" for i, text in enumerate(HOSTILE)]
    for name, texts in (("token", HOSTILE), ("prefix", prefixes), ("next_token", HOSTILE[::-1])):
        triggers[name] = pd.Series(texts, dtype=object)
    tables["keys"]["value_top_tokens_folded"] = [HOSTILE] * len(HOSTILE)
    data, _ = packed(result_of(tables))
    found = opened(data)
    for i, text in enumerate(HOSTILE):
        before, token, *_ = found[0, i][0]
        assert before == f"before {i} "
        assert token == words.visible(text)
        assert not set("\u202e\u200b\x1b\ud800") & set(token)
    assert max(map(len, data["strings"])) < 300
    page = report.render([result_of(tables)])
    assert "<script>window.broken" not in page
    assert "onmouseover" in page  # as text, inside the data
    tags = [tag for tag, _ in Page(page).tags]
    assert not {"img", "b", "i"} & set(tags)


def test_long_texts_keep_only_the_stretches_that_are_shown():
    pieces = [f" w{i}" for i in range(4000)]
    whole = "".join(pieces)
    ends = [len("".join(pieces[: n + 1])) for n in (10, 3000)]
    tables = browsable(1, 2, top=1)
    tables["triggers"]["prefix"] = [whole[:end] for end in ends]
    tables["triggers"]["token"] = [" w10", " w3000"]
    tables["triggers"]["following"] = [whole[end : end + 40] for end in ends]
    data, _ = packed(result_of(tables))
    assert sum(map(len, data["texts"])) < 400
    assert sorted(data["whole"]) == [0, 1]
    (first,), (second,) = opened(data)[0, 0], opened(data)[0, 1]
    assert first[:2] == (whole[: ends[0] - 4], " w10")
    assert second[:3] == (whole[ends[1] - 6 - 200 : ends[1] - 6], " w3000", whole[ends[1] :][:40])


def test_what_does_not_fit_is_left_out_examples_first_and_the_note_says_so():
    result = result_of(browsable(3, 40, top=25))
    whole, _ = packed(result)
    size = len(json.dumps(whole, separators=(",", ":")))
    fewer, note = packed(result, size * 2 // 3)
    assert len(fewer["by"][0]) == 120
    (kept,) = {len(own) for own in opened(fewer).values()}
    assert 1 < kept < 25
    assert f"Of each one's up to 25 triggers the first {kept} are here" in note
    assert "triggers.parquet" in note
    data, note = packed(result, size // 6)
    layers = pd.Series(data["by"][0]).value_counts()
    assert len(layers) == 3
    assert layers.nunique() == 1
    assert f"{len(data['by'][0])} of 120 keys, as many of each layer, are here" in note
    assert "agreement_folded, then same_last_token, then coefficient_max" in note
    assert "most extreme, not typical" in note
    one, _ = packed(result, 10)  # nothing fits: one of each layer, and an end
    assert one["by"][0] == [0, 1, 2] or sorted(one["by"][0]) == [0, 1, 2]


def test_3072_keys_make_a_page_of_less_than_15_megabytes():
    tables = browsable(1, 3072, top=25, documents=1000)
    result = result_of(tables | {"ffn_layers": pd.DataFrame([layer_row(0)])})
    page = report.render([result])
    assert len(page.encode()) < 15_000_000
    data, note = packed(result)
    assert len(data["by"][0]) == 3072
    assert len(data["place"]) == 3072 * 25
    assert "left out" not in note
    assert "up to 25" not in note


def test_texts_that_share_nothing_do_not_make_a_page_larger():
    tables = browsable(1, 200, top=25)
    triggers = tables["triggers"]
    unlike = [f"{i} " + "\u4e2d" * 300 for i in range(len(triggers))]
    both = zip(unlike, triggers["token"], strict=True)
    triggers["prefix"] = [text + token for text, token in both]
    assert VIEW.browser is not None
    found = browser.pack(VIEW.browser, result_of(tables), 500_000)
    assert len(found.text) <= 500_000
    assert "most extreme, not typical" in found.note
    assert len(json.loads(found.text)["by"][0]) > 100


def test_an_interrupted_run_has_keys_without_values():
    tables = browsable(2, 4) | {"ffn_layers": pd.DataFrame([layer_row(0), {"layer": 1}])}
    late = tables["keys"]["layer"] == 1
    for name in ("value_top_tokens_folded", "value_bottom_tokens_folded", "value_top_tokens"):
        tables["keys"][name] = tables["keys"][name].where(~late, None)
    for name in ("agreement_folded", "next_token_rank_folded", "same_last_token"):
        tables["keys"][name] = tables["keys"][name].where(~late)
    result = result_of(tables, complete=False)
    data, _ = packed(result)
    assert data["by"][0] == [0] * 4 + [1] * 4  # what is missing comes last
    assert [len(row) for row in data["tokens"][0]["values"]] == [10] * 4 + [0] * 4
    assert not re.search(r"\bnan\b|None|NA>", text_of(result))
    for name in result.figures:
        result.figure(name)
    assert "interrupted" in report.render([result])


def test_two_results_share_the_page():
    one = result_of(browsable(1, 50, top=25))
    page = report.render([one, dataclasses.replace(one)])
    assert page.count('class="browser"') == 2
    assert 'id="r0-browser"' in page
    assert 'id="r1-browser"' in page


def test_a_browser_takes_the_place_of_its_tables_and_explains_their_columns():
    page = Page(report.render([everything()]))
    assert "Table keys" not in page.text
    assert "Table ffn_layers" in page.text
    assert "What the columns of triggers mean" in page.text
    assert columns.TRIGGERS["coefficient"].description in page.text
    # Stories of single keys are for the terminal.
    assert "[[" not in page.text


def test_the_browser_is_that_of_a_loaded_run(tmp_path: Path):
    result = result_of(browsable(1, 6, sign=True))
    loaded = load_result(result.save(tmp_path / "run"))
    assert packed(loaded) == packed(result)
    assert VIEW.findings(loaded) == VIEW.findings(result)


# In a browser -------------------------------------------------------------------------------------

CHECK = """
<script>
window.addEventListener("load", function () { setTimeout(function () {
  var root = document.querySelector(".browser");
  var input = root.querySelector("input"), more = root.querySelector(".more");
  function texts(inside, what) {
    return Array.from(inside.querySelectorAll(what)).map(function (n) { return n.textContent; });
  }
  function names() { return texts(root, "tbody th button"); }
  function column(i) { return texts(root, "tbody tr > :nth-child(" + (i + 1) + ")"); }
  function status() { return root.querySelector("[role=status]").textContent; }
  seen.first = names(); seen.status = status();
  seen.more = more.textContent; more.click(); seen.after = names().length;
  var heads = root.querySelectorAll("thead th button");
  heads[3].focus(); seen.focused = document.activeElement === heads[3];
  heads[3].click(); seen.down = column(3).map(Number);
  seen.sorted = heads[3].parentNode.getAttribute("aria-sort");
  heads[3].click(); seen.up = column(3).map(Number);
  heads[0].click(); seen.named = names();
  var select = root.querySelector("select");
  select.value = select.options[texts(select, "option").indexOf("value_norm")].value;
  select.dispatchEvent(new Event("change"));
  seen.norm = names()[0]; seen.turn = root.querySelector(".turn").textContent;
  select.value = "-2"; select.dispatchEvent(new Event("change")); seen.again = names();
  var button = root.querySelector("tbody th button");
  seen.closed = button.getAttribute("aria-expanded");
  button.click();
  seen.open = button.getAttribute("aria-expanded");
  var story = document.getElementById(button.getAttribute("aria-controls"));
  seen.marks = texts(story, "mark");
  seen.story = story.textContent;
  seen.elements = story.querySelectorAll("img, script, b b, a").length;
  seen.plain = texts(story, ".text");
  button.click(); seen.shut = button.getAttribute("aria-expanded") + story.isConnected;
  function search(text) {
    input.value = text; input.dispatchEvent(new Event("input"));
  }
  var queries = WANTED;
  seen.found = [];
  function next() {
    if (!queries.length) return done();
    search(queries[0]);
    setTimeout(function () { seen.found.push([queries.shift(), names(), status()]); next(); }, 300);
  }
  function done() {
    seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    seen.broken = window.broken === undefined ? null : window.broken;
    seen.requests = performance.getEntriesByType("resource").map(function (e) { return e.name; })
      .filter(function (n) { return n.indexOf("data:") !== 0; });
    document.body.innerHTML = "";
    document.body.appendChild(document.createElement("pre")).textContent = JSON.stringify(seen);
  }
  next();
}, 1500); });
</script>
"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1200, 500])
def test_searching_sorting_and_opening_in_a_browser(tmp_path: Path, width: int):
    tables = browsable(2, 75, top=3)
    keys, triggers = tables["keys"], tables["triggers"]
    keys.loc[7, "same_last_token"] = 2.0
    keys["agreement_folded"] = pd.array([False] * 150, dtype="boolean")
    keys.loc[140, "value_norm"] = 99.0
    keys.at[20, "value_bottom_tokens"] = ["qqmarker"] * 10
    here = (triggers["layer"] == 0) & (triggers["key"] == 7)
    triggers.loc[here, "prefix"] = [f"see zzneedle {HOSTILE[i]}" for i in (0, 1, 4)]
    triggers.loc[here, "token"] = [HOSTILE[i] for i in (0, 1, 4)]
    text = report.render([result_of(tables)])
    wanted = ["1.14", "ZZNeedle", "qqmarker", "nowhere at all", "</script>", ""]
    check = CHECK.replace("WANTED", json.dumps(wanted).replace("<", "\\u003c"))
    text = text.replace("<head>", "<head>" + PROBE, 1).replace("</body>", check + "</body>")
    seen = in_browser(text, tmp_path, width)
    assert seen["errors"] == seen["blocked"] == seen["requests"] == []
    assert seen["broken"] is None
    assert seen["elements"] == 0
    ordered = keys.sort_values("same_last_token", ascending=False)
    names = [f"{i // 75}.{i % 75}" for i in ordered.index]
    assert seen["first"] == names[:100]  # the rest when asked for
    assert seen["again"] == names[:100]
    assert seen["status"] == "150 keys"
    assert seen["more"] == "Show 50 more (100 of 150 shown)"
    assert seen["after"] == 150
    assert seen["focused"]
    assert seen["sorted"] == "descending"
    np.testing.assert_allclose(seen["down"], ordered["same_last_token"][:100], rtol=1e-3)
    np.testing.assert_allclose(seen["up"], ordered["same_last_token"][::-1][:100], rtol=1e-3)
    assert seen["named"] == [f"{i // 75}.{i % 75}" for i in range(100)]
    assert seen["norm"] == "1.65"
    assert seen["turn"] == "largest first"
    assert (seen["closed"], seen["open"], seen["shut"]) == ("false", "true", "falsefalse")
    assert seen["marks"] == [
        HOSTILE[0],
        HOSTILE[1],
        "\\u202e desrever \\u200b zero \\xad soft",
    ]
    assert seen["plain"][0].startswith("see zzneedle </script><script>window.broken")
    assert "Triggers: the largest coefficients (3)" in seen["story"]
    assert "All numbers of key 0.7" in seen["story"]
    results = {query: (rows, status) for query, rows, status in seen["found"]}
    assert results["1.14"] == (["1.14"], "1 of 150 keys")  # a key's name is that key
    assert results["ZZNeedle"] == (["0.7"], "1 of 150 keys")  # in a trigger's text
    assert results["qqmarker"] == (["0.20"], "1 of 150 keys")  # in a value's tokens
    assert results["nowhere at all"] == ([], "0 of 150 keys")
    assert results["</script>"] == (["0.7"], "1 of 150 keys")
    assert results[""][1] == "150 keys"
    assert seen["wide"] <= 0
