"""Does the instrument find features where there are some? SAEs on synthetic activations.

SAELens' generator makes activations x = sum_i a_i f_i of known unit directions f_i and sparse,
independent, non-negative a_i. An SAE is trained on them as on a model's activations, and its
decoder compared with the planted directions. On this easy setting (more features than dimensions,
but sparse, independent, and as wide an SAE as there are features) a good instrument finds nearly
all.

What it does not show: that features of a language model are found as well. There they may be
dense, correlated, hierarchical, or no directions at all, and their number is unknown.

Source: SAELens, sae_lens.synthetic; mean max cosine as in Sharkey, Braun and Millidge (2022).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.progress import track
from interp.results import Column
from interp.stats import mean_interval
from probes.directions import Gaussian, nearest, unit

RECOVERED = 0.9

Train = Callable[["Setting", Iterator[Tensor], int], Tensor]
"""(setting, batches [token, d_model], seed) -> the trained decoder [feature, d_model]."""


@dataclass(frozen=True)
class Setting:
    """The planted features and the training.

    Attributes:
        features: planted, and of the SAE.
        d_model: dimensions.
        active: planted features active on an input, on average; also the SAE's k.
        tokens: inputs of the training.
        batch: inputs a step.
        lr: learning rate of Adam.
    """

    features: int = 128
    d_model: int = 64
    active: int = 3
    tokens: int = 150_000
    batch: int = 256
    lr: float = 2e-2


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found; COLUMNS says what each is.

    Per-seed values are in `mmcs_by_seed`; the interval is a t interval over seeds.
    """

    mmcs: float
    mmcs_low: float
    mmcs_high: float
    mmcs_by_seed: list[float]
    recovered: float
    null_mmcs: float
    features: int
    d_model: int
    active: int
    tokens: int
    seeds: int
    seconds: float

    def describe(self) -> dict[str, Any]:
        """As plain values, for a result's summary."""
        return asdict(self)


COLUMNS = {
    "mmcs": Column(
        "cosine",
        "Mean over planted features of the largest cosine with a decoder direction, mean of seeds.",
    ),
    "mmcs_low": Column("cosine", "Lower end of its 95% t interval over seeds; missing for one."),
    "mmcs_high": Column("cosine", "Upper end."),
    "mmcs_by_seed": Column("cosine", "Of each seed."),
    "recovered": Column(
        "share of features", f"Planted features with such a cosine above {RECOVERED}, all seeds."
    ),
    "null_mmcs": Column(
        "cosine", "The same of as many random directions with the activations' covariance."
    ),
    "features": Column("features", "Planted, and of the SAE."),
    "d_model": Column("dimensions", "Of the synthetic activations."),
    "active": Column("features per token", "Active on average; the SAE's k."),
    "tokens": Column("tokens", "Each SAE was trained on."),
    "seeds": Column("runs", "Each with features and weights of its own."),
    "seconds": Column("seconds", "Wall-clock duration."),
}


def calibrate(
    setting: Setting | None = None,
    *,
    train: Train | None = None,
    seeds: int = 3,
    seed: int = 0,
    progress: bool = False,
) -> Calibration:
    """Train SAEs on planted features and measure how many they find.

    Args:
        setting: what is planted; None: the easy setting.
        train: trains an SAE and returns its decoder; None: SAELens' TopK SAE and trainer.
        seeds: runs.
        seed: of the first run; the others follow.
        progress: show a bar over runs.
    """
    setting = setting or Setting()
    start = time.monotonic()
    cosines, null = [], []
    bar = track(seeds, "calibration", progress)
    for own in range(seed, seed + seeds):
        planted, batches = plant(setting, own)
        decoder = (train or train_topk)(setting, batches, own)
        cosines.append(recovery(decoder, planted))
        sample = torch.cat([next(batches) for _ in range(20)])
        random = Gaussian.of(torch.cov(sample.T)).draw(setting.features, own)
        null.append(float(recovery(random, planted).mean()))
        bar.update(1)
    bar.close()
    by_seed = [float(c.mean()) for c in cosines]
    interval = mean_interval(by_seed)
    return Calibration(
        mmcs=float(interval.mean),
        mmcs_low=float(interval.low),
        mmcs_high=min(1.0, float(interval.high)) if seeds > 1 else float("nan"),
        mmcs_by_seed=by_seed,
        recovered=float((np.concatenate(cosines) > RECOVERED).mean()),
        null_mmcs=float(np.mean(null)),
        features=setting.features,
        d_model=setting.d_model,
        active=setting.active,
        tokens=setting.tokens,
        seeds=seeds,
        seconds=time.monotonic() - start,
    )


def recovery(decoder: Tensor, planted: Tensor) -> np.ndarray:
    """[planted] largest (signed) cosine of each planted direction with a decoder direction.

    Decoder directions that are zero are left out.
    """
    kept = decoder.detach().norm(dim=-1) > 0
    if not bool(kept.any()):
        return np.zeros(len(planted))
    return nearest(unit(planted), unit(decoder, kept), signed=True)[0].cpu().numpy()


def plant(setting: Setting, seed: int) -> tuple[Tensor, Iterator[Tensor]]:
    """Planted unit directions [feature, d_model], and endless batches of activations.

    The batches have a random state of their own: they do not depend on what else draws numbers.
    """
    from sae_lens.synthetic import ActivationGenerator, FeatureDictionary

    dictionary = FeatureDictionary(
        setting.features, setting.d_model, seed=seed, initializer=None, bias=True
    )
    generator = ActivationGenerator(
        setting.features, setting.active / setting.features, std_firing_magnitudes=0.2
    )

    def batches() -> Iterator[Tensor]:
        state = torch.Generator().manual_seed(seed + 1).get_state()
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                with torch.no_grad():
                    made = dictionary(generator(setting.batch))
                state = torch.get_rng_state()
            yield made

    return dictionary.feature_vectors.detach(), batches()


def train_topk(setting: Setting, batches: Iterator[Tensor], seed: int) -> Tensor:
    """Train SAELens' TopK SAE with SAELens' trainer; its decoder [feature, d_model]."""
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sae = TopKTrainingSAE(
            TopKTrainingSAEConfig(
                d_in=setting.d_model, d_sae=setting.features, k=setting.active, device="cpu"
            )
        )
        steps = setting.tokens // setting.batch
        config = SAETrainerConfig(
            total_training_samples=setting.tokens,
            train_batch_size_samples=setting.batch,
            lr=setting.lr,
            lr_end=setting.lr / 10,
            lr_decay_steps=steps // 3,
            device="cpu",
            dead_feature_window=max(1, steps // 10),
            feature_sampling_window=steps + 1,
            logger=LoggingConfig(log_to_wandb=False),
        )
        trainer = SAETrainer(cfg=config, sae=sae, data_provider=batches)
        # The loop of trainer.fit(), without its progress bar.
        for _ in range(steps):
            trainer.maybe_reset_sparsity()
            trainer.step(next(batches))
            trainer.n_training_steps += 1
    return sae.W_dec.detach()
