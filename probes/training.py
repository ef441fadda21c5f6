"""Training sparse autoencoders, by SAELens' own classes and training step.

Several SAEs are trained on one stream at once (widths, seeds, controls), each on its own shuffle of
every block. Inputs are multiplied by one constant, so that their norm is sqrt(d_model) on average;
`finished` folds the constant back, gives the decoder rows unit norm, and returns what SAELens loads
from the saved files: an SAE of raw activations, the one that is judged.

What is SAELens': parameters, losses, auxiliary losses, Adam, schedules, dead features' counts.
What is not: the decoder's bias starts at the data's mean, topk's weights at norm 1; batchtopk's
threshold is set on a sample, since SAELens' running average is far off after a short run.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp import journal
from interp.errors import InterpError
from interp.progress import track
from probes.activations import Stream

log = logging.getLogger("interp")

DEAD_TOKENS = 4_000_000
"""A feature that fires nowhere in as many positions (or a tenth of the run) is trained as dead."""
LOG_ROWS = 200
"""Rows of a training's log, about."""
THRESHOLD_ENTRIES = 2**26  # pre-activations that batchtopk's threshold is set on
CONFIG = "cfg.json"  # as SAELens names it
COUNTERS = (
    "n_training_steps",
    "n_training_samples",
    "act_freq_scores",
    "n_forward_passes_since_fired",
    "n_frac_active_samples",
)
"""What SAELens' trainer counts."""


