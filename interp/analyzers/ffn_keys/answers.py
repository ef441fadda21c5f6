"""`--prompt` and `--key` as tables: who says the target, and one key's histogram."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp import pieces, results, stats
from interp.analyzers.ffn_keys import coefficients, kinds_columns, lookup
from interp.analyzers.ffn_keys.lens import Lens
from interp.analyzers.ffn_keys.lookup import Ablated, Answer, Question
from interp.analyzers.ffn_keys.values import Vocabulary
from interp.config import FfnKeysConfig
from interp.model import Model
from interp.results import Result
from interp.text import TokenBatch

BINS = 40


@dataclass(frozen=True)
class Asked:
    """A prompt's answer: the logit taken apart, and the largest keys removed one by one."""

    question: Question
    answer: Answer
    keys: list[tuple[int, int]]
    ablated: Ablated


def ask(model: Model, config: FfnKeysConfig, bos: bool | None) -> Asked:
    """Everything about `config.prompt` and `config.target`; inside `model.measuring()`."""
    assert config.prompt is not None
    assert config.target is not None
    question = lookup.question(model, config.prompt, config.target, bos)
    answer = lookup.decompose(model, question, Lens(model))
    keys = answer.largest(config.top)
    return Asked(question, answer, keys, lookup.ablate(model, question, keys))


def prompt_tables(model: Model, asked: Asked) -> dict[str, pd.DataFrame]:
    """`prompt_keys` and `prompt_layers`."""
    answer, vocabulary = asked.answer, Vocabulary(model)
    layer, key = np.array(asked.keys, dtype=np.int64).reshape(-1, 2).T
    ends: dict[str, list[list[str]]] = {"top": [], "bottom": []}
    for at, one in asked.keys:
        memory = coefficients.memory(model, at)
        said = vocabulary.read(memory, [one], vocabulary.bases[-1])
        for name, ids in (("top", said.top[0]), ("bottom", said.bottom[0])):
            ends[name].append([pieces.label(model.tokenizer, i) for i in ids.tolist()])
    keys = pd.DataFrame(
        {
            "rank": np.arange(1, len(layer) + 1),
            "layer": layer,
            "key": key,
            "coefficient": answer.coefficient[layer, key],
            "contribution": answer.contribution[layer, key],
            "contribution_centred": answer.centred[layer, key],
            "ablated_logit": asked.ablated.logit,
            "ablated_log_prob": asked.ablated.log_prob,
            "value_top_tokens": ends["top"],
            "value_bottom_tokens": ends["bottom"],
        }
    )
    layers = pd.DataFrame(
        {
            "layer": np.arange(len(answer.ffn)),
            "ffn": answer.ffn,
            "keys": answer.contribution.sum(1),
            "bias": answer.bias,
            "error": answer.error,
            "raised": answer.contribution.clip(min=0).sum(1),
            "lowered": answer.contribution.clip(max=0).sum(1),
            "ffn_centred": answer.centred.sum(1),
        }
    )
    return {"prompt_keys": keys, "prompt_layers": layers}


def prompt_summary(model: Model, asked: Asked) -> dict[str, Any]:
    """What the model says there, and how well the parts add up."""
    answer = asked.answer
    layer, key = np.array(asked.keys, dtype=np.int64).reshape(-1, 2).T
    adds, relative = answer.contribution[layer, key], answer.centred[layer, key]
    return {
        "tokens": [pieces.label(model.tokenizer, i) for i in asked.question.tokens],
        "target": pieces.label(model.tokenizer, asked.question.target),
        "target_id": asked.question.target,
        "logit": answer.logit,
        "log_prob": answer.log_prob,
        "rank": answer.rank,
        "says": pieces.label(model.tokenizer, answer.says),
        "ffn": float(answer.ffn.sum()),
        "rest": answer.rest,
        "norm_scale": answer.scale,
        "sum_error": float(np.abs(answer.error).max()),
        "logit_error": answer.gap,
        "contribution_and_ablation": stats.spearman(adds, -asked.ablated.logit),
        "centred_and_ablation": stats.spearman(relative, -asked.ablated.log_prob),
    }


def prompt_alone(model: Model, config: FfnKeysConfig) -> Result:
    """The result of a prompt without a text."""
    began = time.perf_counter()
    started = results.now()
    coefficients.require(model)
    with model.measuring(fused=True):
        asked = ask(model, config, None)
        tables = prompt_tables(model, asked)
    columns = {
        "prompt_keys": kinds_columns.PROMPT_KEYS,
        "prompt_layers": kinds_columns.PROMPT_LAYERS,
    }
    return Result(
        analyzer="ffn-keys",
        config=dataclasses.asdict(config),
        model=model.describe(),
        data={},
        summary={"prompt": prompt_summary(model, asked)},
        summary_columns={"prompt": kinds_columns.SUMMARY["prompt"]},
        tables=tables,
        columns=columns,
        notices=[*model.notices, *asked.question.notices],
        seed=config.seed,
        started=started,
        seconds=time.perf_counter() - began,
        complete=True,
    )


# One key ------------------------------------------------------------------------------------------


class Collected:
    """Every included coefficient of a few keys of one layer: 4 bytes per position and key."""

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys
        self._parts: list[Tensor] = []

    def see(self, tensor: Tensor, batch: TokenBatch) -> None:
        """Take a batch's coefficients [batch, pos, key] in."""
        self._parts.append(tensor[batch.included][:, self.keys].float().cpu())

    def histogram(self, layer: int) -> pd.DataFrame:
        """Counts in equal bins from each key's smallest coefficient to its largest."""
        values = torch.cat(self._parts).double().numpy()
        tables = []
        for key, own in zip(self.keys, values.T, strict=True):
            counts, edges = np.histogram(own, bins=BINS)
            bins = {"low": edges[:-1], "high": edges[1:], "positions": counts}
            tables.append(pd.DataFrame({"layer": layer, "key": key, **bins}))
        return pd.concat(tables, ignore_index=True)
