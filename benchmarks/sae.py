"""Training and judging a sparse autoencoder against SAELens' own runner and its run_evals.

Training: positions per second, model and SAE together, of the same topk SAE on the same windows in
the same batches, inputs as they are (no norm to estimate on either side). Judging: reconstruction,
sparsity, firing counts, and loss and KL with the reconstruction and with zeros in the place of the
MLP's output; run_evals runs the model for each of them from the start and goes through the text
twice.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from typing import Any

import numpy as np
import torch

from benchmarks.common import (
    Options,
    Row,
    Time,
    full_text,
    measured,
    peak_of,
    smollm2,
    timed,
    used,
)
from interp.model import Model
from interp.progress import batches
from interp.text import Text
from probes import activations, splicing, training
from probes.activations import Stream, Windows
from probes.baselines import Sae
from probes.judging import Judge
from probes.reading import Firing
from probes.training import Job, Plan

AT_LEAST_TRAIN, AT_LEAST_JUDGE, AT_MOST_MEMORY = 1.0, 1.5, 1.0
LAYER, CONTEXT, ROWS, BATCH, K, WIDTH, LR = 6, 64, 32, 512, 32, 8, 1e-3
LATE = 20  # judged too: what stands before the layer is run once by interp
TRAINED = 8 * ROWS  # windows; times 63 positions, whole batches of them
JUDGED = ROWS  # documents


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    layers = {f"judging, layer {layer}": layer for layer in (LAYER, LATE)}
    wanted = [case for case in ("training", *layers) if options.wants(case)]
    if wanted:
        model = smollm2(options.device)
        if "training" in wanted:
            rows.append(train(model, options))
        rows += [judge(case, model, n, options) for case, n in layers.items() if case in wanted]
    if options.wants("memory"):
        rows.append(memory(options))
    return rows


# Training -----------------------------------------------------------------------------------------


def windows_of(text: Text) -> Windows:
    ids = [np.asarray(w, dtype=np.int32) for d in text.documents for w in d.windows]
    included = np.array([len(w) - 1 for w in ids])
    return Windows(ids, included, len(text), int(included.sum()), text.special_ids)


def hook(layer: int) -> str:
    return f"blocks.{layer}.hook_mlp_out"


def plan_of(model: Model, positions: int) -> Plan:
    d = model.cfg.d_model
    return Plan("sae", "topk", d, WIDTH * d, K, None, 0, LR, BATCH, positions)


def ours(model: Model, text: Text) -> Any:
    """interp's training; the SAE."""
    stream = Stream(model, LAYER, windows_of(text), BATCH)
    d = model.cfg.d_model
    job = Job(plan_of(model, stream.tokens), 1.0, torch.zeros(d), model.device)
    training.fit([job], stream)
    return job.sae


