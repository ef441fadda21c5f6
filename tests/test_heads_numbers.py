"""Every number of a heads run, worked out a second way: plain transformers, scipy, brute force.

The models are tiny ones whose heads write little, on documents that they sampled themselves: every
head is worth something, so that curves rise and cross their limits at all sorts of places.
"""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

import interp
from interp import splice
from interp.analyzers.heads import curve, measure, tables
from interp.analyzers.heads.standins import Donors
from interp.model import load_model
from interp.text import load_text
from tests import oracle, tiny

# Seed of the weights, scale of what heads write, layers: chosen for curves that cross in between.
MODELS = {"gpt2": (4, 0.2, 3), "neox": (2, 0.3, 2), "llama": (6, 0.3, 2)}
STEPS = {"gpt2": [0, 6, 12], "neox": [0, 5, 10], "llama": [0, 6, 12]}  # of --step 0.5
RANDOM_STEPS = {
    "gpt2": [0, 1, 2, 5, 7, 10, 12],
    "neox": [0, 1, 2, 4, 6, 8, 10],
    "llama": [0, 1, 2, 5, 7, 10, 12],
}
LENGTHS = (3, 40, 20, 33, 37, 28, 12, 36, 40, 30, 3, 25)
LIMITS = (0.01, 0.05)
NATS = 1e-5  # tolerance of a loss


def sampled(plain, seed):
    """Documents of LENGTHS that the model itself wrote; ids 0, 1 and 2 never occur."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny.REAL_VOCAB, (len(LENGTHS), 1), generator=draw)
    with torch.no_grad():
        while ids.shape[1] < max(LENGTHS):
            p = plain(ids).logits[:, -1, : tiny.REAL_VOCAB].softmax(-1)
            p[:, :3] = 0
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=draw)], 1)
    return [row[:n].tolist() for row, n in zip(ids, LENGTHS, strict=True)]


class Brute:
    """Loss changes on some documents, by editing weights; each set of heads worked out once."""

    def __init__(self, plain, documents):
        self.plain, self.documents = plain, documents
        self.clean = oracle.document_losses(plain, documents)
        self.known = {frozenset(): np.zeros(len(documents))}

    def __call__(self, heads):
        """[document] loss change without these heads."""
        key = frozenset(heads)
        if key not in self.known:
            without = oracle.edited(self.plain, sorted(key))
            self.known[key] = oracle.document_losses(without, self.documents) - self.clean
        return self.known[key]


class Compensated(Brute):
    """The same with the removed heads' mean output kept as a bias."""

    def __init__(self, plain, documents, means):
        super().__init__(plain, documents)
        self.means = means

    def __call__(self, heads):
        key = frozenset(heads)
        if key not in self.known:
            without = oracle.edited(self.plain, sorted(key), self.means)
            self.known[key] = oracle.document_losses(without, self.documents) - self.clean
        return self.known[key]


def t_ends(values):
    """(low, high) of the 95% t interval of a mean over documents, by scipy."""
    return scipy_stats.t.interval(
        0.95, len(values) - 1, np.mean(values, axis=0), scipy_stats.sem(values, axis=0, ddof=1)
    )


def log_ends(values):
    """The same of values that cannot be negative, on a log scale."""
    mean = np.mean(values, axis=0)
    t = scipy_stats.t.ppf(0.975, len(values) - 1)
    spread = scipy_stats.sem(values, axis=0, ddof=1) / mean
    return mean * np.exp(-t * spread), mean * np.exp(t * spread)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """family -> (interp model, plain model, its documents as ids)."""
    models = {}

    def get(family):
        if family not in models:
            seed, scale, layers = MODELS[family]
            plain = tiny.make_model(family, seed, num_hidden_layers=layers).requires_grad_(False)
            for layer in range(layers):
                oracle.projection(plain, layer).weight.data.mul_(scale)
            folder = tmp_path_factory.mktemp("numbers") / family
            plain.save_pretrained(folder)
            tiny.make_word_tokenizer(tiny.REAL_VOCAB).save_pretrained(folder)
            documents = sampled(plain, seed)
            models[family] = (load_model(folder, device="cpu"), plain, documents)
        return models[family]

    return get


