"""What do the keys of an FFN answer to, and what do their values say?

The FFN read as a key-value memory (Geva, Schuster, Berant and Levy 2021, "Transformer Feed-Forward
Layers Are Key-Value Memories"): output = sum over keys of coefficient * value + bias.

* triggers: the documents in which a key's coefficient is largest, one position of each, with the
  prefix that ends there and what follows it.
* values: the tokens that a value raises most in vocabulary space, and how often the top one is the
  next token of the key's first trigger (agreement), against two null models.
* what triggers share: their last tokens, the text before them, and what a dropped token does to the
  coefficient (`patterns`, `earlier`, `mutation`); how many keys make an output, and what it does to
  the prediction (`mixture`); which keys say a token after a prompt (`lookup`).

What the numbers do not show. The largest coefficients are a small part of a key's work: what they
have in common need not be what the key is for. Shares and agreement depend on the number of
documents: compare them at equal numbers only. What a value promotes directly is not what the model
makes of it: later layers read it too. Agreement is no proof of storage, nor is its absence one of
the contrary.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from interp import hooks, journal, memory, results, scores
from interp.analyzers.ffn_keys import answers, coefficients, kinds, tables
from interp.analyzers.ffn_keys.kinds import Kinds
from interp.analyzers.ffn_keys.reading import Reader, next_frequency
from interp.analyzers.ffn_keys.triggers import LayerTriggers, Top
from interp.analyzers.ffn_keys.values import Agreement, Spoken, Vocabulary, agreement
from interp.config import FfnKeysConfig, with_options
from interp.errors import InterpError, UsageError
from interp.model import Model
from interp.progress import track
from interp.results import Result
from interp.text import Text, TokenBatch

ENOUGH = 1000
"""Documents below which a notice says that shares of triggers and agreement depend on them."""
DEPTHS = (0.1, 0.5, 0.9)


def ffn_keys(
    model: Model,
    text: Text | None = None,
    config: FfnKeysConfig | None = None,
    /,
    *,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Result:
    """Find every key's triggers, and read its value.

    Args:
        model: from `load_model`; with dense FFNs.
        text: from `load_text`, tokenised for the same model; 1,000 documents or more. Not looked
            at where only a prompt is asked about.
        config: all options at once, or
        out: the run's folder; progress is saved in `<out>.partial`. None: nowhere.
        **options: fields of `FfnKeysConfig` by name (`layer=(6,), top=50, ...`).

    Returns:
        A Result with tables `keys` (one row per key), `triggers` (one per key and trigger),
        `ffn_layers`, `mutation`, with keys chosen `histogram`, and with a prompt `prompt_keys` and
        `prompt_layers`. Interrupted with Ctrl-C it holds what was measured so far and `complete`
        is False.

    Raises:
        InterpError: an unknown option, a layer or key that is not there, a model without dense
            FFNs, or one whose FFN is not the sum of its keys.

    Source: Geva et al. (2021), arXiv:2012.14913.
    """
    config = with_options(FfnKeysConfig, config, options)
    if not config.needs_text:
        return answers.prompt_alone(model, config)
    if text is None:
        raise UsageError("ffn_keys needs a text for the keys' triggers: pass one from load_text.")
    measured = journal.measured(
        "ffn-keys",
        lambda: Run(model, text, config),
        lambda run: any(one.documents for one in run.found.values()),
        out=out,
    )
    return tables.assemble(measured)


def chosen_layers(config: FfnKeysConfig, n_layers: int) -> list[int]:
    """The layers asked for, ascending.

    Raises:
        UsageError: one that the model does not have.
    """
    if config.layer == ("all",):
        return list(range(n_layers))
    numbers = [layer for layer in config.layer if layer != "all"]
    if not numbers:
        return sorted({int(depth * n_layers) for depth in DEPTHS})
    if max(numbers) >= n_layers:
        raise UsageError(
            f"--layer {max(numbers)} does not exist: the model has layers 0 to {n_layers - 1}."
        )
    return sorted(numbers)


class Run:
    """One run's plan and state.

    found: layer -> its triggers and sums; top: (layer, sign) -> the ranked ones.
    spoken: (layer, basis) -> what the values say; agreed: (layer, basis) -> agreement.
    """

    def __init__(self, model: Model, text: Text, config: FfnKeysConfig) -> None:
        self.model, self.text, self.config = model, text, config
        self.began = time.perf_counter()
        self.started = results.now()
        self.notices = [*model.notices, *text.notices]
        self.complete = True
        coefficients.require(model)
        self.layers = chosen_layers(config, model.cfg.n_layers)
        self.keys = sorted(config.key) or list(range(model.cfg.d_mlp))
        if self.keys[-1] >= model.cfg.d_mlp:
            raise UsageError(
                f"--key {self.keys[-1]} does not exist: the layers of {model.name} have keys 0 to "
                f"{model.cfg.d_mlp - 1}."
            )
        self.text, repeated = text.distinct()
        self.notices += repeated
        self.found = {layer: self._layer() for layer in self.layers}
        self.error = float("nan")  # of the sum over keys
        self.top: dict[tuple[int, int], Top] = {}
        self.reader: Reader | None = None
        self.spoken: dict[tuple[int, str], Spoken] = {}
        self.agreed: dict[tuple[int, str], Agreement] = {}
        self.kinds = Kinds()
        self.collected = {
            layer: answers.Collected(self.keys) for layer in self.layers if config.key
        }
        self.asked: answers.Asked | None = None
        self._say_what_to_mind()

    @property
    def signs(self) -> tuple[int, ...]:
        """Of the triggers asked for."""
        return (1, -1) if self.config.sign == "both" else (1,)

    def value_norms(self, layer: int) -> np.ndarray:
        """[key] l2 norms of the values."""
        values = coefficients.memory(self.model, layer).values[self.keys]
        return scores.wide(values).norm(dim=1).cpu().numpy()

    def _layer(self) -> LayerTriggers:
        keys = None if len(self.keys) == self.model.cfg.d_mlp else self.keys
        return LayerTriggers(self.text, len(self.keys), self.config.top, self.signs, keys)

    def _say_what_to_mind(self) -> None:
        self.notices += hooks.foreign_notices(self.model)
        if len(self.text) < ENOUGH:
            self.notices.append(
                f"{len(self.text)} documents: triggers, their shares and agreement depend on the "
                f"number of documents; compare them at equal numbers ({ENOUGH} or more say more)."
            )
        if len(self.text) < self.config.top:
            self.notices.append(
                f"--top {self.config.top} asks for more documents than there are: every key has "
                f"{len(self.text)} triggers."
            )

    def measure(self) -> None:
        """Triggers, values, kinds of patterns: in this order, for an interruption to lose least."""
        if self.config.prompt is not None:
            self.asked = answers.ask(self.model, self.config, self.text.bos)
            self.notices += self.asked.question.notices
        self.error = coefficients.check(self.model, self.text, self.layers)
        try:
            self._stream()
        finally:  # also what an interruption leaves is worth having
            for layer, one in self.found.items():
                one.finish()
                if one.documents:
                    self.top |= {(layer, sign): top.compute() for sign, top in one.top.items()}
            self.reader = Reader(self.text, self.top.values())
        self._values()
        kinds.measure(self, self.kinds)
        memory.give_back()  # before the tables are made

    def _stream(self) -> None:
        pre = {}
        try:
            hooks.require(self.model, "mlp_pre")
            pre = {layer: one.see_pre for layer, one in self.found.items()}
        except InterpError:
            self.notices.append("The pre-activations cannot be seen: no active_fraction.")
        coefficients.stream(
            self.model,
            self.text,
            {layer: self._see(layer) for layer in self.layers},
            self.config.batch_size,
            pre=pre,
            progress=self.config.progress,
            state={"found": self.found, "collected": self.collected},
        )

    def _see(self, layer: int) -> Callable[[Tensor, TokenBatch], None]:
        """What happens to a layer's coefficients."""

        def both(tensor: Tensor, batch: TokenBatch) -> None:
            self.found[layer].see(tensor, batch)
            self.collected[layer].see(tensor, batch)

        return both if layer in self.collected else self.found[layer].see

    def _values(self) -> None:
        assert self.reader is not None
        vocabulary = Vocabulary(self.model)
        if "folded" not in vocabulary.bases:
            self.notices.append("The final norm is of an unknown kind: no folded basis.")
        frequency = next_frequency(self.text, self.model.cfg.vocab_size)
        bar = track(len(self.layers), "values", self.config.progress)
        for layer in self.layers:
            own = coefficients.memory(self.model, layer)
            following = {
                sign: self.reader.next_of_first(self.top[layer, sign]) for sign in self.signs
            }
            for basis in vocabulary.bases:
                read = functools.partial(
                    vocabulary.read, own, self.keys, basis, following[1], following.get(-1)
                )
                stage = journal.stage(f"values of layer {layer}, {basis}")
                found = Spoken(**stage.once(lambda read=read: vars(read())))
                rng = np.random.default_rng([self.config.seed, layer])
                self.spoken[layer, basis] = found
                self.agreed[layer, basis] = agreement(found.top[:, 0], following[1], frequency, rng)
            bar.update(1)
        bar.close()
