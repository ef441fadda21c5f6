"""What an ffn-keys run says beyond triggers and values: complete, finite, invariant."""

import numpy as np
import pytest

import interp
from interp.analyzers.ffn_keys import kinds, kinds_columns
from interp.analyzers.ffn_keys.patterns import Positions
from interp.config import FfnKeysConfig
from interp.errors import UsageError
from interp.text import load_text
from tests import ffn_plain, tiny


@pytest.fixture(scope="module")
def made(load):
    """family -> (model, text, result of all layers and both signs)."""
    results = {}

    def get(family):
        if family not in results:
            model, _ = load(family)
            text = load_text(tiny.corpus(30), model, documents=30, context=48)
            result = interp.ffn_keys(
                model, text, layer=("all",), sign="both", top=8, mutation_keys=12, progress=False
            )
            results[family] = model, text, result
        return results[family]

    return get


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_columns_are_there_described_and_finite(made, family, tmp_path):
    model, _, result = made(family)
    keys, layers, mutated = (result.tables[t] for t in ("keys", "ffn_layers", "mutation"))
    assert set(kinds_columns.KEYS) <= set(keys) and set(kinds_columns.LAYERS) <= set(layers)
    assert list(mutated) == list(kinds_columns.MUTATION)
    for table, known in (
        (keys, kinds_columns.KEYS),
        (layers, kinds_columns.LAYERS),
        (mutated, kinds_columns.MUTATION),
    ):
        numbers = table[list(known)].select_dtypes("number").to_numpy(float)
        assert not np.isinf(numbers).any()
        # A key can lack what its similarity is of, or stands against; a layer never does.
        assert np.isnan(numbers).mean() < (0.01 if table is keys else 1e-9)
    assert len(mutated) == model.cfg.n_layers * 2 * 4
    assert set(mutated["sign"]) == {1, -1}
    for name in ("same_last_token", "same_last_bigram", "same_last_shape"):
        assert ((keys[name] > 0) & (keys[name] <= 1)).all()
        assert layers[name][0] == pytest.approx(keys[keys["layer"] == 0][name].mean())
        assert (layers[f"{name}_beyond_99"] <= layers[f"{name}_beyond_95"]).all()
    moves = layers["unchanged"] + layers["refined"] + layers["overridden"]
    np.testing.assert_allclose(moves, 1)
    assert (layers["active_share_90"] < layers["active_share_99"]).all()
    assert "3 layers" in result.summary["depth"]["not_measurable"]
    result.save(tmp_path / "run")


def test_shares_are_counted_over_the_triggers_table(made):
    *_, result = made("llama")
    triggers = result.tables["triggers"]
    positive = triggers[(triggers["sign"] == 1) & (triggers["coefficient"] > 0)]
    share = positive.groupby(["layer", "key"])["token_id"].agg(
        lambda ids: ids.value_counts().iloc[0] / len(ids) if len(ids) > 1 else np.nan
    )
    keys = result.tables["keys"].set_index(["layer", "key"])["same_last_token"]
    np.testing.assert_allclose(keys.loc[share.index], share)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_batch_size_changes_nothing(made, family):
    model, text, result = made(family)
    again = interp.ffn_keys(
        model,
        text,
        layer=("all",),
        sign="both",
        top=8,
        mutation_keys=12,
        batch_size=3,
        progress=False,
    )
    for name, known in (("keys", kinds_columns.KEYS), ("mutation", kinds_columns.MUTATION)):
        for column in known:
            # The most negative coefficients of an ungated model lie at GELU's minimum, where
            # rounding decides between documents.
            if not model.cfg.gated and "_negative" in column:
                continue
            one, other = (r.tables[name][column] for r in (result, again))
            if not model.cfg.gated and name == "mutation":
                one, other = (x[again.tables[name]["sign"] == 1] for x in (one, other))
            if one.dtype.kind == "f":
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=column)
            else:
                assert one.equals(other), column