def measured(model, text, **options):
    """The result, and the orders as they were measured."""
    runs = []
    real = tables.assemble
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "assemble", lambda run: runs.append(run) or real(run))
        result = interp.heads(model, text, progress=False, **options)
    return result, {order.name: order for order in runs[0].orders}


@pytest.fixture(scope="session")
def study(made):
    """family -> a run of everything, with the sample's and the held-out documents' brute force."""
    found = {}

    def get(family):
        if family not in found:
            model, plain, documents = made(family)
            text = load_text([tiny.words(d) for d in documents], model, documents=6, context=64)
            mine = [d.windows[0] for d in text.documents]
            held_out = [d.windows[0] for d in text.held_out(6).documents]
            assert sorted(mine + held_out) == sorted(documents)
            size = {"gpt2": 6, "neox": 4, "llama": 5}[family]
            result, orders = measured(
                model, text, exact=True, prune=True, step=0.5, batch_size=size
            )
            assert result.summary["baseline_part"] == "held_out"
            chosen, judged = Brute(plain, mine), Brute(plain, held_out)
            heads = oracle.heads_of(plain)
            big = oracle.double(plain)
            slopes = np.stack([oracle.gradients_fd(big, mine, *h) for h in heads], 1)
            found[family] = SimpleNamespace(
                family=family,
                model=model,
                text=text,
                result=result,
                orders=orders,
                heads=heads,
                plain=plain,
                mine=mine,
                held_out=held_out,
                chosen=chosen,
                judged=judged,
                compensated=Compensated(plain, held_out, oracle.head_means(plain, mine)),
                slopes=slopes.reshape(6, oracle.n_layers(plain), -1),  # [document, layer, head]
                single=np.stack([chosen([h]) for h in heads], 1),  # [document, head]
            )
        return found[family]

    return get


@pytest.fixture(params=["gpt2", "neox", "llama"])
def case(study, request):
    return study(request.param)


def ascending(things, scores):
    """Things by ascending score; the scores must be apart, or rounding would decide."""
    scores = np.ravel(scores)
    order = np.argsort(scores)
    assert (np.diff(scores[order]) > 1e-7).all(), "choose other seeds: a tie"
    return [things[i] for i in order]


def expected_orders(case):
    """order -> (heads in the order of their removal, brute force of their loss changes)."""
    importance = np.abs(case.slopes).mean(0)
    norm = importance / np.sqrt((importance**2).sum(1, keepdims=True))
    by_norm = ascending(case.heads, norm)
    return {
        "importance": (by_norm, case.judged),
        "raw": (ascending(case.heads, importance), case.judged),
        "compensated": (by_norm, case.compensated),
        "exact": (ascending(case.heads, case.single.mean(0)), case.judged),
    }


def head_by_head(at, steps, limit):
    """Heads before the first crossing inside the first step whose end is above the limit."""
    for start, end in pairwise(steps):
        if at(end) > limit:
            values = [at(n) for n in range(start + 1, end + 1)]
            assert min(abs(v - limit) for v in values) > NATS, "choose other seeds: a near miss"
            return start + next(i for i, v in enumerate(values) if v > limit)
    return steps[-1]


def rows_of(result, table, order, seed=None):
    """The rows of one order, or of one random order, of prune or refine."""
    found = result.tables[table]
    found = found[found["order"] == order]
    return found if seed is None else found[found["seed"] == seed]


def check_rows(rows, delta_of, clean, n_heads):
    """Rows of prune or refine against [document] loss changes of the first n heads."""
    assert len(rows)
    for row in rows.itertuples():
        delta = delta_of(row.n_pruned)
        assert row.loss_delta == pytest.approx(delta.mean(), abs=NATS)
        assert row.loss == pytest.approx((clean + delta).mean(), abs=NATS)
        if row.n_pruned:
            assert (row.ci_low, row.ci_high) == pytest.approx(t_ends(delta), abs=2 * NATS)
        assert row.fraction == row.n_pruned / n_heads


