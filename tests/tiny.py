"""Tiny checkpoints in exact architectures, made at test time, and text to run them on.

Sizes differ from each other on purpose (heads, layers, d_head, d_model), so that swapped axes fail;
norm weights are not 1, biases not 0, and attention is far from uniform, so that a term that was
left out shows. Nothing here imports the package under test: these are inputs of its oracle.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

N_LAYERS = 3
REAL_VOCAB = 300
PADDED_VOCAB = 384
CONTEXT = 64
FAMILIES = ("gpt2", "neox", "neox-serial", "llama", "llama-tied")
BOS_FAMILIES = ("llama", "llama-tied")

END = "<|endoftext|>"

# Made-up words, with a few short ones that repeat as function words do.
_SHORT_WORDS = "the a of to and in it is on for by at as or so we he an"
_LONG_WORDS = (
    "lamp river garden miller copper window basket orchard candle harbour meadow thimble lantern "
    "pebble saddle barrel feather kettle ribbon cellar hollow timber anchor blanket sparrow walnut "
    "carries gathers mends follows borrows paints answers counts gleams drifts wanders settles "
    "quiet narrow silver amber crooked early gentle hollowed distant patient brisk mossy"
)
_SHORT, _LONG = _SHORT_WORDS.split(), _LONG_WORDS.split()


def _sentence_words(rng: random.Random, count: int) -> list[str]:
    """`count` words: short ones half of the time, the rest from a long-tailed choice."""
    words = []
    for _ in range(count):
        if rng.random() < 0.45:
            words.append(_SHORT[min(int(rng.expovariate(0.35)), len(_SHORT) - 1)])
        else:
            words.append(_LONG[min(int(rng.expovariate(0.06)), len(_LONG) - 1)])
    return words


@functools.cache
def _trained(bos: bool) -> Tokenizer:
    """A byte-level BPE of exactly REAL_VOCAB entries, trained on words written above."""
    rng = random.Random(7)
    lines = [" ".join(_sentence_words(rng, 40)) + "." for _ in range(60)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=REAL_VOCAB,
        special_tokens=["<unk>", "<s>", "</s>"] if bos else [END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family: GPT-2 and NeoX add no BOS, Llama adds `<s>`."""
    if family in BOS_FAMILIES:
        return PreTrainedTokenizerFast(
            tokenizer_object=_trained(True),
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            model_max_length=CONTEXT,
            clean_up_tokenization_spaces=False,
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(False),
        bos_token=END,
        eos_token=END,
        unk_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One word per id (`w17` is id 17, id 0 is `<|endoftext|>`), split at white space; no BOS.

    Any other word becomes id 0 (TransformerBridge tokenises an "a" of its own when it loads).
    """
    words = {END: 0} | {f"w{i}": i for i in range(1, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        unk_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def words(document: Sequence[int]) -> str:
    """The text that `make_word_tokenizer` turns back into exactly these ids (ids > 0)."""
    return " ".join(f"w{i}" for i in document)


def corpus(n: int, seed: int = 0) -> list[str]:
    """`n` made-up English-like documents, all different, of 3 to 60 tokens without BOS.

    From n = 2 on, one has exactly 3 tokens and another exactly 60, under either tiny tokenizer.
    """
    rng = random.Random(seed)
    targets = [3, 60] + [rng.choice((rng.randint(3, 12), rng.randint(8, 60))) for _ in range(n)]
    targets = targets[:n]
    rng.shuffle(targets)
    documents: list[str] = []
    for target in targets:
        while True:
            text = _document(rng, target)
            if text not in documents:
                documents.append(text)
                break
    return documents


def _lengths(text: str) -> set[int]:
    return {len(_trained(bos).encode(text, add_special_tokens=False).ids) for bos in (True, False)}


def _document(rng: random.Random, target: int) -> str:
    """Random words up to `target` tokens, the last ones chosen so that the length is exact."""
    while True:
        chosen: list[str] = []
        for word in _sentence_words(rng, target):
            if max(_lengths(" ".join([*chosen, word]))) > target - 1:
                break
            chosen.append(word)
        ends = [" a.", ".", " it.", " the.", "!", " so!", " of it."]
        rng.shuffle(ends)
        for end in ends:
            text = " ".join(chosen) + end
            if chosen and _lengths(text) == {target}:
                return text


def make_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A randomly weighted model of a family; `overrides` go to its transformers config.

    Args:
        family: One of FAMILIES.
        seed: Seed of the weights; the global random state is left alone.
        **overrides: Fields of the family's config, e.g. `num_hidden_layers=2`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "gpt2":
            fields: dict[str, Any] = {
                "vocab_size": REAL_VOCAB,
                "n_layer": N_LAYERS,
                "n_head": 4,
                "n_embd": 40,
                "n_inner": 56,
                "n_positions": CONTEXT,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
            model: PreTrainedModel = GPT2LMHeadModel(GPT2Config(**(fields | overrides)))
        elif family in ("neox", "neox-serial"):
            fields = {
                "vocab_size": PADDED_VOCAB,
                "num_hidden_layers": N_LAYERS,
                "num_attention_heads": 5,
                "hidden_size": 80,
                "intermediate_size": 96,
                "max_position_embeddings": CONTEXT,
                "rotary_pct": 0.25,
                "use_parallel_residual": family == "neox",
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**(fields | overrides)))
        elif family in ("llama", "llama-tied"):
            fields = {
                "vocab_size": REAL_VOCAB,
                "num_hidden_layers": N_LAYERS,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "hidden_size": 60,
                "intermediate_size": 88,
                "max_position_embeddings": CONTEXT,
                "tie_word_embeddings": family == "llama-tied",
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            model = LlamaForCausalLM(LlamaConfig(**(fields | overrides)))
        else:
            raise ValueError(f"unknown family {family!r}: one of {FAMILIES}")
        _randomise(model)
    return model.eval()


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights that leave no term negligible: see the module's docstring."""
    tied = bool(model.config.tie_word_embeddings)
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape)
        if "norm" in name or ".ln_" in name:
            value = 0.25 * draw if name.endswith("bias") else (1 + 0.3 * draw).clamp(0.4, 1.7)
        elif name.endswith("bias"):
            value = 0.25 * draw
        elif any(part in name for part in ("wte", "wpe", "embed_tokens", "embed_in")):
            # A tied embedding is the unembedding as well: its scale is that of the logits.
            value = draw * (1.5 / math.sqrt(parameter.shape[1]) if tied else 0.7)
        elif any(part in name for part in ("lm_head", "embed_out")):
            value = draw * 1.5 / math.sqrt(parameter.shape[1])
        else:
            conv1d = model.config.model_type == "gpt2"
            fan_in = parameter.shape[0] if conv1d else parameter.shape[1]
            sharp = any(part in name for part in ("c_attn", "query_key", "q_proj", "k_proj"))
            value = draw * (2.0 if sharp else 1.0) / math.sqrt(fan_in)
        parameter.copy_(value)


def make_checkpoint(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny model and its tokenizer into `folder`; returns the folder.

    Args:
        family: One of FAMILIES: "gpt2" (tied, learned positions), "neox" (parallel residual, a
            quarter of each head rotated, 300 real tokens padded to 384 rows), "neox-serial",
            "llama" (6 query heads on 2 KV heads, head_dim 8 with 6 * 8 != d_model = 60, untied) and
            "llama-tied".
        folder: Where to; made if missing.
        seed: Seed of the weights.
        **overrides: Fields of the family's transformers config.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    make_model(family, seed, **overrides).save_pretrained(folder)
    make_tokenizer(family).save_pretrained(folder)
    return folder
