"""What a feature answers to, and what its decoder says.

* contexts: the documents in which a feature is most active, one position of each, with its
  activation at every token around.
* tokens that its decoder row promotes and suppresses, through the unembedding.
* density: how often it fires; the neuron whose value vector is nearest to its decoder row.

What these do not show. The largest activations are a small part of a feature's work. What a row
promotes directly is not what the model makes of it: later layers read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from interp.analyzers.ffn_keys import reading
from interp.analyzers.ffn_keys.coefficients import Memory
from interp.analyzers.ffn_keys.triggers import LayerTriggers, Top
from interp.analyzers.ffn_keys.values import Spoken, Vocabulary
from interp.model import Model
from interp.scores import wide
from interp.text import Text
from probes.activations import Tokens
from probes.directions import nearest

BEFORE, AFTER = 24, 8
"""Tokens around a context's own whose activations are kept."""
TOP_TOKENS = 5


class Firing:
    """How often and where features fire, from one pass over a text.

    Args:
        text: that is gone through.
        n_features: of the SAE.
        top: contexts to keep per feature.
    """

    def __init__(self, text: Text, n_features: int, top: int) -> None:
        self.triggers = LayerTriggers(text, n_features, top)
        self.count = torch.zeros(n_features, dtype=torch.int64)

    def see(self, acts: Float[Tensor, "token feature"], tokens: Tokens) -> None:
        """Take a batch's activations in."""
        self.triggers.see(dense(acts, tokens), tokens.batch)
        self.count += (acts > 0).sum(0).cpu()

    def finish(self) -> Fired:
        """After the last batch."""
        self.triggers.finish()
        n = self.triggers.positions
        total = self.triggers.total.cpu().numpy()
        count = self.count.numpy()
        top = self.triggers.top[1].compute()
        silent = top.values <= 0
        return Fired(
            count=count,
            positions=n,
            mean=np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0),
            top=Top(
                top.values.masked_fill(silent, -torch.inf),
                top.documents.masked_fill(silent, -1),
                top.places.masked_fill(silent, -1),
            ),
        )


@dataclass(frozen=True)
class Fired:
    """What `Firing` has found; all [feature].

    count: positions where it fires; positions: gone through in all.
    mean: mean activation where it fires, nan where it never does.
    top: its contexts; none where it never fires.
    """

    count: np.ndarray
    positions: int
    mean: np.ndarray
    top: Top

    @property
    def density(self) -> np.ndarray:
        """[feature] share of positions where it fires."""
        return self.count / max(self.positions, 1)

    @property
    def dead_fraction(self) -> float:
        """Share of features that fire nowhere in these positions."""
        return float((self.count == 0).mean())


def dense(
    acts: Float[Tensor, "token feature"], tokens: Tokens
) -> Float[Tensor, "batch pos feature"]:
    """Activations where they stand in the batch; 0 at all other positions."""
    included = tokens.batch.included
    out = acts.new_zeros(*included.shape, acts.shape[1])
    out[included] = acts
    return out


class Around:
    """Activations at the tokens around contexts, from a second pass over the text.

    Args:
        text: the one that the contexts are of.
        top: the contexts.
    """

    def __init__(self, text: Text, top: Top) -> None:
        self.feature, self.rank = np.nonzero(top.documents.numpy() >= 0)
        documents = top.documents.numpy()[self.feature, self.rank]
        window, self.position = np.divmod(top.places.numpy()[self.feature, self.rank], text.context)
        place = {d.index: i for i, d in enumerate(text.documents)}
        row = np.array([place[d] for d in documents.tolist()], dtype=np.int64)
        self.key = (row << 32) | window
        self.order = np.argsort(self.key, kind="stable")
        self.values = np.zeros((len(self.feature), BEFORE + 1 + AFTER), dtype=np.float32)

    def see(self, acts: Float[Tensor, "token feature"], tokens: Tokens) -> None:
        """Take a batch's activations in."""
        batch = tokens.batch
        keys = ((batch.rows << 32) | batch.window).cpu().numpy()
        ordered = self.key[self.order]
        low, high = (np.searchsorted(ordered, keys, side=side) for side in ("left", "right"))
        row = np.repeat(np.arange(len(keys)), high - low)
        which = np.concatenate([self.order[a:b] for a, b in zip(low, high, strict=True)])
        if not len(which):
            return
        at = self.position[which][:, None] + np.arange(-BEFORE, AFTER + 1)
        inside = (at >= 0) & (at < batch.tokens.shape[1])
        everywhere = dense(acts, tokens)
        index = (
            torch.from_numpy(i).to(acts.device) for i in (row, at.clip(0), self.feature[which])
        )
        rows, positions, features = index
        positions = positions.clamp(max=batch.tokens.shape[1] - 1)
        found = everywhere[rows[:, None], positions, features[:, None]].float().cpu().numpy()
        self.values[which] = np.where(inside, found, 0)


