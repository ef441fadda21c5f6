"""Which features does a sparse autoencoder find in an MLP's output, and how good is it?

x = hook_mlp_out at a position is written as b + the sum of a few of many directions (features),
each with a positive activation; the directions and who is active are learned (an SAE). Trained on
all documents but those it is judged on, and compared with what else could do the same: principal
components, the MLP's own neurons, a random dictionary, and an SAE of a model whose weights are
shuffled, which an SAE also decomposes to some degree.

What the numbers do not show. That variance or loss is kept says that the decomposition is good, not
that its features are the model's own variables: other seeds and widths find others. A short run's
SAE is far from what the method can do.

Source: Bricken et al. (2023), Cunningham et al. (2023), Gao et al. (2024); SAELens.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp import hooks, journal, results
from interp.analyzers.ffn_keys import coefficients
from interp.config import SuperpositionConfig, with_options
from interp.errors import InterpError, UsageError
from interp.model import Model
from interp.progress import track
from interp.results import Result
from interp.text import Text, expect_model, expect_text
from probes import activations, baselines, loading, meaning, reading, splicing
from probes.activations import Tokens
from probes.baselines import Calibration, Dictionary
from probes.fitting import NULL, RANDOM, SAE, Fitting, Trained
from probes.judging import Judge, Quality
from probes.splicing import Losses
from probes.toy_models import toy
from probes.training import Job

CHUNK = 2048  # positions whose features are held at once
REAL_TOKENS = 100_000_000
NOT_SPARSE = 0.5  # active features per dimension
ERROR, ZERO, MEAN = "random error", "zero", "mean"


def superposition(
    model: Model,
    text: Text,
    config: SuperpositionConfig | None = None,
    /,
    *,
    out: str | Path | None = None,
    **options: Any,
) -> Result:
    """Train a sparse autoencoder on an MLP's output, judge it, and read its features.

    Args:
        model: from `load_model`; with `toy=True` it is not looked at, nor is the text (`probes.toy`
            is the same without them).
        text: from `load_text`: the documents to judge on. All others of its source are trained on.
        config: all options at once, or
        out: the run's folder; progress is saved in `<out>.partial`. None: nowhere.
        **options: fields of `SuperpositionConfig` by name (`layer=6, width=(8,), ...`).

    Returns:
        A Result with tables `baselines` (one row per dictionary), `features`, `contexts`,
        `density`, `training`, and the SAE's files in `sae/`. Interrupted with Ctrl-C it holds what
        was measured so far and `complete` is False.

    Raises:
        InterpError: an unknown option, a layer that is not there, nothing to train on, a run to
            take up that is another one, a loss that is not finite, or no memory for it.
    """
    config = with_options(SuperpositionConfig, config, options)
    if not config.needs_model:
        return toy(steps=config.toy_steps, seed=config.seed, progress=config.progress)
    expect_model(model)
    expect_text(text)
    run = journal.measured(
        "superposition", lambda: Run(model, text, config), lambda run: run.worth_showing, out=out
    )
    if SAE not in run.trained:
        run.keep_unfinished()
    from probes import tables

    return tables.assemble(run)


class Run:
    """One run's plan and state.

    layer: whose MLP output; text: the judged documents; fitting: trains on the others.
    trained: name -> SAE: "sae" is the one that is read; "width 16", "seed 1", "random dictionary",
        "null model" as asked for.
    calibration: mean, scale and covariance of the activations; sample: some of them, raw.
    quality: dictionary -> how well it reconstructs; fired: SAE -> where its features fire.
    losses: of `loss_text`; around: activations around the contexts.
    meaning: what the features say about superposition.
    """

    def __init__(self, model: Model, text: Text, config: SuperpositionConfig) -> None:
        self.model, self.config = model, config
        self.began = time.perf_counter()
        self.started = results.now()
        self.notices = [*model.notices, *text.notices, *hooks.foreign_notices(model)]
        self.complete = True
        self.text, repeated = text.distinct()
        self.notices += repeated
        self.layer = _layer(model, config)
        hooks.site(model, activations.SITE, self.layer)
        self.has_neurons = False  # looked at when it is measured
        self.trained: dict[str, Trained] = {}
        if config.sae is not None:
            sae, notices = loading.load_sae(config.sae, model, self.layer)
            self.trained[SAE] = Trained(sae, {})
            self.notices += notices
        self.fitting = Fitting(model, self.text, config, self.layer, self.notices)
        self.calibration: Calibration | None = None
        self.sample: Tensor | None = None
        self.quality: dict[str, Quality] = {}
        self.fired: dict[str, reading.Fired] = {}
        self.around: reading.Around | None = None
        self.loss_text = self._loss_text()
        self.losses: Losses | None = None
        self.meaning = meaning.Meaning()
        self._say_what_to_mind()

    # What there is ----------------------------------------------------------------------------

    @property
    def sae(self) -> Any:
        """The SAE that is read, as SAELens loads it."""
        return self.trained[SAE].sae

    @property
    def files(self) -> dict[str, bytes]:
        """Path within the run's folder -> contents, of every SAE of the model itself."""
        return {
            f"{name.replace(' ', '-')}/{file}": contents
            for name, one in self.trained.items()
            if name not in (RANDOM, NULL)
            for file, contents in one.files.items()
        }

    @property
    def reads(self) -> dict[str, Any]:
        """What numbers depend on beside model, text and options: the SAE that --sae names."""
        if self.config.sae is None:
            return {}
        weights = journal.sha256(self.sae.state_dict()).hex()
        return {"sae": {"weights": weights, "config": self.sae.cfg.to_dict()}}

    def tokens(
        self, what: str, state: journal.Values, text: Text | None = None, neurons: bool = False
    ) -> Iterator[Tokens]:
        """The judged text's included positions (or another text's), batch by batch.

        Args:
            what: the stage's name.
            state: what is added up, see `journal.Stage.fold`.
            text: None: the judged one.
            neurons: whether the neurons are wanted too.
        """
        wanted, stage = self.text if text is None else text, journal.stage(what)
        batches = stage.fold(stage.batches(self.model, wanted, self.config.batch_size), state)
        rows = sum(len(d.windows) for d in wanted.documents)
        with track(rows, what, self.config.progress) as bar:
            for tokens in activations.judged(self.model, self.layer, wanted, batches, neurons):
                yield tokens
                bar.update(len(tokens.batch.tokens))

    @contextlib.contextmanager
    def in_null_model(self) -> Iterator[None]:
        """Within, the model's matrices are permuted as they were for the null model's SAE."""
        with baselines.permuted(self.model, self.config.seed + 1):
            yield

    @property
    def memory(self) -> coefficients.Memory:
        """The layer's neurons' value vectors and bias."""
        return coefficients.memory(self.model, self.layer)

    def _has_neurons(self) -> bool:
        """Whether the MLP's output is the sum of its neurons' activations times their values."""
        try:
            coefficients.require(self.model)
            coefficients.check(self.model, self.text, [self.layer])
        except InterpError as error:
            self.notices.append(f"The MLP's neurons are not compared with: {error}")
            return False
        return True

    def _loss_text(self) -> Text | None:
        n = min(self.config.loss_documents, len(self.text))
        if n == 0:
            return None
        if n == len(self.text):
            return self.text
        rng = np.random.default_rng([self.config.seed, 5])
        return self.text.subset(sorted(rng.choice(len(self.text), n, replace=False).tolist()))

    def _without_effect(self) -> Iterator[str]:
        """Options that change nothing in this run, and why."""
        config, default = self.config, SuperpositionConfig()
        why = "an SAE is loaded, not trained"
        names = ["arch", "k", "width", "seeds", "sparsity", "lr", "train_batch"]
        if config.sae is None or config.null_model:
            sparse = config.arch in ("topk", "batchtopk")
            why = f"--arch {config.arch} has no such thing"
            names = ["sparsity"] if sparse else ["k"]
        for name in names:
            if getattr(config, name) != getattr(default, name):
                yield f"--{name.replace('_', '-')} changes nothing here: {why}."

    def _say_what_to_mind(self) -> None:
        config = self.config
        self.notices += self._without_effect()
        if config.sae is not None:
            return
        there = self.fitting.windows.tokens
        if there < config.train_tokens:
            self.notices.append(
                f"{self.text.source} has {there:,} positions to train on beside the judged "
                f"documents, of --train-tokens {config.train_tokens:,}."
            )

    # Stages -----------------------------------------------------------------------------------

    def measure(self) -> None:
        """Train, judge, read: in this order, for an interruption to lose least."""
        self.has_neurons = self._has_neurons()
        stream = self.fitting.stream()
        self.calibration, self.sample = self.fitting.calibrate(stream, self.has_neurons)
        if self.config.sae is None:
            plans = self.fitting.plans()
            for job in self.fitting.fit(plans, stream, self.calibration, SAE):
                self._keep(job)
        self._judge()
        self._losses()
        self._look_around()
        if self.config.null_model:
            self._null()
        meaning.measure(self)

    @property
    def worth_showing(self) -> bool:
        """Whether there is an SAE of this run's own, finished or not, or one that was judged."""
        jobs = self.fitting.jobs
        return bool(self.quality or (jobs and jobs[0].trainer.n_training_samples))

    def keep_unfinished(self) -> None:
        """What an interrupted training has come to."""
        self._keep(self.fitting.jobs[0])

    def _keep(self, job: Job) -> None:
        assert self.sample is not None
        self.trained[job.plan.name] = self.fitting.finish(job, self.sample)
        n = job.trainer.n_training_samples
        if job.plan.name == SAE and n < REAL_TOKENS:
            self.notices.append(
                f"Trained on {n:,} positions. Published SAEs take 1e8 to 1e10 "
                "(--train-tokens, with a text that large): read the features as a demonstration."
            )

    # Judging ----------------------------------------------------------------------------------

    @functools.cached_property
    def components(self) -> int:
        """Active components of the baselines: as many as the SAE has, rounded, at least 1."""
        assert self.sample is not None
        active = [(self.sae.encode(x) > 0).sum(1) for x in self.sample.split(CHUNK)]
        return max(1, round(float(torch.cat(active).float().mean())))

    def dictionaries(self) -> dict[str, Dictionary]:
        """Everything that is judged on the model's own activations, the SAE first."""
        assert self.calibration is not None
        out: dict[str, Dictionary] = {
            name: baselines.Sae(one.sae) for name, one in self.trained.items() if name != NULL
        }
        k = self.components
        out["pca"] = baselines.Pca(self.calibration, k)
        out["pca per position"] = baselines.Pca(self.calibration, k, each=True)
        if self.has_neurons:
            out["neurons"] = baselines.Neurons(self.calibration, self.memory, k)
        return out

    def _judge(self) -> None:
        assert self.calibration is not None
        dictionaries = self.dictionaries()
        judges = {name: self._new_judge() for name in (*dictionaries, MEAN, ZERO)}
        firing = {name: self._new_firing(one) for name, one in self.trained.items()}
        state = {"judges": judges, "firing": firing}
        for tokens in self.tokens("judging", state, neurons=self.has_neurons):
            none = torch.zeros(len(tokens.x), device=tokens.x.device)
            for name, dictionary in dictionaries.items():
                if name in self.trained:
                    sae = self.trained[name].sae
                    acts = sae.encode(tokens.x)
                    firing[name].see(acts, tokens)
                    hat, active = sae.decode(acts), (acts > 0).sum(1)
                else:
                    hat, active = dictionary(tokens.x, tokens.neurons)
                judges[name].see(tokens.x, hat, active.float(), tokens.document)
            constant = self.calibration.mean.to(tokens.x).expand_as(tokens.x)
            judges[MEAN].see(tokens.x, constant, none, tokens.document)
            judges[ZERO].see(tokens.x, torch.zeros_like(tokens.x), none, tokens.document)
        self.quality = {name: judge.compute() for name, judge in judges.items()}
        self.fired = {name: one.finish() for name, one in firing.items()}
        l0, d_model = self.quality[SAE].l0.value, self.model.cfg.d_model
        if l0 > NOT_SPARSE * d_model:
            self.notices.append(
                f"{l0:,.0f} features are active per position, of activations of {d_model} "
                "dimensions: that is hardly sparse, so its features mean little. Raise --sparsity, "
                "train on more positions, or use --arch topk."
            )

    def _new_judge(self) -> Judge:
        return Judge(len(self.text), self.model.cfg.d_model)

    def _new_firing(self, one: Trained) -> reading.Firing:
        return reading.Firing(self.text, one.sae.cfg.d_sae, self.config.top)

    def _losses(self) -> None:
        if self.loss_text is None:
            return
        assert self.calibration is not None
        replacements = {
            name: splicing.reconstructed(dictionary)
            for name, dictionary in self.dictionaries().items()
            if not name.startswith("sae seed")
        }
        zero = torch.zeros(self.model.cfg.d_model)
        replacements |= {
            ERROR: splicing.noisy(baselines.Sae(self.sae), self.loss_text, self.config.seed),
            MEAN: splicing.constant(self.calibration.mean),
            ZERO: splicing.constant(zero),
        }
        self.losses = splicing.empty(self.loss_text)
        splicing.splice_in(
            self.model,
            self.layer,
            self.loss_text,
            replacements,
            self.config.batch_size,
            neurons=self.has_neurons,
            into=self.losses,
            progress=self.config.progress,
        )

    def _look_around(self) -> None:
        around = reading.Around(self.text, self.fired[SAE].top)
        for tokens in self.tokens("reading", {"values": around.values}):
            around.see(self.sae.encode(tokens.x), tokens)
        self.around = around

    def _null(self) -> None:
        """The same on a model whose matrices' entries are permuted."""
        with self.in_null_model():
            stream = self.fitting.stream()
            calibration, sample = self.fitting.calibrate(stream, self.has_neurons)
            plan = self.fitting.plan(NULL, self.config.widths[0])
            (job,) = self.fitting.fit([plan], stream, calibration, NULL)
            self.trained[NULL] = self.fitting.finish(job, sample)
            sae = self.trained[NULL].sae
            judge, firing = self._new_judge(), self._new_firing(self.trained[NULL])
            for tokens in self.tokens(f"judging {NULL}", {"judge": judge, "firing": firing}):
                acts = sae.encode(tokens.x)
                firing.see(acts, tokens)
                judge.see(tokens.x, sae.decode(acts), (acts > 0).sum(1).float(), tokens.document)
            self.quality[NULL], self.fired[NULL] = judge.compute(), firing.finish()


def _layer(model: Model, config: SuperpositionConfig) -> int:
    n = model.cfg.n_layers
    layer = n // 2 if config.layer is None else config.layer
    if layer >= n:
        raise UsageError(f"--layer {layer} does not exist: the model has layers 0 to {n - 1}.")
    return layer