# ------------------------------------------------------------------------------- orders and curves


@pytest.mark.parametrize("name", ["importance", "raw", "compensated", "exact"])
def test_every_row_of_a_curve(case, name):
    order, brute = expected_orders(case)[name]
    n = len(case.heads)
    steps = STEPS[case.family]
    rows = rows_of(case.result, "prune", name)
    assert rows["n_pruned"].tolist() == steps and rows["step"].tolist() == [0, 1, 2]
    assert rows["seed"].isna().all()
    refined = rows_of(case.result, "refine", name)
    for table in (rows, refined):
        check_rows(table, lambda k: brute(order[:k]), brute.clean, n)
    for row in refined.itertuples():
        assert steps[row.step - 1] < row.n_pruned < steps[row.step]


def test_the_first_and_the_orders_differ(case):
    """What the tests above tell apart is apart."""
    orders = [tuple(order) for order, _ in expected_orders(case).values()]
    assert len(set(orders)) == 3
    assert [list(h) for h in orders[0]] == case.result.summary["pruned_order"]


def test_random_curves(case):
    n, steps = len(case.heads), RANDOM_STEPS[case.family]
    random = case.orders["random"]
    assert [member.seed for member in random.members] == [0, 1, 2, 3, 4]
    stored = [[head for unit in member.units for head in unit] for member in random.members]
    assert len({tuple(order) for order in stored}) == 5
    for seed, order in enumerate(stored):
        assert sorted(order) == case.heads
        rows = rows_of(case.result, "prune", "random", seed)
        assert rows["n_pruned"].tolist() == steps
        refined = rows_of(case.result, "refine", "random", seed)
        for table in (rows, refined):
            check_rows(table, lambda k, o=order: case.judged(o[:k]), case.judged.clean, n)
    # Their mean, document by document, is what the random order's prunable share rests on.
    for k, points in random.points.items():
        each = [case.judged(order[:k]) for order in stored]
        np.testing.assert_allclose(points, np.mean(each, axis=0), atol=NATS)
    assert set(steps) < set(random.points)


ENDS = {"prunable": lambda d: d.mean(), "prunable_low": lambda d: t_ends(d)[1]}
ENDS["prunable_high"] = lambda d: t_ends(d)[0]


def test_prunable_shares_head_by_head(case):
    n = len(case.heads)
    expected = {
        name: (lambda k, o=order, b=brute: b(o[:k]), STEPS[case.family])
        for name, (order, brute) in expected_orders(case).items()
    }
    stored = [[h for unit in m.units for h in unit] for m in case.orders["random"].members]
    expected["random"] = (
        lambda k: np.mean([case.judged(order[:k]) for order in stored], axis=0),
        RANDOM_STEPS[case.family],
    )
    best: dict[str, dict[str, float]] = {str(limit): {} for limit in LIMITS}
    inside = 0
    for key, end in ENDS.items():
        assert set(case.result.summary[key]) == set(expected)
        for name, (delta_of, steps) in expected.items():
            for limit in LIMITS:
                at = {0: 0.0} | {k: end(delta_of(k)) for k in steps[1:]}
                count = head_by_head(
                    lambda k, known=at, of=delta_of, e=end: known.get(k, e(of(k))), steps, limit
                )
                found = case.result.summary[key][name][str(limit)]
                assert found * n == pytest.approx(count), (key, name, limit)
                inside += count not in steps
                if key == "prunable":
                    best[str(limit)][name] = count
    assert inside > 12  # of 30: half of the crossings lie between two steps
    for limit, counts in best.items():
        del counts["random"]  # five orders, not one that could be taken
        named = case.result.summary["best_order"][limit]
        assert counts[named] == max(counts.values())


def order_of(name, deltas, steps=(0, 10)):
    """An order of ten heads with the loss change known after each, the same in two documents."""
    units = [((0, i),) for i in range(10)]
    order = curve.Order(name, None, units, list(steps))
    order.points = {n: np.array([d, d]) for n, d in enumerate(deltas)}
    return order