def contexts(text: Text, top: Top, around: Around) -> pd.DataFrame:
    """One row per feature and context, with the text around and the activations in it."""
    reader = reading.Reader(text, [top])
    flat = reading.flat({(0, 1): top}, list(range(len(top.values))))
    place = flat["place"]
    read = reader.read(flat["document"], place)
    window, position = np.divmod(place, text.context)
    following = pd.array(read.following_token, dtype="Int64")
    following[read.following_token < 0] = pd.NA
    table: dict[str, Any] = {
        "feature": flat["key"],
        "rank": flat["rank"],
        "activation": flat["coefficient"],
        "document": flat["document"],
    }
    if window.any():
        table["window"] = window
    return pd.DataFrame(table).assign(
        position=position,
        token_id=read.token,
        token=reader.labels(read.token),
        next_token_id=following,
        next_token=reader.labels(read.following_token),
        prefix=pd.Categorical(read.prefix),
        following=pd.Categorical(read.following),
        **_spans(reader, flat["document"], place, around.values),
    )


def _spans(
    reader: reading.Reader, documents: np.ndarray, places: np.ndarray, values: np.ndarray
) -> dict[str, list[list[Any]]]:
    """Where in the text (prefix and following) the feature is active, in characters, and how much.

    A piece of a character that ends no text is left out.
    """
    out: dict[str, list[list[Any]]] = {"active_from": [], "active_to": [], "active_value": []}
    index = reader.index(places)
    for document, i, row in zip(documents.tolist(), index.tolist(), values, strict=True):
        ends = reader.pieces[document].ends
        first = i // reader.body * reader.body
        base = ends[first - 1] if first > 0 else 0
        spans = []
        for offset in np.flatnonzero(row > 0).tolist():
            j = i + offset - BEFORE
            if first <= j < len(ends):
                start = ends[j - 1] if j > 0 else 0
                spans.append((start - base, ends[j] - base, float(row[offset])))
        spans = [span for span in spans if span[1] > span[0]]
        for name, column in zip(out, zip(*spans, strict=True) if spans else ((),) * 3, strict=True):
            out[name].append(list(column))
    return out


def features(model: Model, layer: int, sae: Any, fired: Fired, found: pd.DataFrame) -> pd.DataFrame:
    """One row per feature.

    Args:
        model: the SAE's.
        layer: likewise.
        sae: SAELens'.
        fired: from a pass over the text.
        found: its contexts, as `contexts` gives them.
    """
    n = len(fired.count)
    decoder = sae.W_dec.detach()
    spoken, tokens = _spoken(model, layer, decoder)
    top: list[list[str]] = [[] for _ in range(n)]
    for feature, token in zip(found["feature"].tolist(), found["token"].tolist(), strict=True):
        if len(top[feature]) < TOP_TOKENS and token not in top[feature]:
            top[feature].append(token)
    most = fired.top.values[:, 0].double().numpy()
    table: dict[str, Any] = {
        "feature": range(n),
        "density": fired.density,
        "fires": fired.count > 0,
        "mean_activation": fired.mean,
        "max_activation": np.where(np.isfinite(most), most, np.nan),
        "top_tokens": top,
        "promoted_tokens": tokens(spoken.top),
        "suppressed_tokens": tokens(spoken.bottom),
        "value_kurtosis": spoken.kurtosis,
        "decoder_norm": decoder.cpu().double().norm(dim=1).numpy(),
    }
    return pd.DataFrame(table)


def _spoken(model: Model, layer: int, decoder: Tensor) -> tuple[Spoken, Any]:
    """What decoder rows say in vocabulary space, and how ids become tokens."""
    from interp import pieces

    vocabulary = Vocabulary(model)
    rows = list(range(len(decoder)))
    spoken = vocabulary.read(Memory(layer, decoder, None), rows, vocabulary.bases[-1])
    names: dict[int, str] = {}

    def tokens(ids: np.ndarray) -> list[list[str]]:
        for token_id in np.unique(ids).tolist():
            names.setdefault(token_id, pieces.label(model.tokenizer, token_id))
        return [[names[i] for i in row] for row in ids.tolist()]

    return spoken, tokens


def nearest_neurons(
    decoder: Float[Tensor, "feature d_model"], values: Float[Tensor, "neuron d_model"]
) -> tuple[np.ndarray, np.ndarray]:
    """[feature] the neuron whose value vector has the largest |cosine|, and that cosine, signed."""
    rows, columns = (torch.nn.functional.normalize(wide(x), dim=1) for x in (decoder, values))
    cosine, which = nearest(rows, columns)
    return which.cpu().numpy(), cosine.cpu().numpy()
