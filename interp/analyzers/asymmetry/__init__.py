"""Does i asking j differ from j asking i? A = W_Q W_K^T against its transpose.

In the weights, for every head: s = <A, A^T> / |A|_F^2, 1 for a symmetric A, 0 for one unrelated to
its transpose, -1 for an antisymmetric one (Saponati et al. 2025, arXiv:2502.10927, who print 2r - 1
= s for whole layers). On text: Pearson r of the pre-softmax scores S_ij and S_ji, which is what the
essays' "correlation of A_ij with A_ji" can mean for a model at work. By intervention: what the loss
says when scores are made symmetric.

What the numbers do not show. Raw s weighs all directions of the residual stream alike, those that
never occur among them: `symmetry_data` weighs them as they occur, and follows the scores. Scores as
they are contain row constants, which softmax ignores and the model does not determine: only the
centred correlations say something of the model. A symmetric score is no symmetric attention: the
causal mask and the softmax come after it. With rotary embedding A is the form at offset 0 alone;
the curves by offset cover the others. A loss change under symmetrised scores is that of a model
which was not trained so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from interp import hooks, journal, results, scores
from interp.analyzers.asymmetry import example, ontext, symmetrise, tables, weights
from interp.config import AsymmetryConfig, with_options
from interp.errors import InterpError, UsageError
from interp.model import Model
from interp.results import Result
from interp.scores import Form
from interp.text import Text, expect_model, expect_text

log = logging.getLogger("interp")


def asymmetry(
    model: Model | Iterable[Model | tuple[str, Model]],
    text: Text | None = None,
    config: AsymmetryConfig | None = None,
    /,
    *,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Result:
    """Measure how symmetric every head's query-key form is.

    Args:
        model: from `load_model`. Or an iterable of models, such as a generator that loads a run's
            checkpoints one after another, or of (name, model) pairs: weights only, one table with
            a checkpoint column, and no more than one model in memory.
        text: from `load_text`; needed with activations or symmetrise, else not looked at.
        config: all options at once, or
        out: the run's folder; progress is saved in `<out>.partial`. None: nowhere.
        **options: fields of `AsymmetryConfig` by name (`activations=True, ...`).

    Returns:
        A Result with tables `asymmetry` (one row per query head), `asymmetry_layers`, and, where
        measured, `offsets`, `examples` and `symmetrise`. Interrupted with Ctrl-C it holds what was
        measured so far and `complete` is False.

    Raises:
        InterpError: an unknown option, no text where one is needed, or a model whose queries and
            keys cannot be read.
    """
    config = with_options(AsymmetryConfig, config, options)
    if not isinstance(model, Model):
        if isinstance(model, str) or not isinstance(model, Iterable):
            expect_model(model)
        return _over_training(model, config)
    if config.needs_text and text is None:
        raise UsageError("activations and symmetrise need a text: pass one from load_text.")
    if config.needs_text:
        expect_text(text)
    measured = journal.measured(
        "asymmetry",
        lambda: Run(model, text if config.needs_text else None, config),
        lambda run: run.weights is not None,
        out=out,
    )
    return tables.assemble(measured)


class Run:
    """One run's plan and state."""

    def __init__(self, model: Model, text: Text | None, config: AsymmetryConfig) -> None:
        self.model, self.text, self.config = model, text, config
        self.began = time.perf_counter()
        self.started = results.now()
        self.notices = [*model.notices, *(text.notices if text is not None else [])]
        self.complete = True
        self.forms: list[Form] = []
        self.biases = False
        self.weights: weights.Weights | None = None
        self.on_text: ontext.OnText | None = None
        self.effects: dict[str, symmetrise.Effects] = {}
        self.examples: example.Examples | None = None

    def measure(self) -> None:
        """All that was asked, cheapest first, so that an interruption loses least."""
        config, model = self.config, self.model
        self.notices += hooks.foreign_notices(model)
        self.forms = scores.form(model)
        self.biases = scores.has_biases(model)
        self._say_what_the_form_is()
        self.weights = weights.measure(model, self.forms, config.seed)
        if config.activations:
            assert self.text is not None
            self.on_text = ontext.measure(
                model,
                self.text,
                self.forms,
                config.batch_size,
                controls=config.controls,
                progress=config.progress,
            )
        self.examples = example.measure(model, self.forms, self._ranking())
        if config.symmetrise:
            self._symmetrise()

    def _say_what_the_form_is(self) -> None:
        other = [i for i, form in enumerate(self.forms) if not form.bilinear]
        if other:
            self.notices.append(
                f"Scores of {len(other)} layers ({other[0]}, ...) are not scale * (q R) . (k R), "
                "for instance since queries and keys are normalised: A = W_Q W_K^T is not what "
                "they are made with there, and correlations of contents are missing."
            )
        if not all(form.prenorm for form in self.forms):
            self.notices.append(
                "The attention does not read the output of the block's first norm: there is no "
                "norm-folded basis."
            )

    def _ranking(self) -> Any:
        """[layer, head] by which heads count as most and least symmetric in the examples."""
        assert self.weights is not None
        if self.on_text is not None and self.on_text.finished.any():
            return tables.correlations(self.on_text)["content_centred"].mean
        return self.weights.raw.heads["symmetry"]

    def _symmetrise(self) -> None:
        assert self.text is not None
        if not all(form.bilinear for form in self.forms):
            raise InterpError(
                f"{self.model.name} has scores that are not products of queries and keys: their "
                "contents cannot be exchanged."
            )
        config = self.config
        texts = {"natural": self.text, "repeated": symmetrise.repeated(self.text, config.seed)}
        for name, text in texts.items():
            self.effects[name] = symmetrise.empty(self.model, text)

            def announce(seconds: float, name: str = name, text: Text = text) -> None:
                log.info(
                    "Symmetrising every head and its control on %d documents (%s): about %s.",
                    len(text),
                    name,
                    f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min",
                )

            symmetrise.measure(
                self.model,
                text,
                self.forms,
                config.batch_size,
                seed=config.seed,
                progress=config.progress,
                what=f"symmetrised, {name}",
                into=self.effects[name],
                announce=announce,
            )


def _over_training(models: Iterable[Model | tuple[str, Model]], config: AsymmetryConfig) -> Result:
    """Weights of several checkpoints, each let go before the next is loaded."""
    if config.resume:
        raise UsageError("Several checkpoints take no long: there is nothing to take up.")
    if config.needs_text:
        raise UsageError(
            "Several checkpoints are compared by their weights: leave out --activations and "
            "--symmetrise, or name one checkpoint."
        )
    made: list[tuple[str, Result]] = []
    remaining = iter(models)
    while (item := next(remaining, None)) is not None:
        name, model = item if isinstance(item, tuple) else (None, item)
        del item
        expect_model(model)
        name = name or model.revision or model.name
        run = Run(model, None, config)
        try:
            with model.measuring():
                run.forms = scores.form(model)
                run.weights = weights.measure(model, run.forms, config.seed)
        except KeyboardInterrupt:
            if not made:
                raise
            made[-1][1].complete = False
            break
        while any(name == other for other, _ in made):
            name += "'"
        made.append((name, tables.assemble(run)))
        log.info("%s: median symmetry %.3f", name, made[-1][1].summary["symmetry"]["median"])
        del run, model
    if not made:
        raise UsageError("There is no checkpoint to measure.")
    return tables.combine(made, config)