def test_the_best_order_prunes_most_and_is_no_random_one():
    def crossing(above_small, above_large):
        """Above 0.01 from one number of heads on, above 0.05 from another."""
        return [0.0 if n < above_small else 0.02 if n < above_large else 0.2 for n in range(11)]

    orders = [
        order_of("importance", crossing(3, 5)),
        order_of("raw", crossing(6, 7)),
        order_of("exact", crossing(2, 9)),
        order_of("random", crossing(10, 10)),
    ]
    found = tables._prunable(orders)
    assert found["prunable"]["raw"] == {"0.01": 0.5, "0.05": 0.6}
    assert found["prunable"]["exact"] == {"0.01": 0.1, "0.05": 0.8}
    assert found["prunable"]["random"] == {"0.01": 0.9, "0.05": 0.9}
    assert found["best_order"] == {"0.01": "raw", "0.05": "exact"}


def test_nothing_is_prunable_of_an_order_that_lacks_a_step():
    """As an interruption leaves it: only what is measured by any order, 0 removed, is there."""
    whole = order_of("raw", [0.0, 0.0, 0.02, 0.2, 0.2], (0, 1, 2, 3, 4))
    begun = order_of("compensated", [0.0], (0, 2, 4))
    half = order_of("importance", [0.0, 0.0, 0.0], (0, 2, 4))
    found = tables._prunable([begun, whole, half])
    for name in ("compensated", "importance"):
        assert found["prunable"][name] == {"0.01": None, "0.05": None}
        assert found["prunable_low"][name] == {"0.01": None, "0.05": None}
    assert found["best_order"] == {"0.01": "raw", "0.05": "raw"}
    assert tables._prunable([begun])["best_order"] == {}


def test_a_crossing_there_and_back_inside_an_earlier_step_is_not_seen(study):
    """What `prunable` is said to be, and that it is said where steps are wide."""
    hump = [0.0, 0.0, 0.08, 0.08, 0.0, 0.0, 0.0, 0.0, 0.2, 0.2, 0.2]
    assert order_of("raw", hump, (0, 5, 10)).prunable(dict(enumerate(hump)), 0.05) == 0.7
    assert order_of("raw", hump, (0, 2, 4, 6, 8, 10)).prunable(dict(enumerate(hump)), 0.05) == 0.1
    case = study("gpt2")
    column = case.result.summary_columns["prunable"].description
    assert "there and back inside an earlier step is not seen" in column
    assert sum("--step 0.5 is coarse" in n for n in case.result.notices) == 1
    for options in ({"prune": True, "step": 0.1}, {"step": 0.5}):
        quiet = interp.heads(case.model, case.text.subset([2, 5]), progress=False, **options)
        assert not any("coarse" in n for n in quiet.notices)


def test_a_harmful_head_goes_first_by_loss_change(plant):
    model, text, planted = plant("harmful")
    result = interp.heads(model, text, exact=True, prune=True, step=0.125, progress=False)
    first = rows_of(result, "prune", "exact").iloc[1]
    judged = [d.windows[0] for d in text.documents][1::2]
    brute = Brute(oracle.load(planted["folder"]), judged)
    delta = brute([planted["heads"]["harmful"]]).mean()
    assert first["n_pruned"] == 1 and first["loss_delta"] == pytest.approx(delta, abs=NATS)
    assert delta < -0.05


