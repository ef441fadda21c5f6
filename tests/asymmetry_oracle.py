"""What asymmetry measures, once more: plain transformers and numpy, every matrix written out.

A is d_model x d_model, pairs are looped over, rotations are applied by transformers' own function,
one position at a time. Imports nothing of the package under test.
"""

import numpy as np
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests import oracle


def _layer(model, layer):
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.h[layer].attn
    if kind == "gpt_neox":
        return model.gpt_neox.layers[layer].attention
    return model.model.layers[layer].self_attn


def n_kv(model):
    return getattr(model.config, "num_key_value_heads", None) or oracle.n_heads(model)


def _views(model, layer):
    """(query weights, key weights, query biases, key biases): views [head, d_head, d_model | none].

    Writing to them edits the model.
    """
    attn, kind = _layer(model, layer), model.config.model_type
    heads, width = oracle.n_heads(model), oracle.d_head(model)
    if kind == "gpt2":  # Conv1D: [in, (q k v) (head d_head)]
        weight = attn.c_attn.weight.data.T.view(3, heads, width, -1)
        bias = attn.c_attn.bias.data.view(3, heads, width)
        return weight[0], weight[1], bias[0], bias[1]
    if kind == "gpt_neox":  # Linear: [(head q k v d_head), in]
        weight = attn.query_key_value.weight.data.view(heads, 3, width, -1)
        bias = attn.query_key_value.bias.data.view(heads, 3, width)
        return weight[:, 0], weight[:, 1], bias[:, 0], bias[:, 1]
    q = attn.q_proj.weight.data.view(heads, width, -1)
    return q, attn.k_proj.weight.data.view(n_kv(model), width, -1), None, None


def weights(model, layer, head):
    """W_Q, W_K [d_model, d_head] of one query head, float64."""
    q, k, _, _ = _views(model, layer)
    kv = head // (oracle.n_heads(model) // n_kv(model))
    return q[head].double().numpy().T, k[kv].double().numpy().T


def write(model, layer, head, w_q=None, w_k=None, bias_q=None, bias_k=None):
    """Set a query head's W_Q [d_model, d_head], its KV head's W_K, and their biases."""
    q, k, bq, bk = _views(model, layer)
    kv = head // (oracle.n_heads(model) // n_kv(model))
    for view, at, value in ((q, head, w_q), (k, kv, w_k)):
        if value is not None:
            view[at] = torch.as_tensor(value).T.to(view)
    for view, at, value in ((bq, head, bias_q), (bk, kv, bias_k)):
        if value is not None and view is not None:
            view[at] = torch.as_tensor(value).to(view)


def biases(model, layer, head):
    _, _, bq, bk = _views(model, layer)
    width = oracle.d_head(model)
    if bq is None:
        return np.zeros(width), np.zeros(width)
    return bq[head].double().numpy(), bk[head].double().numpy()


def fold(model, layer, w):
    """W with the norm's gain and centring in it: what x / sd is multiplied by."""
    kind = model.config.model_type
    if kind == "llama":
        gain = model.model.layers[layer].input_layernorm.weight
        return gain.double().numpy()[:, None] * w
    norm = (
        model.transformer.h[layer].ln_1
        if kind == "gpt2"
        else model.gpt_neox.layers[layer].input_layernorm
    )
    d = len(w)
    centring = np.eye(d) - np.ones((d, d)) / d
    return centring @ np.diag(norm.weight.double().numpy()) @ w


def symmetry(a):
    return (a * a.T).sum() / (a * a).sum()


def metrics(a):
    """Of A written out."""
    values = np.linalg.eigvals(a)
    values = values[np.abs(values) > 1e-9 * np.abs(values).max()]
    s = np.linalg.svd((a - a.T) / 2, compute_uv=False)
    excess = []
    for axis in (0, 1):  # norms of columns, of rows
        norms = np.sqrt((a**2).sum(axis))
        excess.append(np.maximum(0, norms - norms.mean() - 2 * norms.std(ddof=1)).sum())
    column, row = excess
    return {
        "symmetry": symmetry(a),
        "asymmetry": np.linalg.norm(a - a.T) ** 2 / (4 * np.linalg.norm(a) ** 2),
        "stable_rank": np.linalg.norm(a) ** 2 / np.linalg.norm(a, 2) ** 2,
        "positive_real": (values.real > 1e-9 * np.abs(values).max()).mean(),
        "antisymmetric_rank": (s**2).sum() ** 2 / (s**4).sum(),
        "directionality": (column - row) / (column + row) if column + row else 0.0,
    }


