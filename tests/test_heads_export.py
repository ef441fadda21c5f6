"""`interp heads --export`: the folder it writes, what it says of it, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import interp
from interp import cli, report
from interp.analyzers.heads import cutting, importance, speed
from interp.config import HeadsConfig
from interp.errors import InterpError, UsageError
from interp.report import heads_export
from interp.text import load_text
from tests import oracle, tiny


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two rounds of timing; nothing here depends on how long anything takes."""
    for name, value in (("FEWEST", 1), ("MOST", 2), ("SECONDS", 40.0), ("NEW", 2)):
        monkeypatch.setattr(speed, name, value)


@pytest.fixture(scope="module")
def many():
    return tiny.corpus(24)


@pytest.fixture(scope="module")
def measured(load, many, tmp_path_factory):
    """family -> (model, plain model, text, result of an export of 40 %, its folder)."""
    made = {}

    def get(family):
        if family not in made:
            model, plain = load(family)
            text = load_text(many, model, documents=8, context=64)
            folder = tmp_path_factory.mktemp("export") / family
            old = speed.FEWEST, speed.MOST, speed.SECONDS, speed.NEW
            speed.FEWEST, speed.MOST, speed.SECONDS, speed.NEW = 1, 2, 40.0, 2
            try:
                unit = "kv" if family.startswith("llama") else "head"
                result = run(model, text, prune=True, export=folder, fraction=0.4, unit=unit)
            finally:
                speed.FEWEST, speed.MOST, speed.SECONDS, speed.NEW = old
            made[family] = model, plain, text, result, folder
        return made[family]

    return get


def run(model, text, **options):
    return interp.heads(model, text, progress=False, **options)


def ids_of(rows=2, length=24):
    return torch.randint(3, 290, (rows, length), generator=torch.Generator().manual_seed(0))


def gap(model, other):
    with torch.no_grad():
        a, b = model(ids_of()).logits, other(ids_of()).logits
    return float((a - b).abs().max() / b.abs().max())


