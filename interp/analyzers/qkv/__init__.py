"""What are Q, K, V and O each worth, and can heads share them?

Matched changes to queries, keys, values and the attention's output, at all layers at once and one
layer at a time, each told by the loss change, paired by document:

* mean: replaced by the mean over other documents.
* noise: Gaussian noise of equal relative size, with the covariance of what it is added to.
* rank: W_Q W_K^T and W_V W_O cut to a lower rank, the way that costs least on the text.
* share: K, V, both, or Q made one within groups of heads, each head keeping a basis of its own;
  without retraining, which real models with shared keys had.

And from the weights: how much the planes that W_Q, W_K and W_V read overlap (`overlap`).

What the numbers do not show. A loss change says what the trained model does without a thing, not
what a model trained without it would do. A larger cost of V than of K says nothing of which is
"more important" beyond this change: means, noise and ranks need not agree. Changes are made at
included positions only; the first position, on which many heads rest, stays.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from interp import hooks, journal, results, scores
from interp.analyzers.qkv import edits, fit, measure, overlap, tables
from interp.analyzers.qkv.overlap import Overlap
from interp.config import QkvConfig, with_options
from interp.model import Model
from interp.results import Result
from interp.text import Text, expect_model, expect_text

log = logging.getLogger(__name__)

PER_DIMENSION = 10
"""Fitted positions per dimension of a site, below which a notice says that there are few."""


def qkv(
    model: Model,
    text: Text,
    config: QkvConfig | None = None,
    /,
    *,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Result:
    """Measure what Q, K, V and O are each worth.

    Args:
        model: from `load_model`.
        text: from `load_text`: the documents whose losses are compared. Means and moments come
            from further documents of the same source.
        config: all options at once, or
        out: the run's folder; progress is saved in `<out>.partial`. None: nowhere.
        **options: fields of `QkvConfig` by name (`each="all", ...`).

    Returns:
        A Result with tables `interventions`, `comparisons` (V against K against Q) and `overlap`.
        Interrupted with Ctrl-C it holds what was measured so far and `complete` is False.

    Raises:
        InterpError: an unknown option, or a model whose queries, keys and values cannot be read.
    """
    config = with_options(QkvConfig, config, options)
    expect_model(model)
    expect_text(text)
    measured = journal.measured(
        "qkv", lambda: Run(model, text, config), lambda run: bool(run.losses.done()), out=out
    )
    return tables.assemble(measured)


class Run:
    """One run's plan and state."""

    def __init__(self, model: Model, text: Text, config: QkvConfig) -> None:
        self.model, self.text, self.config = model, text, config
        self.began = time.perf_counter()
        self.started = results.now()
        self.notices = [*model.notices, *text.notices]
        self.complete = True
        hooks.require(model, *fit.HEADED, "z", "attn_in", "attn_out")
        self.notices += hooks.foreign_notices(model)
        self.fitted_on, self.fitted_elsewhere = self._further_documents()
        self.layers: list[fit.Layer] = []
        self.overlaps: list[Overlap] = []
        self.losses = measure.Losses(text)

    def _further_documents(self) -> tuple[Text, bool]:
        found = self.text.further(self.config.fit_documents)
        if found is None:
            self.notices.append(
                "The source has no further documents: means and moments are of the very documents "
                "whose losses are compared, which makes every change look cheaper than it is."
            )
            return self.text, False
        if len(found) < self.config.fit_documents:
            self.notices.append(
                f"The source has {len(found)} further documents for means and moments, of "
                f"{self.config.fit_documents} asked for (--fit-documents)."
            )
        return found, True

    def measure(self) -> None:
        """All that was asked."""
        config, model = self.config, self.model
        forms = scores.form(model)
        bilinear = all(
            form.bilinear and (not form.rotary or form.angles is not None) for form in forms
        )
        if not bilinear:
            self.notices.append(
                "Scores here are not q . k of a rotation by position, for instance since queries "
                "and keys are normalised: queries and keys are not cut to a lower rank or shared."
            )
        elif any(form.rotary for form in forms):
            self.notices.append(
                "Rotary embedding: W_Q W_K^T cut at offset 0 could not be built, so queries are "
                "projected before their rotation, with keys averaged over rotations; shared q and "
                "k may differ between heads by one complex number per frequency."
            )
        self.layers = fit.fit(
            model, self.fitted_on, config.batch_size, seed=config.seed, progress=config.progress
        )
        widest = model.cfg.d_head * model.cfg.n_heads
        if self.layers[0].count < PER_DIMENSION * widest:
            self.notices.append(
                f"Moments of {widest} dimensions are from {self.layers[0].count} positions: "
                "sharing and rank cost more than they would with better estimates "
                "(--fit-documents, --context)."
            )
        maker = edits.Maker(model, self.text, forms, self.layers, config.seed)
        together = edits.plan(model, bilinear)
        kinds = {"mean": ("mean",), "all": ("mean", "noise", "rank", "share"), "none": ()}
        each = [what for what in together if what.kind in kinds[config.each]]
        measure.measure(
            model,
            self.text,
            maker,
            together,
            each,
            config.batch_size,
            self.losses,
            progress=config.progress,
            announce=lambda n: log.info("%d runs over %d documents.", n, len(self.text)),
        )
        self.overlaps = overlap.measure(model, self.layers, config.seed)
