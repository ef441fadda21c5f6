"""What an SAE says about superposition: how its features share the space, and what they tell.

* geometry: live decoder directions beside random ones with the activations' covariance.
* matches: the features of the SAE beside those of other seeds' SAEs.
* concepts: how well features tell mechanical labels, beside the MLP's neurons, principal
  directions, as many random directions, a random dictionary, and the SAE of a permuted model.
* neurons: by how many features each neuron is explained, beside rotated neurons.

The last two take whole documents of the judged text, a seeded sample of up to TOKENS positions;
one half of them chooses, the other is scored. What each does not show is told where it is measured:
`geometry`, `matching`, `concept_scores`, `polysemantic`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from scipy import sparse
from torch import Tensor

from interp.analyzers.ffn_keys.kinds import names_of
from interp.analyzers.ffn_keys.patterns import Positions
from interp.errors import InterpError
from interp.progress import track
from interp.text import Text
from probes import concept_scores, concepts, geometry, matching, polysemantic
from probes.concept_scores import ConceptScores
from probes.fitting import NULL, RANDOM, SAE
from probes.geometry import Geometry
from probes.matching import Match
from probes.polysemantic import Polysemantic

if TYPE_CHECKING:
    from probes.run import Run

TOKENS, LEAST_TOKENS = 15_000, 5_000
NUMBERS = 2**27  # activations of one dense dictionary; fewer tokens for wide ones, if not too few
NEURONS, PCA, DIRECTIONS = "neurons", "pca", "random directions"


@dataclass
class Meaning:
    """What `measure` found; None for what was not measured, of which a notice says why.

    matches: other seed's SAE -> its match with the SAE that is read.
    scores: of the dictionaries "sae", "random dictionary", "null model", NEURONS, PCA, DIRECTIONS.
    """

    geometry: Geometry | None = None
    matches: dict[str, Match] = field(default_factory=dict)
    scores: ConceptScores | None = None
    neurons: Polysemantic | None = None


def measure(run: Run) -> None:
    """Fill `run.meaning`, the cheap parts first: an interruption leaves what there is."""
    assert run.calibration is not None
    out, seed, covariance = run.meaning, run.config.seed, run.calibration.covariance
    decoder, live = run.sae.W_dec.detach(), _live(run, SAE)
    with _or_notice(run, "The geometry of the features is not measured"):
        values = run.memory.values.detach() if run.has_neurons else None
        out.geometry = geometry.measure(decoder, live, covariance, values, seed=seed)
    for name, one in run.trained.items():
        if name.startswith("sae seed"):
            with _or_notice(run, f"Features are not matched with those of {name}"):
                other = one.sae.W_dec.detach()
                out.matches[name] = matching.match(
                    decoder, other, covariance, live, _live(run, name), seed=seed
                )
    if run.config.concepts:
        _on_text(run, out)


@contextlib.contextmanager
def _or_notice(run: Run, what: str) -> Iterator[None]:
    """Something that cannot be measured here is said, and the rest goes on."""
    try:
        yield
    except InterpError as error:
        run.notices.append(f"{what}: {error}")


def _live(run: Run, name: str) -> Bool[Tensor, " feature"]:
    return torch.from_numpy(run.fired[name].count > 0)


# On text ------------------------------------------------------------------------------------------


def _on_text(run: Run, out: Meaning) -> None:
    text = _sampled(run)
    at = Positions.of(text)
    features, x, neurons = _read(run, text, at)
    bar = track(len(features) + 2 + (neurons is not None), "concepts", run.config.progress)
    with _or_notice(run, "Concepts are not scored"):
        bank = concepts.bank(at, names_of(text, at), seed=run.config.seed)
        made = _dictionaries(run, features, x, neurons)
        for name in [name for name, acts in made.items() if _silent(acts, bank.first_half)]:
            run.notices.append(f"Concepts are not scored for {name}: nothing fires.")
            del made[name]
        out.scores = concept_scores.score(
            made, bank, seed=run.config.seed, tick=lambda: bar.update(1)
        )
    bar.close()
    if neurons is None:
        return
    bar = track(2 * neurons.shape[1], "what neurons are made of", run.config.progress)
    with _or_notice(run, "Neurons are not explained by features"):
        first = concepts.halves(at.document[at.candidates], run.config.seed)
        out.neurons = polysemantic.measure(
            features[SAE], neurons, first, seed=run.config.seed, tick=lambda: bar.update(1)
        )
    bar.close()


def _sampled(run: Run) -> Text:
    """Whole judged documents, at random, of as many positions as can be afforded."""
    at = Positions.of(run.text)
    counts = np.bincount(at.document[at.included], minlength=len(run.text))
    widest = max(run.sae.cfg.d_sae, run.model.cfg.d_mlp)
    limit = min(TOKENS, max(LEAST_TOKENS, NUMBERS // widest))
    order = np.random.default_rng([run.config.seed, 15]).permutation(len(run.text))
    kept = max(1, int(np.searchsorted(counts[order].cumsum(), limit, side="right")))
    return run.text.subset(np.sort(order[:kept]).tolist())


def _read(
    run: Run, text: Text, at: Positions
) -> tuple[dict[str, Any], np.ndarray, np.ndarray | None]:
    """Each SAE's activations, the activations themselves and the neurons', at included positions.

    Returns:
        features: SAE -> [token, feature], sparse.
        x: [token, d_model].
        neurons: [token, d_mlp], or None.
        All in the order of the text.
    """
    own = [name for name in (SAE, RANDOM) if name in run.trained]
    acts: dict[str, list[Any]] = {name: [] for name in (*own, NULL) if name in run.trained}
    places, x, neurons, ids = [], [], [], []

    def keep(name: str, given: Tensor) -> None:
        found = run.trained[name].sae.encode(given).detach().float().cpu().numpy()
        one = sparse.csr_array(found)
        acts[name].append((one.data, one.indices, one.indptr))

    state = {"acts": {name: acts[name] for name in own}, "x": x, "neurons": neurons}
    state |= {"places": places, "ids": ids}
    for tokens in run.tokens("concepts", state, text, neurons=run.has_neurons):
        for name in own:
            keep(name, tokens.x)
        x.append(tokens.x.cpu().numpy())
        if tokens.neurons is not None:
            neurons.append(tokens.neurons.cpu().numpy())
        ids.append(tokens.token_id.cpu().numpy())
        places.append(torch.stack([tokens.document, tokens.window, tokens.position]).cpu().numpy())
    if NULL in acts:
        with run.in_null_model():
            for tokens in run.tokens(f"concepts of {NULL}", {"acts": acts[NULL]}, text):
                keep(NULL, tokens.x)
    document, window, position = np.concatenate(places, axis=1)
    order = np.lexsort((position, window, document))  # batches may come in any order
    assert np.array_equal(np.concatenate(ids)[order], at.ids[at.candidates])
    features = {
        name: _stacked(parts, run.trained[name].sae.cfg.d_sae)[order]
        for name, parts in acts.items()
    }
    return (
        features,
        np.concatenate(x)[order],
        np.concatenate(neurons)[order] if neurons else None,
    )


def _stacked(parts: list[Any], width: int) -> Any:
    """[token, feature] from (data, indices, indptr) of some tokens each."""
    rows = [sparse.csr_array(part, shape=(len(part[2]) - 1, width)) for part in parts]
    return sparse.csr_array(sparse.vstack(rows))


def _dictionaries(
    run: Run, features: dict[str, Any], x: np.ndarray, neurons: np.ndarray | None
) -> dict[str, Any]:
    """Everything that is scored, [token, direction]."""
    assert run.calibration is not None
    centred = x - run.calibration.mean.numpy().astype(np.float32)
    rng = np.random.default_rng([run.config.seed, 16])
    shape = (x.shape[1], features[SAE].shape[1])
    made = {**features}
    if neurons is not None:
        made[NEURONS] = neurons
    made[PCA] = centred @ run.calibration.directions.numpy().astype(np.float32).T
    made[DIRECTIONS] = centred @ rng.standard_normal(shape, dtype=np.float32)
    return made


def _silent(acts: Any, first: np.ndarray) -> bool:
    return sparse.issparse(acts) and acts[first].nnz == 0