def test_kv_groups_go_by_their_summed_effects(study):
    case = study("llama")
    groups = [tuple((i, 3 * g + j) for j in range(3)) for i in range(2) for g in range(2)]
    # xi scales the three heads at once; the exact order adds the three heads' own loss changes
    scores = np.abs(case.slopes.reshape(6, 2, 2, 3).sum(-1)).mean(0)
    raw = ascending(groups, scores)
    by_norm = ascending(groups, scores / np.sqrt((scores**2).sum(1, keepdims=True)))
    single = case.single.mean(0).reshape(4, 3)
    exact = ascending(groups, single.sum(1))
    assert exact != ascending(groups, single.max(1)) and raw != by_norm
    result = interp.heads(
        case.model, case.text, exact=True, prune=True, unit="kv", step=0.25, progress=False
    )
    assert [tuple(h) for h in result.summary["pruned_order"]] == [h for g in by_norm for h in g]
    for name, order in (("importance", by_norm), ("raw", raw), ("exact", exact)):
        heads = [h for group in order for h in group]
        rows = rows_of(result, "prune", name)
        assert rows["n_pruned"].tolist() == [0, 3, 6, 9, 12]
        check_rows(rows, lambda k, o=heads: case.judged(o[:k]), case.judged.clean, 12)
        for limit in LIMITS:
            share = result.summary["prunable"][name][str(limit)]
            count = head_by_head(
                lambda g, o=heads: case.judged(o[: 3 * g]).mean(), [0, 1, 2, 3, 4], limit
            )
            assert share == pytest.approx(3 * count / 12)
    random = rows_of(result, "prune", "random")
    assert set(random["n_pruned"] % 3) == {0} and random["n_pruned"].max() == 12


# ------------------------------------------------------------------------------- statistics


def test_intervals_p_and_q_values_of_single_removals(case):
    table = case.result.tables["heads"]
    low, high = t_ends(case.single)
    np.testing.assert_allclose(table["loss_delta"], case.single.mean(0), atol=NATS)
    np.testing.assert_allclose(table["ci_low"], low, atol=2 * NATS)
    np.testing.assert_allclose(table["ci_high"], high, atol=2 * NATS)
    p = scipy_stats.ttest_rel(case.single + case.chosen.clean[:, None], case.chosen.clean[:, None])
    np.testing.assert_allclose(table["p_value"], p.pvalue, atol=2e-3)
    q = scipy_stats.false_discovery_control(table["p_value"], method="bh")
    np.testing.assert_allclose(table["q_value"], q, rtol=1e-12)
    assert (table["q_value"] > table["p_value"]).any()
    material = (low > 0.01) | (high < -0.01)
    negligible = (low >= -0.01) & (high <= 0.01)
    words = np.where(material, "material", np.where(negligible, "negligible", "undecided"))
    assert table["verdict"].tolist() == words.tolist()
    counts = {name: (words == name).sum() for name in ("material", "negligible", "undecided")}
    assert case.result.summary["verdicts"] == counts
    assert case.result.summary["documents"] == 6


def test_intervals_of_kl_and_of_mean_ablation(case):
    table = case.result.tables["heads"]
    means = oracle.means_of_others(case.plain, case.mine)
    for i, head in list(enumerate(case.heads))[::3]:
        row = table.iloc[i]
        assert (row["layer"], row["head"]) == head
        kl = oracle.kl(case.plain, oracle.edited(case.plain, [head]), case.mine)
        assert row["kl"] == pytest.approx(kl.mean(), abs=NATS)
        assert (row["kl_low"], row["kl_high"]) == pytest.approx(log_ends(kl), rel=1e-2)
        ablated = oracle.mean_ablated_losses(case.plain, case.mine, *head, means=means)
        delta = ablated - case.chosen.clean
        assert row["loss_delta_mean"] == pytest.approx(delta.mean(), abs=NATS)
        assert (row["mean_low"], row["mean_high"]) == pytest.approx(t_ends(delta), abs=2 * NATS)


def test_intervals_of_importance(case):
    table = case.result.tables["heads"]
    each = np.abs(case.slopes).reshape(6, -1)
    low, high = log_ends(each)
    assert (t_ends(each)[0] < 0).any()  # where a mean of absolute values cannot be
    assert (table["importance_low"] > 0).all()
    np.testing.assert_allclose(table["importance"], each.mean(0), rtol=1e-3, atol=NATS)
    np.testing.assert_allclose(table["importance_low"], low, rtol=1e-3, atol=NATS)
    np.testing.assert_allclose(table["importance_high"], high, rtol=1e-3, atol=NATS)