# --- scores ---------------------------------------------------------------------------------------


def rotary(model, x, position):
    """x [n, d_head] rotated, all of it as at one position."""
    kind = model.config.model_type
    if kind == "gpt2":
        return x
    body = model.gpt_neox if kind == "gpt_neox" else model.model
    x = torch.as_tensor(x)[None, None].double()
    places = torch.full((1, x.shape[2]), position)
    cos, sin = body.rotary_emb(x.float(), places)
    width = cos.shape[-1]
    turned, _ = apply_rotary_pos_emb(x[..., :width], x[..., :width], cos.double(), sin.double())
    return torch.cat([turned, x[..., width:]], -1)[0, 0].numpy()


def attention_input(model, document):
    """[layer] of [pos, d_model]: what the attention reads."""
    seen = []
    handles = []
    for layer in range(oracle.n_layers(model)):
        module = _layer(model, layer)

        def keep(_module, args, kwargs):
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            seen.append(x[0].detach().double().numpy())

        handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    oracle.logits(model, document)
    for handle in handles:
        handle.remove()
    return seen


def queries_and_keys(model, x, layer, head):
    """q, k [pos, d_head] before rotation, biases included."""
    w_q, w_k = weights(model, layer, head)
    b_q, b_k = biases(model, layer, head)
    return x @ w_q + b_q, x @ w_k + b_k


def score(model, q, k, i, j):
    """One score: query content q [d_head] at position i, key content k at position j."""
    turned_q, turned_k = rotary(model, q[None], i)[0], rotary(model, k[None], j)[0]
    return turned_q @ turned_k / np.sqrt(len(q))


def scores(model, q, k):
    """[pos, pos], both triangles, no mask."""
    turned_q = np.stack([rotary(model, q[i][None], i)[0] for i in range(len(q))])
    turned_k = np.stack([rotary(model, k[j][None], j)[0] for j in range(len(k))])
    return turned_q @ turned_k.T / np.sqrt(q.shape[1])


def exchanged(model, q, k):
    """[pos, pos]: the score at i, j if the two tokens held each other's content."""
    n = len(q)
    at = np.empty((n, n))
    for i in range(n):
        turned_q = rotary(model, q, i)  # every content as a query at i
        for j in range(n):
            at[i, j] = turned_q[j] @ rotary(model, k[i][None], j)[0] / np.sqrt(q.shape[1])
    return at


def correlation(s, included):
    """Pearson r of S_ij and S_ji, i > j, both included."""
    at = np.flatnonzero(included)
    pairs = [(s[i, j], s[j, i]) for i in at for j in at if i > j]
    return np.corrcoef(np.array(pairs).T)[0, 1] if len(pairs) > 2 else np.nan


def centred(s, included):
    """Row and column means over the included cells removed, nan elsewhere."""
    at = np.flatnonzero(included)
    out = np.full_like(s, np.nan)
    inside = s[np.ix_(at, at)]
    out[np.ix_(at, at)] = (
        inside - inside.mean(1, keepdims=True) - inside.mean(0, keepdims=True) + inside.mean()
    )
    return out


def without_offsets(s, included):
    """The mean of each i - j over included cells removed, nan elsewhere."""
    at = np.flatnonzero(included)
    cells = {}
    for i in at:
        for j in at:
            cells.setdefault(i - j, []).append(s[i, j])
    out = np.full_like(s, np.nan)
    for i in at:
        for j in at:
            out[i, j] = s[i, j] - np.mean(cells[i - j])
    return out


def softmax_output(s, v):
    """z [pos, d_head] of causal attention with these scores."""
    n = len(s)
    s = np.where(np.tril(np.ones((n, n), dtype=bool)), s, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True)) @ v
