"""From a run's options to trained SAEs: the stream, its calibration, plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp import journal
from interp.config import SuperpositionConfig
from interp.errors import InterpError, UsageError
from interp.model import Model
from interp.progress import track
from interp.text import Text
from probes import loading, training
from probes.activations import Cache, Stream, Windows
from probes.baselines import Calibration, Moments
from probes.training import Job, Log, Plan

CALIBRATION_TOKENS = 16_384
SAMPLE_TOKENS = 8192
SAE, RANDOM, NULL = "sae", "random dictionary", "null model"


@dataclass
class Trained:
    """One SAE: SAELens' object on raw activations, its files, and how training went.

    plan, log, dead_training, tokens (trained on): None for an SAE that was loaded.
    """

    sae: Any
    files: dict[str, bytes]
    plan: Plan | None = None
    log: Log | None = None
    dead_training: float | None = None
    tokens: int | None = None


class Fitting:
    """Trains SAEs as the options say.

    Args:
        model: inside `model.measuring()` when anything is trained.
        text: the judged one; its source's other documents are trained on.
        config: the options.
        layer: whose MLP output.
        notices: where to say what a reader must know.

    Attributes:
        jobs: those of the training that was begun last.
    """

    def __init__(
        self,
        model: Model,
        text: Text,
        config: SuperpositionConfig,
        layer: int,
        notices: list[str],
    ) -> None:
        self.model, self.text, self.config, self.layer = model, text, config, layer
        self.notices = notices
        self.windows = Windows.of(text, config.train_tokens)
        self.batch = min(config.train_batch, self.windows.tokens)
        self.jobs: list[Job] = []

    @property
    def tokens(self) -> int:
        """Positions that are trained on: whole batches of them."""
        return self.windows.tokens // self.batch * self.batch

    def stream(self) -> Stream:
        """The training text's activations, in the model as it is now."""
        stream = Stream(self.model, self.layer, self.windows, self.batch, self.config.batch_size)
        if self.config.activations_cache is not None:
            shape = (stream.tokens, stream.d_model)
            stream.cache = Cache(Path(self.config.activations_cache), self.what(), shape)
            self.notices.append(
                f"--activations-cache: {stream.cache.bytes / 1e6:,.0f} MB in {stream.cache.file}."
            )
        return stream

    def what(self) -> dict[str, Any]:
        """All that the activations depend on."""
        return {
            "model": self.model.name,
            "weights": journal.fingerprint(self.model),
            "dtype": str(self.model.dtype),
            "device": str(self.model.device.type),
            "layer": self.layer,
            "text": self.windows.sha256,
            "train-tokens": self.tokens,
        }

    def calibrate(self, stream: Stream, neurons: bool) -> tuple[Calibration, Tensor]:
        """From the first positions of a stream, where asked for with neurons; and some of them."""
        moments = Moments()
        kept: list[Tensor] = []
        upto = min(CALIBRATION_TOKENS, stream.tokens)
        stage = journal.stage("calibration")
        pieces = stream.pieces(0, upto, stream.sized(stage))
        with track(upto, "calibrating", self.config.progress) as bar:
            for piece in stage.fold(pieces, {"moments": moments, "kept": kept}):
                x, a = stream.run(piece, neurons)
                moments.see(x, a)
                if sum(map(len, kept)) < SAMPLE_TOKENS:
                    kept.append(x)
                bar.update(len(x))
        found = moments.compute()
        if not float(found.variances.sum()) > 0:
            raise InterpError(
                f"The MLP output of layer {self.layer} is the same everywhere: there is nothing to "
                "take apart."
            )
        return found, torch.cat(kept)[:SAMPLE_TOKENS]

    def plans(self) -> list[Plan]:
        """Every SAE to train on the model itself: the one that is read comes first."""
        first = self.config.widths[0]
        plans = [self.plan(SAE, first)]
        plans += [self.plan(f"sae seed {i}", first, seed=i) for i in range(1, self.config.seeds)]
        plans += [self.plan(f"sae width {width}", width) for width in self.config.widths[1:]]
        return [*plans, self.plan(RANDOM, first, fixed=True)]

    def plan(self, name: str, width: int, seed: int = 0, fixed: bool = False) -> Plan:
        """One of them.

        Raises:
            UsageError: k is more than it has features.
        """
        config = self.config
        d_sae = width * self.model.cfg.d_model
        if config.k > d_sae:
            raise UsageError(f"--k {config.k} is more than the {d_sae} features of width {width}.")
        return Plan(
            name=name,
            arch=config.arch,
            d_in=self.model.cfg.d_model,
            d_sae=d_sae,
            k=config.k,
            sparsity=config.sparsity,
            seed=config.seed + seed,
            lr=config.lr,
            batch=self.batch,
            tokens=self.tokens,
            fixed_decoder=fixed,
        )

    def fit(
        self, plans: list[Plan], stream: Stream, calibration: Calibration, name: str
    ) -> list[Job]:
        """Train them all on one stream."""
        jobs = [Job(plan, calibration.scale, calibration.mean, self.model.device) for plan in plans]
        self.jobs = jobs
        training.fit(jobs, stream, f"training {name}", self.config.progress)
        return jobs

    def finish(self, job: Job, sample: Tensor) -> Trained:
        """The SAE of a job, as it is saved and judged."""
        files = training.finished(
            job,
            sample,
            {
                "model_name": self.model.name,
                "hook_name": loading.hook_name(self.layer),
                "context_size": self.text.context,
                "prepend_bos": self.text.bos,
            },
        )
        sae = training.from_files(files, self.model.device)
        n = job.trainer.n_training_samples
        return Trained(sae, files, job.plan, job.log, job.dead_fraction, n)
