"""Heads cut out of a checkpoint: logits against weights set to zero by hand, caches, refusals."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from interp import load_model, load_pruned, pruned, pruning
from interp.errors import InterpError
from tests import oracle, tiny
from tests.loading import put_weights, weights_of

# Uneven layers, an odd number left, one head left, none left, and the first layer without any
# (which transformers asks for the length of the cache).
CASES = {
    "gpt2": {0: (1, 3), 1: (0, 1, 2, 3), 2: (0, 2, 3)},
    "gpt2-first": {0: (0, 1, 2, 3), 2: (1,)},
    "neox": {0: (0, 1, 2, 3, 4), 1: (2,), 2: (0, 1, 3, 4)},
    "neox-serial": {1: (0, 1, 2, 3, 4), 2: (0, 3)},
    # Whole KV groups (0-2, 3-5), equally many of each group, one group cut down, none left.
    "llama": {0: (0, 1, 2), 1: (0, 1, 3, 5), 2: (0, 1, 2, 3, 4, 5)},
    "llama-first": {0: (0, 1, 2, 3, 4, 5), 1: (0, 1, 2, 4)},
    "llama-even": {0: (0, 3), 1: (1, 4), 2: (2, 3)},
    "llama-tied": {0: (0, 1, 2), 1: (3, 4, 5), 2: (0, 1, 2)},
}
PLAIN = ("llama-even", "llama-tied")


def family_of(case):
    return case if case in tiny.FAMILIES else case.rsplit("-", 1)[0]


def heads_of(case):
    return [(layer, h) for layer, hs in CASES[case].items() for h in hs]


@pytest.fixture(scope="module")
def cut(checkpoint, tmp_path_factory):
    """case -> (plain model, the same with zeros by hand, folder of the cut one)."""
    made = {}

    def get(case):
        if case not in made:
            source = checkpoint(family_of(case))
            plain = oracle.load(source)
            small = oracle.load(source)
            pruned.cut(small, pruning.plan(small.config, heads_of(case)))
            folder = tmp_path_factory.mktemp("cut") / case
            small.save_pretrained(folder)
            tiny.make_tokenizer(family_of(case)).save_pretrained(folder)
            made[case] = (plain, oracle.edited(plain, heads_of(case)), folder)
        return made[case]

    return get


def ids_of(rows=2, length=24, seed=0):
    return torch.randint(3, 290, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def close(a, b):
    scale = max(1.0, float(b.abs().max()))
    assert float((a - b).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_zeroed_heads(cut, case, attention):
    plain, masked, folder = cut(case)
    small = load_pruned(folder, attn_implementation=attention)
    assert type(small).__name__ == type(plain).__name__ and not small.training
    ids = ids_of()
    assert float((logits(plain, ids) - logits(masked, ids)).abs().max()) > 0.1
    close(logits(small, ids), logits(masked, ids))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    close(
        logits(small, ids, attention_mask=mask)[mask.bool()],
        logits(masked, ids, attention_mask=mask)[mask.bool()],
    )


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_gone(cut, case):
    plain, _, folder = cut(case)
    small, cfg = load_pruned(folder), plain.config
    d_head = oracle.projection(plain, 0).weight.numel() // (cfg.hidden_size * oracle.n_heads(plain))
    group = oracle.n_heads(plain) // (
        getattr(cfg, "num_key_value_heads", None) or oracle.n_heads(plain)
    )
    biases = cfg.model_type != "llama"
    expected = 0
    for hs in CASES[case].values():
        gone_kv = sum(
            all(h in hs for h in range(g, g + group))
            for g in range(0, oracle.n_heads(plain), group)
        )
        matrices = 2 * len(hs) + 2 * gone_kv  # q and o of each head, k and v of each KV head
        expected += matrices * d_head * cfg.hidden_size
        expected += biases * (len(hs) + 2 * gone_kv) * d_head  # o keeps its bias
    count = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    assert count(plain) - count(small) == expected > 0


@pytest.mark.parametrize("case", CASES)
def test_the_cache_gives_what_a_full_pass_gives(cut, case):
    _, masked, folder = cut(case)
    small = load_pruned(folder)
    ids = ids_of(2, 20)
    with torch.no_grad():
        out = small(ids[:, :12], use_cache=True)
        pieces = [out.logits]
        for i in range(12, 20):
            out = small(ids[:, i : i + 1], use_cache=True, cache=out.cache)
            pieces.append(out.logits)
    assert out.cache.get_seq_length() == 20
    close(torch.cat(pieces, 1), logits(masked, ids))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    for extra in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        a = small.generate(ids, attention_mask=mask, **options, **extra)
        b = masked.generate(ids, attention_mask=mask, **options, **extra)
        assert a.shape == (2, 28) and torch.equal(a, b)


@pytest.mark.parametrize("case", CASES)
def test_recorded_attentions_keep_their_layers(cut, case):
    plain, masked, folder = cut(case)
    small = load_pruned(folder, attn_implementation="eager")
    masked.set_attn_implementation("eager")
    ids = ids_of(1, 10)
    found = small(ids, output_attentions=True).attentions
    whole = masked(ids, output_attentions=True).attentions
    for layer, (few, full) in enumerate(zip(found, whole, strict=True)):
        kept = [h for h in range(oracle.n_heads(plain)) if h not in CASES[case].get(layer, ())]
        assert few.shape[1] == len(kept)
        torch.testing.assert_close(few, full[:, kept], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_which_loader(cut, case):
    _, masked, folder = cut(case)
    entry = json.loads((folder / "config.json").read_text())["interp_pruned"]
    assert entry["loader"] == ("transformers" if case in PLAIN else "interp")
    if case in PLAIN:
        ids = ids_of()
        close(logits(AutoModelForCausalLM.from_pretrained(folder), ids), logits(masked, ids))
    else:  # loud, not a model that is a little wrong
        with pytest.raises(RuntimeError, match="mismatch"):
            AutoModelForCausalLM.from_pretrained(folder)


def test_a_fresh_process_gives_the_same_logits(cut, tmp_path):
    cases, ids = ("gpt2-first", "neox", "llama"), ids_of()
    torch.save(ids, tmp_path / "ids.pt")
    code = (
        "import sys, torch, interp\n"
        "ids = torch.load('ids.pt')\n"
        "for i, folder in enumerate(sys.argv[1:]):\n"
        "    with torch.no_grad(): torch.save(interp.load_pruned(folder)(ids).logits, f'{i}.pt')\n"
    )
    command = [sys.executable, "-c", code, *(str(cut(case)[2]) for case in cases)]
    subprocess.run(command, check=True, timeout=240, capture_output=True, cwd=tmp_path)
    for i, case in enumerate(cases):
        close(torch.load(tmp_path / f"{i}.pt"), logits(cut(case)[1], ids))


@pytest.mark.parametrize("case", CASES)
def test_interp_loads_it_with_zeros_and_says_what_is_gone(cut, case):
    plain, masked, folder = cut(case)
    model = load_model(folder, device="cpu")
    assert model.cfg.removed == tuple(heads_of(case))
    assert (model.cfg.n_heads, model.cfg.n_layers) == (oracle.n_heads(plain), 3)
    assert model.cfg.heads() == [h for h in oracle.heads_of(plain) if h not in heads_of(case)]
    assert any("were cut out" in n and f"{len(heads_of(case))} heads" in n for n in model.notices)
    ids = ids_of()
    with model.measuring():
        close(model.bridge(ids, use_cache=False), logits(masked, ids))


@pytest.mark.parametrize("case", ["gpt2", "neox", "llama"])
def test_saved_again_it_is_the_same(cut, case, tmp_path):
    _, masked, folder = cut(case)
    load_pruned(folder).save_pretrained(tmp_path / "again")
    again = load_pruned(tmp_path / "again")
    close(logits(again, ids_of()), logits(masked, ids_of()))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == [
        type(masked).__name__
    ]


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_compensation_keeps_the_mean_output(load, checkpoint, corpus, family, tmp_path):
    _, plain = load(family)
    heads = [(0, h) for h in range(oracle.n_heads(plain))] + [(1, 0), (1, 3)]
    special = {"llama": {0, 1, 2}}.get(family, {0})
    documents = [tiny.make_tokenizer(family)(t)["input_ids"] for t in corpus]
    means = oracle.head_means(plain, documents, special)
    expected = oracle.edited(plain, heads, means)
    small = oracle.load(checkpoint(family))
    w_o = {}
    for layer, head in heads:
        part = oracle.projection(plain, layer).weight
        part = (part if family == "gpt2" else part.T).reshape(
            oracle.n_heads(plain), -1, part.shape[0 if family != "gpt2" else 1]
        )
        w_o[layer] = w_o.get(layer, 0) + torch.as_tensor(means[layer, head]) @ part[head].double()
    pruned.compensate(small, w_o)
    pruned.cut(small, pruning.plan(small.config, heads, compensate=True))
    small.save_pretrained(tmp_path / "p")
    loaded = load_pruned(tmp_path / "p")
    close(logits(loaded, ids_of()), logits(expected, ids_of()))
    tiny.make_tokenizer(family).save_pretrained(tmp_path / "p")
    model = load_model(tmp_path / "p", device="cpu")
    with model.measuring():
        close(model.bridge(ids_of(), use_cache=False), logits(expected, ids_of()))


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_llama_like_families(kind, tmp_path):
    config, model = {
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    shape = {"hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    torch.manual_seed(0)
    plain = model(config(**shape, **heads, max_position_embeddings=64)).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" not in name else 1))
    plain.save_pretrained(tmp_path / "m")
    gone = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    pruned.cut(small, pruning.plan(small.config, gone))
    small.save_pretrained(tmp_path / "p")
    with torch.no_grad():
        for layer, head in gone:  # d_head 10
            plain.model.layers[layer].self_attn.o_proj.weight[:, 10 * head : 10 * head + 10] = 0
    close(logits(load_pruned(tmp_path / "p"), ids_of()), logits(plain, ids_of()))
    with pytest.raises(InterpError, match="bias on the attention's output"):
        pruning.plan(plain.config, gone, compensate=True)


@pytest.mark.parametrize(
    ("family", "heads", "words"),
    [
        ("llama", [(1, 0)], ["Layer 1", "2 of KV head 0", "3 of KV head 1", "--unit kv"]),
        ("llama", [(0, 0), (0, 1), (0, 3)], ["1 of KV head 0", "2 of KV head 1"]),
        ("gpt2", [(3, 0)], ["3.0", "3 layers of 4 heads"]),
        ("neox", [(0, 5)], ["0.5", "5 heads"]),
    ],
)
def test_what_shapes_do_not_allow_is_refused(family, heads, words):
    with pytest.raises(InterpError) as caught:
        pruning.plan(tiny.make_model(family).config, heads)
    assert all(word in str(caught.value) for word in words), caught.value


def test_other_families_are_refused():
    config = SimpleNamespace(model_type="bloom", num_attention_heads=4, num_hidden_layers=2)
    with pytest.raises(InterpError, match=r"bloom.*gpt2, gpt_neox, llama"):
        pruning.plan(config, [(0, 0)])


def test_what_is_no_pruned_checkpoint_is_refused(checkpoint, tmp_path):
    with pytest.raises(InterpError, match="not a checkpoint that interp pruned"):
        load_pruned(checkpoint("gpt2"))
    with pytest.raises(InterpError, match=r"no config\.json"):
        load_pruned(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"n_heads": 4},
        {"n_heads": 4, "n_kv_heads": 4, "removed": {"7": [0]}, "loader": "interp"},
        {"n_heads": 4, "n_kv_heads": 4, "removed": {"0": [4]}, "loader": "interp"},
        "all of them",
    ],
)
def test_a_damaged_entry_is_refused(cut, tmp_path, entry):
    import shutil

    folder = tmp_path / "p"
    shutil.copytree(cut("gpt2")[2], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "interp_pruned": entry}))
    with pytest.raises(InterpError, match="interp_pruned"):
        load_model(folder, device="cpu")


def test_weights_that_do_not_fit_the_entry_are_refused(cut, tmp_path):
    import shutil

    folder = tmp_path / "p"
    shutil.copytree(cut("gpt2")[2], folder)
    weights = weights_of(folder)
    name = "transformer.h.2.attn.c_proj.weight"
    weights[name] = torch.cat([weights[name], weights[name]])
    put_weights(folder, weights)
    with pytest.raises(InterpError):
        load_model(folder, device="cpu")


def test_a_float16_checkpoint_stays_one(checkpoint, tmp_path):
    half = AutoModelForCausalLM.from_pretrained(checkpoint("neox"), dtype=torch.float16)
    pruned.cut(half, pruning.plan(half.config, [(0, 1), (2, 4)]))
    half.save_pretrained(tmp_path / "p")
    assert {w.dtype for w in weights_of(tmp_path / "p").values()} == {torch.float16}
    assert load_pruned(tmp_path / "p", dtype="auto").dtype == torch.float16
    widened = load_pruned(tmp_path / "p", dtype=torch.float32)
    assert bool(torch.isfinite(logits(widened, ids_of())).all())
