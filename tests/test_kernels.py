"""One kernel in place of what is written out: when it runs, that it says the same, what it leaves.

Plain transformers is the oracle. How often the fused kernel ran is counted where torch has it.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from interp import hooks, kernels, splice
from interp.model import load_model, untrained
from tests import oracle, tiny

FAMILIES = tiny.FAMILIES
PAD = 7


@pytest.fixture
def fused_calls(monkeypatch):
    """One entry for each time that the fused kernel ran."""
    calls, kernel = [], functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    return calls


@pytest.fixture
def fresh(checkpoint):
    """family -> a model of its own, and the oracle's."""

    def get(family):
        return load_model(checkpoint(family), device="cpu"), oracle.load(checkpoint(family))

    return get


def padded(documents):
    """Tokens and mask of documents side by side, padded on the right."""
    longest = max(map(len, documents))
    tokens = torch.tensor([[*d, *[PAD] * (longest - len(d))] for d in documents])
    mask = torch.tensor([[1] * len(d) + [0] * (longest - len(d)) for d in documents])
    return SimpleNamespace(tokens=tokens, attention_mask=mask)


DOCUMENTS = [[(31 * i * i + 7 * i + 5) % 290 + 3 for i in range(n)] for n in (40, 23, 3)]


def seen_z(model, batch):
    z = {}
    layers = range(model.cfg.n_layers)
    with hooks.attached(model, [("z", i, lambda t, i=i: z.update({i: t.clone()})) for i in layers]):
        logits = model.forward(batch)
    return torch.stack([z[i] for i in layers]), logits


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_logits_and_z_are_plain_transformers(family, load, fused_calls):
    model, plain = load(family)
    fused_calls.clear()
    assert model.fuses
    with model.measuring(fused=True):
        z, logits = seen_z(model, padded(DOCUMENTS))
    assert len(fused_calls) == model.cfg.n_layers
    for i, document in enumerate(DOCUMENTS):
        n = len(document)
        np.testing.assert_allclose(z[:, i, :n], oracle.z(plain, document), atol=1e-4)
        np.testing.assert_allclose(logits[i, :n], oracle.logits(plain, document), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", hooks.SITES)
def test_a_layer_is_written_out_where_its_inside_is_hooked(family, site, load, fused_calls):
    model, plain = load(family)
    fused_calls.clear()
    if site == "resid_mid" and model.cfg.parallel:
        pytest.skip("a parallel block has no such place")
    seen = []
    keep = hooks.attached(model, [(site, 1, lambda t: seen.append(t.clone()))])
    with model.measuring(fused=True), keep:
        logits = model.forward(padded(DOCUMENTS))
    inside = site in ("q", "k", "v", "scores", "pattern")
    assert len(fused_calls) == model.cfg.n_layers - inside
    assert len(seen) == 1
    if site == "pattern":
        for i, document in enumerate(DOCUMENTS):
            n = len(document)
            expected = oracle.patterns(plain, document)[1]
            np.testing.assert_allclose(seen[0][i, :, :n, :n], expected, atol=3e-6)
    np.testing.assert_allclose(logits[0], oracle.logits(plain, DOCUMENTS[0]), atol=1e-4)


def test_nothing_is_fused_unasked(load, fused_calls):
    model, _ = load("llama")
    fused_calls.clear()
    with torch.no_grad():
        model.forward(padded(DOCUMENTS))
        with model.measuring():
            model.forward(padded(DOCUMENTS))
    assert fused_calls == []
    with model.measuring(fused=True), model.measuring(fused=True):
        model.forward(padded(DOCUMENTS))
    assert len(fused_calls) == model.cfg.n_layers


HOOKED_BY_A_USER = {
    "a hook of TransformerLens": lambda attn, note: attn.q.hook_out.add_hook(note),
    "a torch hook on a projection": lambda attn, note: attn.q.register_forward_hook(note),
    "a gradient's hook": lambda attn, note: attn.hook_pattern.add_hook(note, dir="bwd"),
}


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
@pytest.mark.parametrize("name", HOOKED_BY_A_USER)
def test_what_a_user_has_hooked_inside_stays_in_force(family, name, fresh, fused_calls):
    model, _ = fresh(family)
    fused_calls.clear()
    ran = []
    HOOKED_BY_A_USER[name](model.bridge.blocks[2].attn, lambda *_, **__: ran.append(1) and None)
    with model.measuring(fused=True), torch.enable_grad():
        start = [("attn_in", 0, lambda t: t.detach().requires_grad_())]
        with hooks.attached(model, start):
            model.forward(padded(DOCUMENTS)).sum().backward()
    assert ran == [1]
    assert len(fused_calls) == model.cfg.n_layers - 1


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_a_forward_that_a_user_has_replaced_stays(family, fresh, fused_calls):
    model, _ = fresh(family)
    fused_calls.clear()
    attn, ran = model.bridge.blocks[0].attn, []
    own = attn.forward

    def mine(*args, **kwargs):
        ran.append(1)
        return own(*args, **kwargs)

    object.__setattr__(attn, "forward", mine)
    with model.measuring(fused=True):
        model.forward(padded(DOCUMENTS))
    assert ran == [1] and attn.forward is mine
    assert len(fused_calls) == model.cfg.n_layers - 1


class Nothing(torch.nn.Module):
    """A projection to zeros, without a parameter."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x):
        return x.new_zeros(*x.shape[:-1], self.width)


def replace_q(attn, patch):
    attn._modules["q"] = Nothing(attn.q.original_component.weight.shape[0])


def replace_q_forward(attn, patch):
    own = attn.q.forward
    object.__setattr__(attn.q, "forward", lambda x: own(x) * 0)


def replace_a_hook_points_forward(attn, patch):
    object.__setattr__(attn.hook_pattern, "forward", lambda x: x.flip(-3))


def replace_a_method(attn, patch):
    own = attn._apply_reconstruct_attention_mask
    object.__setattr__(
        attn, "_apply_reconstruct_attention_mask", lambda **known: own(**known) * 1.3
    )


def replace_the_class_forward(attn, patch):
    own = type(attn).forward
    patch.setattr(
        type(attn), "forward", lambda self, *a, **k: ((out := own(self, *a, **k))[0] * 2, *out[1:])
    )


def wrap_q(attn, patch):
    attn.q.set_original_component(torch.nn.Sequential(attn.q.original_component, torch.nn.Tanh()))


CHANGED = [
    replace_q,
    replace_q_forward,
    replace_a_hook_points_forward,
    replace_a_method,
    replace_the_class_forward,
    wrap_q,
]


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
@pytest.mark.parametrize("change", CHANGED)
def test_an_attention_that_was_changed_is_run_as_it_is(change, family, fresh, monkeypatch):
    """Whatever a user has put in its place before an analysis, the analysis runs."""
    model, _ = fresh(family)
    with model.measuring():
        clean = model.forward(padded(DOCUMENTS))
    change(model.bridge.blocks[1].attn, monkeypatch)
    with model.measuring():
        expected = model.forward(padded(DOCUMENTS))
    with model.measuring(fused=True):
        logits = model.forward(padded(DOCUMENTS))
    assert (expected[0] - clean[0]).abs().max() > 0.05
    torch.testing.assert_close(logits[0], expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_a_setting_of_transformers_module_that_the_bridge_does_not_read(family, fresh):
    model, _ = fresh(family)
    model.bridge.blocks[1].attn.original_component.scaling = 0.01
    with model.measuring():
        expected = model.forward(padded(DOCUMENTS))
    with model.measuring(fused=True):
        logits = model.forward(padded(DOCUMENTS))
    torch.testing.assert_close(logits[0], expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_a_torch_hook_on_the_attention_still_sees_the_pattern(family, fresh):
    model, plain = fresh(family)
    seen = []
    model.bridge.blocks[1].attn.register_forward_hook(lambda m, i, out: seen.append(out[1]))
    with model.measuring(fused=True):
        model.forward(padded(DOCUMENTS))
    np.testing.assert_allclose(seen[0][0], oracle.patterns(plain, DOCUMENTS[0])[1], atol=3e-6)


def test_a_parameter_of_nobodys_is_no_error(fresh, fused_calls):
    model, plain = fresh("llama")
    fused_calls.clear()
    attn = model.bridge.blocks[1].attn
    attn.register_parameter("steer", torch.nn.Parameter(torch.ones(3)))
    with model.measuring(fused=True):
        logits = model.forward(padded(DOCUMENTS))
    assert len(fused_calls) == 2
    np.testing.assert_allclose(logits[0], oracle.logits(plain, DOCUMENTS[0]), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_a_model_is_fused_by_itself(family, fresh, fused_calls):
    model, plain = fresh(family)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.bridge.blocks:
            block.attn.o.weight.zero_()
    fused_calls.clear()
    with copied.measuring(fused=True):
        logits = copied.forward(padded(DOCUMENTS))
    assert len(fused_calls) == 3
    np.testing.assert_allclose(logits[0], oracle.logits(plain, DOCUMENTS[0]), atol=1e-4)


def test_analyses_are_fused(load, fused_calls):
    """All that go through a journal, and with them what they run."""
    import interp
    from interp.text import load_text

    model, _ = load("gpt2")
    text = load_text(tiny.corpus(4), model, documents=4, context=16)
    fused_calls.clear()
    interp.heads(model, text, exact=True, progress=False)
    assert fused_calls


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("name", kernels.OTHER_WAYS)
def test_other_ways_of_the_bridge_stay(name, when, fresh, fused_calls):
    model, plain = fresh("llama")
    fused_calls.clear()
    if when == "before":
        setattr(model.bridge.cfg, name, True)
    with model.measuring(fused=True):
        setattr(model.bridge.cfg, name, True)
        logits = model.forward(padded(DOCUMENTS))
    assert fused_calls == []
    np.testing.assert_allclose(logits[0], oracle.logits(plain, DOCUMENTS[0]), atol=1e-4)


def edit_plain(plain, family, part, layer, head):
    """Zero one head's query, key or value weights in the one matrix of all, and 0.5 its biases."""
    at, width = "qkv".index(part), oracle.d_head(plain)
    with torch.no_grad():
        if family == "gpt2":
            c_attn = plain.transformer.h[layer].attn.c_attn
            start = at * plain.config.n_embd + head * width
            c_attn.weight[:, start : start + width] = 0
            c_attn.bias[start : start + width] = 0.5
        else:
            fused = plain.gpt_neox.layers[layer].attention.query_key_value
            start = head * 3 * width + at * width
            fused.weight[start : start + width] = 0
            fused.bias[start : start + width] = 0.5


@pytest.mark.parametrize("part", "qkv")
@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("way", ["in place", "data", "another parameter"])
@pytest.mark.parametrize("family", ["gpt2", "neox"])
def test_edits_of_the_copies_that_the_bridge_computes_with_count(family, way, when, part, tmp_path):
    """Where q, k and v are one matrix, a user edits the bridge's copies of it."""
    folder = tiny.make_checkpoint(family, tmp_path / "own")
    model, plain = load_model(folder, device="cpu"), oracle.load(folder)
    layer, head, width = 1, 2, oracle.d_head(plain)
    rows = slice(head * width, (head + 1) * width)
    linear = getattr(model.bridge.blocks[layer].attn, part).original_component
    before = oracle.logits(plain, DOCUMENTS[0])

    def edit():
        for name, value in (("weight", 0.0), ("bias", 0.5)):
            own = getattr(linear, name)
            changed = own.detach().clone()
            changed[rows] = value
            if way == "in place":
                with torch.no_grad():
                    own[rows] = value
            elif way == "data":
                own.data = changed
            else:
                setattr(linear, name, torch.nn.Parameter(changed))

    if when == "before":
        edit()
    edit_plain(plain, family, part, layer, head)
    with model.measuring(fused=True):
        if when == "within":
            np.testing.assert_allclose(model.forward(padded(DOCUMENTS))[0], before, atol=1e-4)
            edit()
        logits = model.forward(padded(DOCUMENTS))
    expected = oracle.logits(plain, DOCUMENTS[0])
    assert (expected - before).abs().max() > 0.05
    np.testing.assert_allclose(logits[0], expected, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_a_null_model_of_permuted_weights_is_one_model(family, load):
    """Its weights change within `measuring`, and the bridge's copies by their own permutations."""
    from probes.baselines import permuted

    model, _ = load(family)
    with model.measuring(fused=True):
        clean = model.forward(padded(DOCUMENTS))
        with permuted(model, 3):
            fused = model.forward(padded(DOCUMENTS))
            with hooks.attached(model, [("q", i, torch.clone) for i in range(3)]):
                written_out = model.forward(padded(DOCUMENTS))
        again = model.forward(padded(DOCUMENTS))
    assert torch.equal(clean, again)
    assert (fused[0] - clean[0]).abs().max() > 0.5
    np.testing.assert_allclose(fused[0], written_out[0], atol=1e-4)


def state(model):
    """What of a model must be as it was."""
    original = [b.attn.original_component for b in model.bridge.blocks]
    return (
        hooks.left_on(model),
        [o.config._attn_implementation for o in original],
        [dict(o._modules) for o in original],
        [name for name, _ in model.bridge.named_parameters()],
        {name: tensor.data_ptr() for name, tensor in model.bridge.state_dict().items()},
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_as_before_also_after_an_error(family, load):
    model, _ = load(family)
    before = state(model)

    def stop(_):
        raise KeyboardInterrupt

    for site in ("z", "attn_out", "mlp_out"):
        stopped = hooks.attached(model, [(site, 1, stop)])
        with pytest.raises(KeyboardInterrupt), model.measuring(fused=True), stopped:
            model.forward(padded(DOCUMENTS))
        assert state(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_no_random_number_is_drawn(family, load):
    model, _ = load(family)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with model.measuring(fused=True):
        model.forward(padded(DOCUMENTS))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_a_kernel_that_is_wrong_here_is_not_used(family, checkpoint, monkeypatch):
    kernel = functional.scaled_dot_product_attention

    def wrong(*args, scale=None, **kwargs):
        return kernel(*args, scale=scale * 1.01, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", wrong)
    model = load_model(checkpoint(family), device="cpu")
    assert not model.fuses
    monkeypatch.undo()
    plain = oracle.load(checkpoint(family))
    with model.measuring(fused=True):
        logits = model.forward(padded(DOCUMENTS))
    np.testing.assert_allclose(logits[0], oracle.logits(plain, DOCUMENTS[0]), atol=1e-4)


def test_a_kernel_that_fails_here_is_not_used(checkpoint, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(functional, "scaled_dot_product_attention", fails)
    assert not load_model(checkpoint("llama"), device="cpu").fuses


def test_a_hidden_z_is_not_used(checkpoint, monkeypatch):
    """Logits alone do not show that z can be hooked."""
    made = kernels._as_fused

    def without(original, projection, _o):
        return made(original, projection, original._modules[projection])

    monkeypatch.setattr(kernels, "_as_fused", without)
    assert not load_model(checkpoint("gpt2"), device="cpu").fuses


def test_what_transformers_does_not_fuse_is_written_out():
    """Gemma 2 caps its scores, which the fused kernel would leave out."""
    cpu = torch.device("cpu")
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "vocab_size": 20,
    }
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape))
    assert not kernels.can_fuse(capped, cpu)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    assert kernels.can_fuse(llama, cpu)
    assert not kernels.can_fuse(llama, torch.device("mps"))
    where = {"__module__": "transformers_modules.x"}
    inherited = type("Mine", (transformers.LlamaForCausalLM,), where)
    assert not kernels.can_fuse(inherited(transformers.LlamaConfig(**shape)), cpu)


def test_an_untrained_model_fuses_too(load):
    model, _ = load("neox")
    assert untrained(model, 0).fuses


def test_clean_and_edited_passes_run_the_same_way(load, fused_calls):
    """A run that changes nothing gives the clean losses to the last bit."""
    from interp.text import load_text

    for family in FAMILIES:
        model, _ = load(family)
        text = load_text(tiny.corpus(6), model, documents=6, context=40)
        batch = next(iter(text.batches(6, model.device)))
        with model.measuring(fused=True):
            clean = splice.run_clean(model, batch)
            for layer in range(model.cfg.n_layers):
                fused_calls.clear()
                same = splice.run_edited(model, clean, {layer: lambda z: z.clone()})
                assert len(fused_calls) == model.cfg.n_layers - layer - 1
                whole = splice.run_edited(
                    model, clean, {layer: lambda z: z.clone()}, from_start=True
                )
                assert torch.equal(same.loss, clean.scores.loss)
                assert torch.equal(whole.loss, clean.scores.loss)