@dataclass(frozen=True)
class Plan:
    """One SAE to train.

    name: of its row in tables and its folder.
    arch: topk, batchtopk, jumprelu, standard or gated.
    d_in, d_sae: dimensions and features.
    k: active features (topk, batchtopk).
    sparsity: weight of the penalty (the others); None: SAELens' default.
    seed: of its weights and of the shuffle.
    lr: learning rate.
    batch: positions per step.
    tokens: positions in all.
    fixed_decoder: a random dictionary whose encoder alone is trained.
    """

    name: str
    arch: str
    d_in: int
    d_sae: int
    k: int
    sparsity: float | None
    seed: int
    lr: float
    batch: int
    tokens: int
    fixed_decoder: bool = False

    @property
    def steps(self) -> int:
        """Training steps in all."""
        return self.tokens // self.batch

    @property
    def dead_steps(self) -> int:
        """Steps without firing after which a feature counts as dead in training."""
        return max(1, min(DEAD_TOKENS // self.batch, self.steps // 10))


@dataclass
class Log:
    """What is written down while an SAE trains: one entry per so many steps.

    tokens: positions trained on so far; loss: of that step; l0, fvu: of its batch (about the
    calibration's mean); dead: share of features without firing in the last `dead_steps`.
    """

    tokens: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    l0: list[float] = field(default_factory=list)
    fvu: list[float] = field(default_factory=list)
    dead: list[float] = field(default_factory=list)


class Job:
    """One SAE in training: SAELens' trainer, and a log.

    Args:
        plan: what to train.
        scale: what inputs are multiplied by.
        mean: [d_model] of raw inputs.
        device: where.
    """

    def __init__(
        self, plan: Plan, scale: float, mean: Float[Tensor, " d_model"], device: torch.device
    ) -> None:
        self.plan, self.scale = plan, scale
        self.log = Log()
        self.mean = (mean * scale).float().to(device)
        self.sae = _new_sae(plan, self.mean, device)
        self.trainer = _trainer(plan, self.sae, scale, device)

    def order(self, block: int, size: int) -> Int64[Tensor, " token"]:
        """The order in which a block's positions are trained on: the shuffle of this seed."""
        shuffle = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + block)
        return torch.randperm(size, generator=shuffle)

    def step(self, x: Float[Tensor, "token d_model"]) -> None:
        """One training step on a batch of raw activations.

        Raises:
            InterpError: the loss is not finite, or the memory ran out.
        """
        every = max(1, self.plan.steps // LOG_ROWS)
        try:
            with torch.enable_grad():
                output = self.trainer.step(x)
        except RuntimeError as error:
            if not journal.out_of_memory(error):
                raise
            raise InterpError(
                f"Out of memory in a training step of {self.plan.name} ({self.plan.d_sae} features,"
                f" {len(x)} positions), which no smaller batch of the model's would help: use a "
                "smaller --train-batch or --width, fewer --seeds, or --device cpu."
            ) from error
        if self.trainer.n_training_steps % every == 0:
            self._write_down(output)
        self.trainer.n_training_steps += 1

    @torch.no_grad()
    def _write_down(self, output: Any) -> None:
        loss = float(output.loss)
        if not math.isfinite(loss):
            raise InterpError(
                f"The loss of the SAE is not finite after {self.trainer.n_training_samples} "
                f"positions: use a smaller --lr than {self.plan.lr}."
            )
        error = (output.sae_out - output.sae_in).square().sum()
        spread = (output.sae_in - self.mean).square().sum()
        acts = output.feature_acts
        self.log.tokens.append(self.trainer.n_training_samples)
        self.log.loss.append(loss)
        self.log.l0.append(float((acts > 0).float().sum(-1).mean()))
        self.log.fvu.append(float(error / spread))
        self.log.dead.append(self.dead_fraction)

    @property
    def dead_fraction(self) -> float:
        """Share of features without firing in the last `dead_steps` steps of training."""
        return float(self.trainer.dead_neurons.float().mean())

    def said(self) -> str:
        """The last entry of the log, for a progress bar."""
        if not self.log.loss:
            return self.plan.name
        last = self.log
        return (
            f"{self.plan.name} loss {last.loss[-1]:.4g} L0 {last.l0[-1]:.3g} "
            f"FVU {last.fvu[-1]:.3f} dead {100 * last.dead[-1]:.0f}%"
        )

    # Progress ---------------------------------------------------------------------------------

    @property
    def _parts(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "sae": self.sae,
            "optimizer": trainer.optimizer,
            "lr_scheduler": trainer.lr_scheduler,
            **trainer.coefficient_schedulers,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, three times the SAE's weights."""
        return {
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "counters": {name: getattr(self.trainer, name) for name in COUNTERS},
            "log": vars(self.log),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        for name, value in state["counters"].items():
            setattr(self.trainer, name, value)
        self.log = Log(**state["log"])


def _new_sae(plan: Plan, mean: Tensor, device: torch.device) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        sae = _class(plan)
        with torch.no_grad():
            sae.b_dec.copy_(mean.cpu())
            if plan.fixed_decoder:
                rows = torch.randn(plan.d_sae, plan.d_in)
                rows = rows / rows.norm(dim=1, keepdim=True)
                sae.W_dec.copy_(rows)
                # Active rows overlap, so that their projections add up to too much.
                sae.W_enc.copy_(0.5 * rows.T)
                sae.W_dec.requires_grad_(False)
    return sae.to(device)


def _class(plan: Plan) -> Any:
    import sae_lens

    shared: dict[str, Any] = {
        "d_in": plan.d_in,
        "d_sae": plan.d_sae,
        "normalize_activations": "expected_average_only_in",
    }
    warm_up = plan.steps // 20
    # Unit rows, the encoder their transpose (Gao et al. 2024): SAELens' default of 0.1 takes many
    # more steps to grow.
    unit = {"k": plan.k, "decoder_init_norm": 1.0}
    if plan.arch == "topk":
        return sae_lens.TopKTrainingSAE(sae_lens.TopKTrainingSAEConfig(**unit, **shared))
    if plan.arch == "batchtopk":
        config = sae_lens.BatchTopKTrainingSAEConfig(**unit, **shared)
        return sae_lens.BatchTopKTrainingSAE(config)
    weight = 1.0 if plan.sparsity is None else plan.sparsity
    if plan.arch == "jumprelu":
        config = sae_lens.JumpReLUTrainingSAEConfig(
            l0_coefficient=weight, l0_warm_up_steps=warm_up, **shared
        )
        return sae_lens.JumpReLUTrainingSAE(config)
    shared |= {"l1_coefficient": weight, "l1_warm_up_steps": warm_up}
    if plan.arch == "standard":
        return sae_lens.StandardTrainingSAE(sae_lens.StandardTrainingSAEConfig(**shared))
    return sae_lens.GatedTrainingSAE(sae_lens.GatedTrainingSAEConfig(**shared))


def _trainer(plan: Plan, sae: Any, scale: float, device: torch.device) -> Any:
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    warm_up = min(1000, plan.steps // 20)
    config = SAETrainerConfig(
        total_training_samples=plan.tokens,
        train_batch_size_samples=plan.batch,
        lr=plan.lr,
        lr_end=plan.lr / 10,  # must be set; a constant schedule does not read it
        lr_warm_up_steps=warm_up if warm_up > 1 else 0,
        lr_decay_steps=plan.steps // 5,
        device=str(device),
        dead_feature_window=plan.dead_steps,
    )
    trainer = SAETrainer(config, sae, iter(()))
    trainer.activation_scaler.scaling_factor = scale
    return trainer


def fit(jobs: list[Job], stream: Stream, what: str = "training", progress: bool = False) -> None:
    """Train on all of a stream, step by step, from where an earlier process stopped.

    Args:
        jobs: the SAEs, which take each step one after another.
        stream: what to train on, made for batches of theirs.
        what: the stage's name.
        progress: whether a bar is shown: positions, once for the model and once for each SAE.

    Raises:
        InterpError: a loss that is not finite, or the memory ran out in a training step.
    """
    stage = journal.stage(what)
    rows, batch = stream.sized(stage), jobs[0].plan.batch
    held, x, orders = -1, torch.empty(0), []
    with track(stream.tokens * (1 + len(jobs)), what, progress) as bar:

        def seen(n: int) -> None:
            bar.update(n)
            stage.check()  # no job has taken this step yet

        for step in stage.fold(range(stream.tokens // batch), {"jobs": jobs}, training=True):
            block, i = divmod(step, stream.block_tokens // batch)
            if block != held:
                if held < 0 and step:
                    log.info(f"{what}: {step * batch:,} of {stream.tokens:,} positions are done")
                    bar.n = bar.initial = stream.span(block)[0] + step * batch * len(jobs)
                bar.set_postfix_str("running the model")
                del x  # before the next block takes as much again
                x, held = stream.block(block, rows, seen), block
                orders = [job.order(block, len(x)).to(x.device) for job in jobs]
            for job, order in zip(jobs, orders, strict=True):
                job.step(x[order[i * batch : (i + 1) * batch]])
                bar.set_postfix_str(job.said(), refresh=False)
                bar.update(batch)


# The finished SAE ---------------------------------------------------------------------------------


def finished(
    job: Job, sample: Float[Tensor, "token d_model"], metadata: Mapping[str, Any]
) -> dict[str, bytes]:
    """The SAE as files that SAELens loads: it takes raw activations, its decoder has unit rows.

    Args:
        job: trained.
        sample: raw activations that batchtopk's threshold is set on.
        metadata: for SAELens: model_name, hook_name, ...

    Returns:
        File name -> contents.
    """
    sae = copy.deepcopy(job.sae)
    with torch.no_grad():
        if job.plan.arch == "batchtopk":
            sae.topk_threshold.fill_(_threshold(sae, sample * job.scale, job.plan.k))
        sae.fold_activation_norm_scaling_factor(job.scale)
        if job.plan.arch not in ("topk", "batchtopk"):  # which SAELens folds on saving
            sae.fold_W_dec_norm()
    for name, value in metadata.items():
        setattr(sae.cfg.metadata, name, value)
    folder = Path(tempfile.mkdtemp(prefix="interp-sae-"))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            sae.save_inference_model(folder)
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        # In an order that is the same in every process.
        files[CONFIG] = json.dumps(json.loads(files[CONFIG]), sort_keys=True, indent=1).encode()
        return files
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _threshold(sae: Any, x: Tensor, k: int) -> float:
    """What as many pre-activations exceed as k per position are, on scaled activations."""
    x = x[: max(1, THRESHOLD_ENTRIES // sae.cfg.d_sae)]
    _, pre = sae.encode_with_hidden_pre(x)
    wanted = min(k * len(x) + 1, pre.numel())
    return max(0.0, float(pre.flatten().topk(wanted).values[-1]))


def from_files(files: Mapping[str, bytes], device: torch.device) -> Any:
    """The SAE that SAELens loads from these files."""
    folder = Path(tempfile.mkdtemp(prefix="interp-sae-"))
    try:
        for name, contents in files.items():
            (folder / name).write_bytes(contents)
        sae = from_folder(folder, torch.device("cpu"))
        for parameter in sae.parameters():  # the file that they may be mapped from goes away
            parameter.data = parameter.data.clone()
        return sae.to(device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def from_folder(folder: Path, device: torch.device) -> Any:
    """The SAE that SAELens loads from a folder, for measuring."""
    from sae_lens import SAE

    sae = SAE.load_from_disk(folder, device=str(device))
    sae.requires_grad_(False)
    return sae.eval()