def test_rank_correlations_are_scipys(case):
    table = case.result.tables["heads"]
    found = case.result.summary["rank_correlation"]
    against = {
        "loss_delta": table["loss_delta"],
        "|loss_delta|": table["loss_delta"].abs(),
        "kl": table["kl"],
    }
    pairs = [(score, what) for score in ("importance_norm", "importance") for what in against]
    pairs.remove(("importance", "|loss_delta|"))
    assert set(found) == {f"{score}~{what}" for score, what in pairs}
    for score, what in pairs:
        rho = scipy_stats.spearmanr(table[score], against[what]).statistic
        assert found[f"{score}~{what}"] == pytest.approx(rho, abs=1e-12)
    assert len({round(value, 9) for value in found.values()}) >= 4


# ------------------------------------------------------------------------------- the summary


def check_baseline(summary, plain, documents):
    losses = oracle.document_losses(plain, documents)
    assert summary["baseline_documents"] == len(documents)
    assert summary["baseline_loss"] == pytest.approx(losses.mean(), abs=NATS)
    ends = summary["baseline_low"], summary["baseline_high"]
    assert ends == pytest.approx(t_ends(losses), abs=2 * NATS)
    weighted = oracle.token_weighted_loss(plain, documents)
    assert summary["baseline_loss_token_weighted"] == pytest.approx(weighted, abs=NATS)
    assert abs(weighted - losses.mean()) > 100 * NATS


def test_the_baseline_is_of_the_curves_documents(case):
    check_baseline(case.result.summary, case.plain, case.held_out)
    assert case.result.summary["scored_loss"] == pytest.approx(case.chosen.clean.mean(), abs=NATS)


def test_interaction_at_every_step(case):
    steps = STEPS[case.family][1:]
    order, _ = expected_orders(case)["importance"]
    found = case.result.summary["interaction"]
    assert [step["n_pruned"] for step in found] == steps
    for step in found:
        gone = order[: step["n_pruned"]]
        joint, own = case.chosen(gone), sum(case.chosen([h]) for h in gone)
        assert step["joint"] == pytest.approx(joint.mean(), abs=NATS)
        assert step["sum_of_own"] == pytest.approx(own.mean(), abs=len(gone) * NATS)
        gap = joint - own
        assert step["interaction"] == pytest.approx(gap.mean(), abs=len(gone) * NATS)
        ends = step["ci_low"], step["ci_high"]
        assert ends == pytest.approx(t_ends(gap), abs=2 * len(gone) * NATS)
    assert max(abs(step["interaction"]) for step in found) > 500 * NATS


def test_held_out_estimates_at_both_ends(case):
    found = case.result.summary["held_out"]
    order = expected_orders(case)["exact"][0]
    assert [(e["layer"], e["head"]) for e in found["bottom"]] == order[:5]
    assert [(e["layer"], e["head"]) for e in found["top"]] == order[::-1][:5]
    for entry in found["top"] + found["bottom"]:
        head = (entry["layer"], entry["head"])
        again = case.judged([head])
        assert entry["loss_delta_chosen"] == pytest.approx(case.chosen([head]).mean(), abs=NATS)
        assert entry["loss_delta"] == pytest.approx(again.mean(), abs=NATS)
        assert (entry["ci_low"], entry["ci_high"]) == pytest.approx(t_ends(again), abs=2 * NATS)
        assert entry["documents_chosen"] == entry["documents"] == 6


def test_without_an_order_chosen_by_measuring_the_curve_is_of_the_sample(study):
    case = study("gpt2")
    plain = interp.heads(case.model, case.text, progress=False)
    curves = interp.heads(case.model, case.text, prune=True, step=1.0, progress=False)
    order = [list(h) for h in expected_orders(case)["importance"][0]]
    for result in (plain, curves):  # also where nothing was pruned
        assert result.summary["pruned_order"] == order
        assert result.summary["baseline_part"] == "sample"
        check_baseline(result.summary, case.plain, case.mine)
    assert set(plain.tables) == {"heads"} and "prunable" not in plain.summary
    assert "interaction" not in curves.summary and "rank_correlation" not in curves.summary
    assert set(curves.summary["prunable"]) == {"importance", "raw", "compensated", "random"}
    rows = rows_of(curves, "prune", "raw")
    heads = expected_orders(case)["raw"][0]
    check_rows(rows, lambda k: case.chosen(heads[:k]), case.chosen.clean, 12)


