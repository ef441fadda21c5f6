"""Tiny checkpoints in three families, made on the spot: what an installation is examined on.

Sizes differ from each other, biases and norm weights are not trivial and attention is far from
uniform, so that a term that is left out, or two axes that are swapped, show.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from interp.doctor.case import TEXTS

VOCABULARY = 280
SPECIMENS: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 40,
        "n_inner": 56,
        "n_positions": 64,
    },
    "GPT-NeoX, parallel": {
        "model_type": "gpt_neox",
        "vocab_size": 320,  # padded
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "hidden_size": 80,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
    },
    "Llama, shared keys": {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_size": 60,
        "intermediate_size": 88,
        "max_position_embeddings": 64,
    },
}


def make(name: str, folder: Path) -> Path:
    """Save one of SPECIMENS, tokenizer included, into `folder`, and return it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SPECIMENS[name])
    config = AutoConfig.for_model(
        fields.pop("model_type"), **fields, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                weight.copy_(_drawn(key, weight))
    model.save_pretrained(folder)
    _tokenizer(adds_bos=fields.get("num_key_value_heads") is not None).save_pretrained(folder)
    return folder


def _drawn(name: str, weight: torch.Tensor) -> torch.Tensor:
    draw = torch.randn(weight.shape)
    if weight.ndim == 1:
        norm = "norm" in name or ".ln_" in name
        return 1 + 0.3 * draw.clamp(-2, 2) if norm and name.endswith("weight") else 0.25 * draw
    # Wide enough that attention is sharp and no term is small beside the others.
    return draw * 1.5 / math.sqrt(min(weight.shape))


def _tokenizer(adds_bos: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{end} $A", special_tokens=[(end, 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=end,
        eos_token=end,
        unk_token=end,
        clean_up_tokenization_spaces=False,
    )