FAMILIES = ("gpt2", "neox", "neox-serial", "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_gives_the_masked_logits(measured, family):
    _, plain, _, result, folder = measured(family)
    export = result.summary["export"]
    heads = [tuple(h) for h in export["heads"]]
    total = 3 * oracle.n_heads(plain)
    assert len(heads) == {12: 5, 15: 6, 18: 6}[total]  # 40 %; of Llama's 6 groups of 3: 2
    assert gap(interp.load_pruned(folder), oracle.edited(plain, heads)) <= 1e-5
    assert export["logit_gap"] <= 1e-5
    left = [sum(1 for layer, _ in heads if layer == i) for i in range(3)]
    assert export["heads_left"] == [oracle.n_heads(plain) - n for n in left]
    assert export["folder"] == str(folder)
    assert not folder.with_name(folder.name + ".partial").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_are_the_best_orders(measured, family):
    *_, result, _ = measured(family)
    export, table = result.summary["export"], result.tables["prune"]
    at = table[(table["n_pruned"] == len(export["heads"])) & (table["order"] != "random")]
    at = at[at["order"] != "compensated"].set_index("order")["loss_delta"]
    assert export["order"] == at.idxmin()
    if export["order"] == "importance":
        assert export["heads"] == result.summary["pruned_order"][: len(export["heads"])]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_of_documents_that_chose_nothing(measured, many, family):
    _, plain, text, result, _ = measured(family)
    export = result.summary["export"]
    assert (export["documents"], export["documents_part"]) == (8, "held_out")
    fresh = text.held_out(8)
    assert not {d.index for d in fresh.documents} & {d.index for d in text.documents}
    ids = [d.windows[0] for d in fresh.documents]
    before = oracle.document_losses(plain, ids)
    change = oracle.document_losses(oracle.edited(plain, map(tuple, export["heads"])), ids) - before
    assert export["loss_before"] == pytest.approx(before.mean(), abs=1e-5)
    assert export["loss_after"] == pytest.approx((before + change).mean(), abs=1e-5)
    half = 2.364624 * change.std(ddof=1) / np.sqrt(8)  # t(7), 97.5%
    assert export["ci_low"] == pytest.approx(change.mean() - half, abs=1e-5)
    assert export["ci_high"] == pytest.approx(change.mean() + half, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_counted(measured, family):
    _, plain, _, result, folder = measured(family)
    export, small = result.summary["export"], interp.load_pruned(folder)
    count = lambda m: sum(p.numel() for p in set(m.parameters()))  # noqa: E731
    assert export["parameters_original"] == count(plain)
    assert export["parameters"] == count(small) < count(plain)
    # 2 (K and V) x KV heads of all layers x d_head x 4 bytes.
    d_head = {"gpt2": 10, "llama": 8}.get(family, 16)
    n_kv = {"gpt2": 4, "llama": 2}.get(family, 5)
    assert export["cache_bytes_per_token_original"] == 2 * 3 * n_kv * d_head * 4
    assert export["cache_bytes_per_token"] == 2 * sum(export["kv_heads_left"]) * d_head * 4
    assert sum(export["kv_heads_left"]) < 3 * n_kv


def test_weights_that_a_token_meets():
    # d_model 40, d_mlp 56, 300 tokens: q, k, v, o, two MLP matrices, the tied unembedding.
    assert speed.weights_per_token(tiny.make_model("gpt2")) == 3 * (4 * 1600 + 2 * 2240) + 12000
    # 6 heads of 8 on d_model 60, two KV heads, three MLP matrices of 88, an unembedding of its own.
    per_layer = 60 * (48 + 16 + 16 + 48) + 3 * 60 * 88
    assert speed.weights_per_token(tiny.make_model("llama")) == 3 * per_layer + 300 * 60
    assert speed.weights_per_token(tiny.make_model("llama-tied")) == 3 * per_layer + 300 * 60
    # In prefill the last of 32 tokens alone is unembedded.
    for family, body in (("gpt2", 32640), ("llama", 3 * per_layer), ("llama-tied", 3 * per_layer)):
        rows = {"gpt2": 40}.get(family, 60) * 300
        found = speed.weights_per_token(tiny.make_model(family), "prefill", 32)
        assert found == body + rows / 32


def test_speedup_by_weights_is_told_by_phase(measured):
    *_, result, _ = measured("gpt2")
    export = result.summary["export"]
    # A head of GPT-2's shape: 10 columns of q, k and v and 10 rows of W_O, 40 long; 5 are gone.
    after = 32640 - 5 * 4 * 10 * 40
    assert export["speedup_by_weights"] == {
        "prefill": pytest.approx((32640 + 375) / (after + 375)),  # 12000 over a prompt of 32
        "decode": pytest.approx((32640 + 12000) / (after + 12000)),
    }
    note = heads_export.digests(result)[-1].note
    assert "could be 1.32 times in prefill, 1.22 times in decode" in note


def test_speed_is_the_ratio_of_pairs():
    timing = speed.Timing("decode", 4, 32, 8, np.array([2.0, 4.0, 8.0]), np.array([1.0, 1.0, 10.0]))
    row = timing.row()
    assert row["speedup"] == 2.0  # of 2, 4, 0.8: not the ratio of medians, which is 4
    assert (row["speedup_q1"], row["speedup_q3"]) == (1.4, 3.0)
    assert row["original"] == 4 * 8 / 4.0 and row["pruned"] == 4 * 8 / 1.0
    assert row["rounds"] == 3
    # Mean of log 2, log 4, log 0.8, and its t(2) interval, by hand.
    logs = np.log([2, 4, 0.8])
    half = 4.302653 * logs.std(ddof=1) / np.sqrt(3)
    assert row["ci_low"] == pytest.approx(np.exp(logs.mean() - half), rel=1e-5)
    assert row["ci_high"] == pytest.approx(np.exp(logs.mean() + half), rel=1e-5)
    assert row["verdict"] == "no difference"  # three rounds that disagree
    noisy = np.array([1.9, 2.0, 2.1, 2.0])
    ones = np.ones(4)
    assert speed.Timing("decode", 1, 8, 4, noisy, ones).row()["verdict"] == "faster"
    assert speed.Timing("decode", 1, 8, 4, ones, noisy).row()["verdict"] == "slower"
    assert speed.Timing("decode", 1, 8, 4, noisy, noisy[::-1]).row()["verdict"] == "no difference"
    assert speed.Timing("prefill", 2, 32, 0, ones, noisy).row()["original"] == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_speed_table(measured, family):
    *_, result, _ = measured(family)
    table = result.tables["speed"]
    assert table[["phase", "batch"]].values.tolist() == [
        ["prefill", 1],
        ["decode", 1],
        ["prefill", 16],
        ["decode", 16],
    ]
    assert (table["prompt"] == 32).all() and (table["rounds"] >= 1).all()  # half of the context
    assert (table[["original", "pruned", "speedup"]] > 0).all(axis=None)
    told = [n for n in result.notices if "Not measurably faster" in n]
    assert bool(told) == (table["verdict"] != "faster").any()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_card_tokenizer_and_generation_config_go_along(measured, many, family):
    _, plain, _, result, folder = measured(family)
    export = result.summary["export"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(many[0])["input_ids"] == tiny.make_tokenizer(family)(many[0])["input_ids"]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == plain.config.eos_token_id
    card = (folder / "README.md").read_text()
    for words in (
        f"{export['loss_before']:.4f}",
        f"{export['loss_delta']:+.4f}",
        f"{export['ci_low']:+.4f} to {export['ci_high']:+.4f}",
        f"`{export['order']}`",
        f"{export['parameters']:,}",
        f"{export['cache_bytes_per_token']:,}",
        result.data["sha256"],
        "load_pruned" if export["loader"] != "transformers" else "AutoModelForCausalLM",
    ):
        assert words in card, words
    curve = result.tables["prune"].query("order == @export['order']")
    for n, delta in zip(curve["n_pruned"], curve["loss_delta"], strict=True):
        assert f"| {n} | {delta:+.4f} |" in card


@pytest.mark.parametrize("family", FAMILIES)
def test_every_command_then_knows_which_heads_are_absent(measured, many, family):
    _, plain, _, before, folder = measured(family)
    gone = {tuple(h) for h in before.summary["export"]["heads"]}
    model = interp.load_model(folder, device="cpu")
    text = load_text(many, model, documents=6, context=64)
    left = [h for h in oracle.heads_of(plain) if h not in gone]
    ids = [d.windows[0] for d in text.documents]
    small = oracle.edited(plain, gone)

    result = run(model, text, prune=True, exact=True)
    table = result.tables["heads"]
    assert list(zip(table["layer"], table["head"], strict=True)) == left
    assert any("were cut out" in n for n in result.notices)
    assert result.summary["heads"] == len(left) and sum(result.summary["verdicts"].values()) == len(
        left
    )
    assert sorted(map(tuple, result.summary["pruned_order"])) == left
    assert result.model["removed"] == [list(h) for h in sorted(gone)]
    clean = oracle.document_losses(small, ids)
    for layer, head in left[::3]:
        row = table[(table["layer"] == layer) & (table["head"] == head)].iloc[0]
        delta = oracle.document_losses(oracle.edited(small, [(layer, head)]), ids) - clean
        assert row["loss_delta"] == pytest.approx(delta.mean(), abs=1e-5)
    prune = result.tables["prune"]
    assert prune["n_pruned"].max() == len(left) and prune["fraction"].max() == 1
    assert "could not be drawn" not in report.render([result])

    asymmetry = interp.asymmetry(model, text, activations=True, symmetrise=True, progress=False)
    table = asymmetry.tables["asymmetry"]
    assert list(zip(table["layer"], table["head"], strict=True)) == left
    whole = interp.asymmetry(measured(family)[0])
    whole = whole.tables["asymmetry"].set_index(["layer", "head"])
    for row in table.itertuples():
        assert row.symmetry == pytest.approx(whole.loc[(row.layer, row.head), "symmetry"], abs=1e-6)
    assert (
        table[["symmetry", "stable_rank", "score_correlation", "loss_delta_excess"]]
        .notna()
        .all(axis=None)
    )
    assert np.isfinite(asymmetry.summary["null"]["median"])
    keys = interp.ffn_keys(model, text, layer=(1,), progress=False)
    assert len(keys.tables["keys"]) == model.cfg.d_mlp


def test_a_pruned_model_is_pruned_further(measured, many, tmp_path):
    _, plain, _, before, folder = measured("gpt2")
    gone = {tuple(h) for h in before.summary["export"]["heads"]}
    model = interp.load_model(folder, device="cpu")
    text = load_text(many, model, documents=4, context=64)
    result = run(model, text, prune=True, export=tmp_path / "p", fraction=0.5)
    more = {tuple(h) for h in result.summary["export"]["heads"]}
    assert len(more) == round(0.5 * (12 - len(gone))) and not more & gone
    small = interp.load_pruned(tmp_path / "p")
    assert gap(small, oracle.edited(plain, gone | more)) <= 1e-5
    # What it is compared with is the checkpoint it was made from, not one with zeros in it.
    assert result.summary["export"]["parameters_original"] == before.summary["export"]["parameters"]
    layer, head = min(gone)
    with pytest.raises(InterpError, match="already cut out"):
        run(model, text, export=tmp_path / "q", heads=f"{layer}.{head}")


def test_named_heads(load, many, tmp_path):
    model, plain = load("llama")
    text = load_text(many, model, documents=8, context=64)
    # Two query heads of each KV head of layer 0, and all of layer 2.
    heads = [(0, 0), (0, 4), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]
    named = ", ".join(f"{layer}.{h}" for layer, h in heads)
    result = run(model, text, export=tmp_path / "p", heads=named)
    export = result.summary["export"]
    assert [tuple(h) for h in export["heads"]] == heads and export["order"] is None
    assert gap(interp.load_pruned(tmp_path / "p"), oracle.edited(plain, heads)) <= 1e-5
    assert export["documents_part"] == "sample" and "prune" not in result.tables
    ids = [d.windows[0] for d in text.documents]
    after = oracle.document_losses(oracle.edited(plain, heads), ids)
    assert export["loss_after"] == pytest.approx(after.mean(), abs=1e-5)


def test_equal_layers_load_in_plain_transformers(load, many, tmp_path):
    model, plain = load("llama-tied")
    text = load_text(many, model, documents=4, context=64)
    result = run(model, text, export=tmp_path / "p", heads="0.0,0.3,1.1,1.5,2.2,2.3")
    assert result.summary["export"]["loader"] == "transformers"
    assert any("loads in plain transformers" in n for n in result.notices)
    heads = [(0, 0), (0, 3), (1, 1), (1, 5), (2, 2), (2, 3)]
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "p")
    assert gap(small, oracle.edited(plain, heads)) <= 1e-5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_compensation(load, many, family, tmp_path):
    model, plain = load(family)
    text = load_text(many, model, documents=8, context=64)
    unit = "kv" if family == "llama" else "head"
    options = {"prune": True, "fraction": 0.5, "unit": unit, "compensate": True}
    result = run(model, text, export=tmp_path / "p", **options)
    export = result.summary["export"]
    assert export["order"] == "compensated" and export["compensated"]
    heads = [tuple(h) for h in export["heads"]]
    ids = [d.windows[0] for d in text.documents]
    means = oracle.head_means(plain, ids, text.special_ids)
    expected = oracle.edited(plain, heads, means)
    assert gap(interp.load_pruned(tmp_path / "p"), expected) <= 2e-5
    fresh = [d.windows[0] for d in text.held_out(8).documents]
    after = oracle.document_losses(expected, fresh)
    assert export["loss_after"] == pytest.approx(after.mean(), abs=2e-5)


def test_how_text_is_tokenised_goes_along(checkpoint, many, tmp_path):
    model = interp.load_model(checkpoint("gpt2"), device="cpu")
    model.bos_token_id, model.bos_default = 0, True  # as the embedded model has it
    text = load_text(many, model, documents=4, context=64)
    assert text.documents[0].windows[0][0] == 0
    run(model, text, export=tmp_path / "p", heads="0.0")
    again = interp.load_model(tmp_path / "p", device="cpu")
    assert (again.bos_token_id, again.bos_default) == (0, True)
    same = load_text(many, again, documents=4, context=64)
    assert [d.windows for d in same.documents] == [d.windows for d in text.documents]


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_a_layer_without_heads_in_every_command(load, many, family, tmp_path):
    model, plain = load(family)
    text = load_text(many, model, documents=4, context=64)
    n = oracle.n_heads(plain)
    named = ",".join(f"{layer}.{h}" for layer in (0, 2) for h in range(n))
    result = run(model, text, export=tmp_path / "p", heads=named)
    assert result.summary["export"]["heads_left"] == [0, n, 0]
    small = interp.load_model(tmp_path / "p", device="cpu")
    text = load_text(many, small, documents=4, context=64)
    left = [(1, h) for h in range(n)]
    heads = run(small, text, prune=True, exact=True, rescore=True, step=0.5)
    asymmetry = interp.asymmetry(small, text, activations=True, symmetrise=True, progress=False)
    for found in (heads, asymmetry):
        table = found.tables["asymmetry" if found is asymmetry else "heads"]
        assert list(zip(table["layer"], table["head"], strict=True)) == left
        assert "could not be drawn" not in report.render([found])
    assert np.isfinite(asymmetry.tables["asymmetry"]["symmetry"]).all()
    assert set(asymmetry.tables["offsets"]["layer"]) == {1} if family != "gpt2" else True


def test_max_loss_is_the_first_crossing(load, many, tmp_path):
    model, _ = load("gpt2")
    text = load_text(many, model, documents=8, context=64)
    whole = run(model, text, prune=True, step=1 / 12).tables["prune"]
    curves = whole[~whole["order"].isin(["random", "compensated"])].pivot(
        index="n_pruned", columns="order", values="loss_delta"
    )
    limit = float(np.median(curves.to_numpy()))  # crossed somewhere in the middle
    before = {name: int((curves[name] > limit).to_numpy().argmax()) - 1 for name in curves}
    result = run(model, text, prune=True, step=0.5, export=tmp_path / "p", max_loss=limit)
    export = result.summary["export"]
    # Steps of six heads: the crossing inside of one is looked for head by head.
    steps = {name: [n for n in (0, 6, 12) if curves.loc[n, name] > limit] for name in curves}
    for name in curves:  # a way up and back within the first step is not seen: take such a case out
        assert before[name] < steps[name][0]
    expected = {}
    for name in curves:
        start = steps[name][0] - 6
        inside = curves.loc[start : start + 6, name] > limit
        expected[name] = int(inside.idxmax()) - 1
    assert len(export["heads"]) == max(expected.values())
    assert expected[export["order"]] == max(expected.values())


def test_no_head_within_the_limit_is_told(load, many, tmp_path):
    model, _ = load("gpt2")
    text = load_text(many, model, documents=4, context=64)
    result = run(model, text, prune=True, export=tmp_path / "p", max_loss=1e-9)
    if "export" in result.summary:  # a head whose removal helps: it may go
        assert result.summary["export"]["heads"]
    else:
        assert any("Nothing was exported" in n for n in result.notices)
        assert not (tmp_path / "p").exists()


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", {"prune": True, "fraction": 0.4}, ["--unit kv", "3 query heads share a KV head"]),
        ("llama", {"heads": "0.0"}, ["Layer 0", "--unit kv"]),
        ("gpt2", {"heads": "0.9"}, ["0.9", "3 layers of 4 heads"]),
    ],
)
def test_the_impossible_is_refused_before_anything_is_measured(
    load, many, tmp_path, monkeypatch, family, options, words
):
    model, _ = load(family)
    text = load_text(many, model, documents=4, context=64)

    def fail(*_args, **_kwargs):
        raise AssertionError("measured first")

    monkeypatch.setattr(importance, "gradients", fail)
    with pytest.raises(InterpError) as caught:
        run(model, text, export=tmp_path / "p", **options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 0.4}, "--fraction says what to cut out.*--export DIR"),
        ({"compensate": True}, "--compensate says.*--export DIR"),
        ({"export": "d"}, "exactly one of --fraction, --heads and --max-loss.*there is none"),
        ({"export": "d", "heads": "0.1", "fraction": 0.1}, "--fraction and --heads"),
        ({"export": "d", "fraction": 0.4}, "add --prune"),
        ({"export": "d", "max_loss": 0.1}, "add --prune"),
        ({"export": "d", "fraction": 0.0, "prune": True}, "fraction must be above 0"),
        ({"export": "d", "fraction": 1.1, "prune": True}, "fraction must be above 0"),
        ({"export": "d", "max_loss": 0.0, "prune": True}, "max-loss must be above 0"),
        ({"export": "d", "heads": "3-1"}, "layer.head, such as 3.1,5.0; '3-1' is none"),
        ({"export": "d", "heads": "3.1,"}, "'' is none"),
        ({"export": "d.json", "heads": "3.1"}, "export must be a folder"),
    ],
)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(UsageError, match=words):
        HeadsConfig(**options)