def test_without_held_out_documents_half_of_the_sample_judges(study):
    case = study("neox")
    text = load_text([tiny.words(d) for d in case.mine], case.model, documents=6, context=64)
    result, orders = measured(case.model, text, exact=True, prune=True, step=1.0)
    ids = [d.windows[0] for d in text.documents]
    check_baseline(result.summary, case.plain, ids[1::2])
    assert result.summary["baseline_part"] == "subset" and result.summary["documents"] == 6
    chosen = np.stack([case.chosen([h])[[case.mine.index(d) for d in ids]] for h in case.heads], 1)
    exact = ascending(case.heads, chosen[0::2].mean(0))
    assert exact != ascending(case.heads, chosen.mean(0))
    assert [unit[0] for unit in orders["exact"].units] == exact
    rows = rows_of(result, "refine", "exact")
    judged = Brute(case.plain, ids[1::2])
    check_rows(rows, lambda k: judged(exact[:k]), judged.clean, 10)
    np.testing.assert_allclose(result.tables["heads"]["loss_delta"], chosen.mean(0), atol=NATS)
    bottom = result.summary["held_out"]["bottom"]
    assert [(e["layer"], e["head"]) for e in bottom] == exact[:5]
    assert {e["documents"] for e in bottom} == {3} == {e["documents_chosen"] for e in bottom}


def test_fewer_documents_may_judge_than_choose(study):
    case = study("gpt2")
    texts = [tiny.words(d) for d in case.mine + case.held_out]  # 12: 7 choose, 5 are left
    text = load_text(texts, case.model, documents=7, context=64)
    result = interp.heads(case.model, text, exact=True, prune=True, step=1.0, progress=False)
    check_baseline(result.summary, case.plain, [d.windows[0] for d in text.held_out(7).documents])
    assert (result.summary["documents"], result.summary["baseline_documents"]) == (7, 5)
    top = result.summary["held_out"]["top"][0]
    assert (top["documents_chosen"], top["documents"]) == (7, 5)


def resampled(plain, documents, of, head):
    """Losses with the head's z, at included positions, taken from document of[i]'s."""
    values = []
    for i, document in enumerate(documents):
        source = oracle.z(plain, documents[of[i]])
        value = np.zeros((source.shape[0], len(document), *source.shape[2:]))
        for t in range(1, len(document)):
            value[:, t] = source[:, 1 + (t - 1) % (source.shape[1] - 1)]
        values.append(value)
    return oracle.replaced_losses(plain, documents, [head], values)


@pytest.mark.parametrize(
    ("family", "ablation", "further"),
    [
        ("gpt2", "mean", True),
        ("neox", "mean", False),
        ("llama", "resample", True),
        ("gpt2", "resample", False),
    ],
)
def test_what_stands_in_on_held_out_documents_is_their_own(study, family, ablation, further):
    case = study(family)
    text = case.text
    if not further:
        text = load_text([tiny.words(d) for d in case.mine], case.model, documents=6, context=64)
    judge = text.held_out(6) if further else text.subset([1, 3, 5])
    result = interp.heads(case.model, text, exact=True, ablation=ablation, progress=False)
    ids, judged = ([d.windows[0] for d in t.documents] for t in (text, judge))
    choosing = slice(None) if further else slice(0, None, 2)

    def delta(head, of_text, documents):
        if ablation == "mean":
            losses = oracle.mean_ablated_losses(case.plain, documents, *head)
        else:
            losses = resampled(case.plain, documents, Donors(case.model, of_text, 0).of, head)
        return losses - oracle.document_losses(case.plain, documents)

    checked = [result.summary["held_out"][end][i] for end in ("top", "bottom") for i in (0, 1)]
    for entry in checked:
        head = (entry["layer"], entry["head"])
        again, first = delta(head, judge, judged), delta(head, text, ids)
        assert entry["loss_delta"] == pytest.approx(again.mean(), abs=NATS)
        assert (entry["ci_low"], entry["ci_high"]) == pytest.approx(t_ends(again), abs=2 * NATS)
        assert entry["loss_delta_chosen"] == pytest.approx(first[choosing].mean(), abs=NATS)
        assert entry["documents"] == len(judged)
        row = result.tables["heads"].set_index(["layer", "head"]).loc[head]
        assert row["loss_delta"] == pytest.approx(first.mean(), abs=NATS)
        if ablation == "mean":  # the two columns are then one
            assert row["loss_delta_mean"] == row["loss_delta"]