def runner(model: Model, text: Text, layer: int = LAYER) -> Any:
    """SAELens' training, as its tutorial has it, without logging or saving."""
    import sae_lens
    from datasets import Dataset

    d = model.cfg.d_model
    positions = windows_of(text).tokens // BATCH * BATCH
    sae = sae_lens.TopKTrainingSAEConfig(k=K, d_in=d, d_sae=WIDTH * d, decoder_init_norm=1.0)
    config = sae_lens.LanguageModelSAERunnerConfig(
        sae=sae,
        hook_name=hook(layer),
        context_size=CONTEXT,
        training_tokens=positions,
        store_batch_size_prompts=ROWS,
        train_batch_size_tokens=BATCH,
        lr=LR,
        lr_warm_up_steps=positions // BATCH // 20,
        lr_decay_steps=positions // BATCH // 5,
        dead_feature_window=plan_of(model, positions).dead_steps,  # its loss takes time
        exclude_special_tokens=[int(i) for i in text.special_ids],
        device=str(model.device),
        logger=sae_lens.LoggingConfig(log_to_wandb=False),
        checkpoint_path=None,
        output_path=None,
        streaming=False,
        verbose=False,
    )
    tokens = [list(w) for d in text.documents for w in d.windows]
    return sae_lens.LanguageModelSAETrainingRunner(
        config,
        override_dataset=Dataset.from_dict({"tokens": tokens}),
        override_model=model.bridge,  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def quiet() -> Any:
    """SAELens draws a bar, and warns of the text's end, where it starts again."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def theirs(model: Model, text: Text) -> Any:
    with quiet(), torch.enable_grad():
        return runner(model, text).run()


def train(model: Model, options: Options) -> Row:
    text = full_text(model, TRAINED, CONTEXT)
    fresh = text.held_out(JUDGED) if text.next < len(text.pool.order) else text
    ratios, cpu, last = [], [], Time(0, 0)
    found: dict[str, Any] = {}
    for _ in range(options.reps or 2):
        found["SAELens"], slow = timed(lambda: theirs(model, text), model.device)
        found["interp"], last = measured(model, lambda: ours(model, text))
        ratios.append(slow.wall / last.wall)
        cpu.append(slow.cpu / last.cpu)
    unexplained = {}
    for name, sae in found.items():
        quality = Judge(len(fresh), model.cfg.d_model)
        with model.measuring():
            for tokens in activations.judged(model, LAYER, fresh, batches(model, fresh, "auto")):
                hat, active = Sae(sae)(tokens.x, None)
                quality.see(tokens.x, hat, active, tokens.document)
        unexplained[name] = quality.compute().fvu.value
    positions = windows_of(text).tokens // BATCH * BATCH
    note = (
        f"training: {positions} positions of the embedded model's layer {LAYER}, {WIDTH} features "
        f"per dimension, batches of {BATCH}; interp takes {positions / last.wall:.0f} positions "
        f"per second. Both start from random weights of their own: unexplained variance "
        f"{unexplained['interp']:.3f} (interp) and {unexplained['SAELens']:.3f} (SAELens). The "
        "difference is of the activations that they are trained on, over their root mean square."
    )
    gap = apart(model, text)
    target = AT_LEAST_TRAIN
    return Row("training", "SAELens / interp", ratios, cpu, at_least=target, gap=gap, notes=[note])


def apart(model: Model, text: Text) -> float:
    """How far the two sides' activations of the first windows are apart."""
    with quiet():
        store = runner(model, text).activations_store
        other = store.get_filtered_llm_batch()
    with model.measuring():
        stream = Stream(model, LAYER, windows_of(text), 1)
        own = stream.read(0, len(other), stream.rows)
    return float((own - other).abs().max() / own.square().mean().sqrt())


# Judging ------------------------------------------------------------------------------------------


def judged(model: Model, text: Text, sae: Any, layer: int) -> dict[str, float]:
    """interp's account of an SAE."""
    quality = Judge(len(text), model.cfg.d_model)
    firing = Firing(text, sae.cfg.d_sae, 10)
    for tokens in activations.judged(model, layer, text, batches(model, text, "auto")):
        acts = sae.encode(tokens.x)
        firing.see(acts, tokens)
        quality.see(tokens.x, sae.decode(acts), (acts > 0).sum(1).float(), tokens.document)
    firing.finish()
    zero = torch.zeros(model.cfg.d_model)
    put = {"sae": splicing.reconstructed(Sae(sae)), "zero": splicing.constant(zero)}
    splicing.splice_in(model, layer, text, put)
    found = quality.compute()
    return {"explained variance": 1 - found.fvu.value, "l0": found.l0.value}


def evaluated(model: Model, text: Text, sae: Any, store: Any) -> dict[str, float]:
    """SAELens' account of it."""
    from sae_lens.evals import EvalConfig, run_evals
    from sae_lens.training.activation_scaler import ActivationScaler

    batches = len(text) // ROWS
    config = EvalConfig(
        batch_size_prompts=ROWS,
        n_eval_reconstruction_batches=batches,
        compute_kl=True,
        compute_ce_loss=True,
        n_eval_sparsity_variance_batches=batches,
        compute_l2_norms=True,
        compute_sparsity_metrics=True,
        compute_variance_metrics=True,
        compute_featurewise_density_statistics=True,
    )
    with quiet():
        store.reset_input_dataset()
        found, _ = run_evals(
            sae,
            store,
            model.bridge,  # type: ignore[arg-type]
            ActivationScaler(),
            config,
            exclude_special_tokens=[int(i) for i in text.special_ids],
        )
    found = found["reconstruction_quality"] | found["sparsity"]
    return {"explained variance": found["explained_variance"], "l0": found["l0"]}


def judge(case: str, model: Model, layer: int, options: Options) -> Row:
    text = full_text(model, JUDGED, CONTEXT)
    d = model.cfg.d_model
    sae = Job(plan_of(model, BATCH), 1.0, torch.zeros(d), model.device).sae.eval()
    sae.cfg.metadata.hook_name = hook(layer)
    with quiet():
        store = runner(model, text, layer).activations_store
    ratios, cpu, gap, last = [], [], 0.0, Time(0, 0)
    for _ in range(options.reps or 2):
        other, slow = timed(lambda: evaluated(model, text, sae, store), model.device)
        own, last = measured(model, lambda: judged(model, text, sae, layer))
        gap = max(gap, *(abs(own[name] - other[name]) for name in own))
        ratios.append(slow.wall / last.wall)
        cpu.append(slow.cpu / last.cpu)
    note = (
        f"{case}: {len(text)} documents of {CONTEXT} tokens, {last.wall:.1f} s with interp. The "
        "difference is of explained variance and L0; the losses are means over other tokens "
        "(run_evals leaves out what BOS predicts, and its KL counts the last position). run_evals "
        "makes three passes and one up to the layer; interp one, two from the layer on and one up "
        "to it: the later the layer, the less."
    )
    target = AT_LEAST_JUDGE
    name = "run_evals / interp"
    return Row(case, name, ratios, cpu, at_least=target, gap=gap, notes=[note])


# Memory -------------------------------------------------------------------------------------------


def memory(options: Options) -> Row:
    """Peaks of fresh processes that train."""
    peaks: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(options.reps or 1):
        for which, found in peaks.items():
            found.append(peak_of("benchmarks.sae", which))
    ratios = [own / other for own, other in zip(peaks["ours"], peaks["theirs"], strict=True)]
    note = f"memory, training: {peaks['ours'][-1]:.0f} MB (interp), {peaks['theirs'][-1]:.0f} MB."
    target = AT_MOST_MEMORY
    return Row("memory, training", "interp / SAELens", ratios, at_most=target, notes=[note])


if __name__ == "__main__":
    embedded = smollm2("cpu")
    text = full_text(embedded, TRAINED, CONTEXT)
    if sys.argv[1] == "ours":
        measured(embedded, lambda: ours(embedded, text))
    else:
        theirs(embedded, text)
    print(used())