def test_what_lies_there_is_overwritten_only_when_told(measured, many, tmp_path):
    model, _, text, _, folder = measured("gpt2")
    short = text.subset([0, 1, 2, 3])
    with pytest.raises(InterpError, match=r"already exists.*--overwrite"):
        run(model, short, export=folder, heads="0.0")
    target = tmp_path / "p"
    run(model, short, export=target, heads="0.0")
    run(model, short, export=target, heads="1.1,1.2", overwrite=True)
    assert interp.load_model(target, device="cpu").cfg.removed == ((1, 1), (1, 2))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(InterpError, match="files that are not a checkpoint that interp pruned"):
        run(model, short, export=tmp_path / "mine", heads="0.0", overwrite=True)


def test_a_checkpoint_that_is_not_what_was_measured_is_not_kept(checkpoint, many, tmp_path):
    model = interp.load_model(checkpoint("gpt2"), device="cpu")
    text = load_text(many, model, documents=4, context=64)
    with torch.no_grad():  # edited after loading, as the file on disk is not
        next(p for n, p in model.bridge.original_model.named_parameters() if "wte" in n).mul_(1.5)
    result = run(model, text, export=tmp_path / "p", heads="0.0")
    assert any("other logits than the masked model" in n for n in result.notices)
    assert not list(tmp_path.iterdir()) and "export" not in result.summary
    assert len(result.tables["heads"]) == 12  # what was measured is there all the same