# ------------------------------------------------------------------------------- interrupted


def interrupted(monkeypatch, case, after, **options):
    """A run of --exact that is interrupted after so many removals of a batch."""
    real, calls = splice.run_edited, []

    def stop(*args, **more):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "time_of", lambda *_args, **_more: 1.0)
        patch.setattr(splice, "run_edited", stop)
        result = interp.heads(case.model, case.text, exact=True, progress=False, **options)
    assert not result.complete
    return result


def test_documents_are_those_that_were_finished(study, monkeypatch):
    case = study("gpt2")  # 12 heads, two documents a batch: two batches are through
    result = interrupted(monkeypatch, case, 12 * 2 + 5, batch_size=2)
    summary, table = result.summary, result.tables["heads"]
    assert (summary["documents"], summary["scored_documents"]) == (4, 6)
    assert "mean_documents" not in summary
    assert any("of the 4 documents, of 6, that were finished" in n for n in result.notices)
    done = case.single[:4]
    np.testing.assert_allclose(table["loss_delta"], done.mean(0), atol=NATS)
    np.testing.assert_allclose(table["ci_high"], t_ends(done)[1], atol=2 * NATS)
    assert summary["scored_loss"] == pytest.approx(case.chosen.clean.mean(), abs=NATS)
    assert "held_out" not in summary or not summary["held_out"]


def test_documents_where_mean_ablation_was_interrupted(study, monkeypatch):
    case = study("gpt2")
    result = interrupted(monkeypatch, case, 12 * 3 + 12 * 2, batch_size=2)
    assert (result.summary["documents"], result.summary["mean_documents"]) == (6, 4)
    np.testing.assert_allclose(result.tables["heads"]["loss_delta"], case.single.mean(0), atol=NATS)
    assert not any("were finished" in n for n in result.notices)
    means = oracle.means_of_others(case.plain, case.mine)
    delta = oracle.mean_ablated_losses(case.plain, case.mine, 1, 2, means=means) - case.chosen.clean
    row = result.tables["heads"].set_index(["layer", "head"]).loc[(1, 2)]
    assert row["loss_delta_mean"] == pytest.approx(delta[:4].mean(), abs=NATS)


def test_documents_where_none_or_some_heads_were_finished(study, monkeypatch):
    case = study("gpt2")
    none = interrupted(monkeypatch, case, 5, batch_size=2)
    assert none.summary["documents"] == 0
    assert (none.tables["heads"]["verdict"] == "not measured").all()
    some = interrupted(monkeypatch, case, 5, batch_size=6)  # all documents, of five heads
    assert some.summary["documents"] == 6
    table = some.tables["heads"]
    assert (table["verdict"] != "not measured").sum() == 5
    np.testing.assert_allclose(table["loss_delta"][:5], case.single.mean(0)[:5], atol=NATS)
    q = scipy_stats.false_discovery_control(table["p_value"][:5])
    np.testing.assert_allclose(table["q_value"][:5], q, rtol=1e-12)


def test_documents_of_complete_runs(study):
    summary = study("llama").result.summary
    assert [summary[k] for k in ("documents", "scored_documents", "mean_documents")] == [6, 6, 6]
