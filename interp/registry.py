"""The only list of analyzers: command name -> config, where the function lives, one help line."""

from __future__ import annotations

from dataclasses import dataclass

from interp.config import (
    AsymmetryConfig,
    FewTextOptions,
    FfnKeysConfig,
    HeadsConfig,
    JudgedTextOptions,
    ManyTextOptions,
    ModelOptions,
    ModelsOptions,
    QkvConfig,
    SuperpositionConfig,
    TextOptions,
)


@dataclass(frozen=True)
class Analyzer:
    """One command, one question."""

    config: type
    function: str  # "module:function", imported only when the command runs
    help: str
    more: str  # what it does without further options, under the help line of the command itself
    # ModelsOptions: --model and --revision may be given several times, and the function then gets
    # an iterable of models instead of one, and no text. Whether a text is read at all, the config
    # says (needs_text; always where it does not say). A config that needs no model (needs_model)
    # needs no text either: the function gets None for both.
    models: type[ModelOptions] = ModelOptions
    texts: type[TextOptions] = TextOptions  # its defaults are this command's
    when_text: str = ""  # where a text is not always read: when, for --help


ANALYZERS = {
    "heads": Analyzer(
        HeadsConfig,
        "interp.analyzers.heads:heads",
        "How sensitive is the model to removing attention heads?",
        "Without options of Measure: the importance of every head, from gradients on the text.",
    ),
    "asymmetry": Analyzer(
        AsymmetryConfig,
        "interp.analyzers.asymmetry:asymmetry",
        "Does i asking j differ from j asking i?",
        "Without options of Measure: how symmetric W_Q W_K^T is, from the weights alone.",
        models=ModelsOptions,
        when_text="Read with --activations or --symmetrise only.",
    ),
    "ffn-keys": Analyzer(
        FfnKeysConfig,
        "interp.analyzers.ffn_keys:ffn_keys",
        "What do the keys of an FFN answer to, and what do their values say?",
        "Of every key the texts where it is largest (triggers); of its value the tokens it raises.",
        texts=ManyTextOptions,
    ),
    "qkv": Analyzer(
        QkvConfig,
        "interp.analyzers.qkv:qkv",
        "What are Q, K, V and O each worth, and can heads share them?",
        "Each is replaced by its mean, disturbed, cut to a lower rank and shared; the loss tells.",
        texts=FewTextOptions,
    ),
    "superposition": Analyzer(
        SuperpositionConfig,
        "probes.run:superposition",
        "Which features does a sparse autoencoder find in an MLP's output, and how good is it?",
        "The autoencoder (SAE) is trained on all documents but those that it is judged on.",
        texts=JudgedTextOptions,
    ),
}