@pytest.mark.parametrize("part", ["write_card", "measure"])
def test_an_interruption_leaves_no_half_checkpoint(load, many, tmp_path, monkeypatch, part):
    model, plain = load("gpt2")
    text = load_text(many, model, documents=4, context=64)

    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cutting.speed if part == "measure" else cutting, part, stop)
    result = run(model, text, export=tmp_path / "p", heads="0.0")
    assert not result.complete and len(result.tables["heads"]) == 12
    if part == "measure":  # written and checked before: it is whole
        assert gap(interp.load_pruned(tmp_path / "p"), oracle.edited(plain, [(0, 0)])) <= 1e-5
        assert (tmp_path / "p" / "README.md").exists() and len(result.tables["speed"]) == 0
    else:
        assert not list(tmp_path.iterdir())


def test_command_line(checkpoint, many, tmp_path, capsys):
    data = tmp_path / "docs.txt"
    data.write_text("\n\n".join(many), encoding="utf-8")
    base = ["heads", "--model", str(checkpoint("gpt2")), "--data", str(data), "--documents", "6"]
    base += ["--no-progress", "--device", "cpu", "--prune"]
    out = ["--export", str(tmp_path / "p"), "--out", str(tmp_path / "run")]
    assert cli.run([*base, *out, "--fraction", "0.25"]) == 0
    card = (tmp_path / "p" / "README.md").read_text()
    assert "interp heads" in card and "--fraction 0.25" in card
    saved = interp.load_result(tmp_path / "run")
    assert saved.summary["export"]["loader"] == "interp.load_pruned"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "tokens per second" in page and "KV cache" in page
    again = ["heads", "--model", str(tmp_path / "p"), "--data", str(data), "--documents", "6"]
    again += ["--no-progress", "--device", "cpu", "--out", str(tmp_path / "again")]
    assert cli.run(again) == 0
    assert len(interp.load_result(tmp_path / "again").tables["heads"]) == 9
    capsys.readouterr()
    assert cli.run([*base, "--export", str(tmp_path / "p"), "--fraction", "0.25"]) == 1
    assert "already exists" in capsys.readouterr().err
    assert cli.run([*base, "--export", str(tmp_path / "p")]) == 2
    both = ["--export", str(tmp_path / "n"), "--out", str(tmp_path / "n"), "--fraction", "0.25"]
    assert cli.run([*base, *both]) == 2