def test_layers_do_not_depend_on_which_others_are_asked(made):
    """The same keys, random tokens and nulls, alone or with the other layers."""
    model, text, result = made("gpt2")
    alone = interp.ffn_keys(model, text, layer=(1,), top=8, mutation_keys=12, progress=False)
    every = result.tables["keys"]
    every = every[every["layer"] == 1].reset_index(drop=True)
    for column in ("same_last_token", "same_last_token_null", "earlier_similarity_null"):
        np.testing.assert_allclose(alone.tables["keys"][column], every[column])
    mutated = result.tables["mutation"]
    mutated = mutated[(mutated["layer"] == 1) & (mutated["sign"] == 1)].reset_index(drop=True)
    # Random tokens are shared between layers, so those changes are other draws.
    fixed = mutated["dropped"] != "random"
    np.testing.assert_allclose(
        alone.tables["mutation"]["change"][fixed], mutated["change"][fixed], atol=1e-5
    )


def test_one_key_has_its_histogram(made, load):
    model, text, result = made("neox")
    _, plain = load("neox")
    one = interp.ffn_keys(model, text, layer=(2,), key=(5, 9), top=8, progress=False)
    table, at = one.tables["histogram"], Positions.of(text)
    values = np.concatenate(
        [
            ffn_plain.coefficients(plain, window, 2)[:, 9]
            for d in text.documents
            for window in d.windows
        ]
    )[at.included]
    own = table[table["key"] == 9]
    assert own["positions"].sum() == len(values)
    assert own["low"].iloc[0] == pytest.approx(values.min(), abs=1e-4)
    assert own["high"].iloc[-1] == pytest.approx(values.max(), abs=1e-4)
    counted, _ = np.histogram(values, [*own["low"], own["high"].iloc[-1]])
    assert np.abs(counted - own["positions"]).sum() <= 4  # values at an edge, by rounding
    assert "active_share_90" not in one.tables["ffn_layers"]  # a mixture is of all keys
    every = result.tables["keys"]
    every = every[(every["layer"] == 2) & every["key"].isin([5, 9])]
    np.testing.assert_allclose(one.tables["keys"]["same_last_token"], every["same_last_token"])


def test_what_is_not_wanted_is_not_measured(made):
    model, text, _ = made("gpt2")
    result = interp.ffn_keys(
        model, text, layer=(0,), top=8, mutation_keys=0, mixture_positions=0, progress=False
    )
    assert "mutation" not in result.tables
    assert "unchanged" not in result.tables["ffn_layers"]
    assert "same_last_token" in result.tables["keys"]


def test_windows_of_a_document(load):
    """Documents longer than the context, all of their windows."""
    model, _ = load("llama")
    text = load_text(tiny.corpus(30), model, documents=30, context=16, windows=True)
    result = interp.ffn_keys(model, text, layer=(1,), top=6, mutation_keys=9, progress=False)
    layers = result.tables["ffn_layers"]
    assert np.isfinite(layers["earlier_similarity"]).all()
    at = Positions.of(text)
    top = result.tables["triggers"].iloc[0]
    place = np.searchsorted(at.document, [d.index for d in text.documents].index(top["document"]))
    place += top["window"] * text.context + top["position"]
    assert at.ids[place] == top["token_id"]


def test_a_prompt_with_a_layer_comes_on_top(made):
    model, text, _ = made("gpt2")
    result = interp.ffn_keys(
        model, text, layer=(0,), top=4, prompt="the lamp", target=" of", progress=False
    )
    assert set(result.tables) >= {"keys", "prompt_keys", "prompt_layers"}
    assert len(result.tables["prompt_layers"]) == model.cfg.n_layers


def test_parts_of_characters_have_a_shape_of_their_own(load):
    model, _ = load("gpt2")
    text = load_text(["the 🦀 of it", "a lamp 🦀"], model, documents=2)
    names = kinds.names_of(text, Positions.of(text))
    assert "\ufffd" in names.values() and " of" in names.values()


@pytest.mark.parametrize(
    "options",
    [{"mutation_keys": -1}, {"mixture_positions": -1}, {"sample_documents": 0}],
)
def test_ranges(options):
    with pytest.raises(UsageError, match=next(iter(options)).replace("_", "-")):
        FfnKeysConfig(**options)


def test_only_a_prompt_needs_no_text():
    asked = {"prompt": "a", "target": "b"}
    assert not FfnKeysConfig(**asked).needs_text
    assert FfnKeysConfig(**asked, layer=(3,)).needs_text
    assert FfnKeysConfig().needs_text
