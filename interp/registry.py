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
    # ModelsOptions: --model and --revision may be given several times, and the function then gets
    # an iterable of models instead of one, and no text. Whether a text is read at all, the config
    # says (needs_text; always where it does not say). A config that needs no model (needs_model)
    # needs no text either: the function gets None for both.
    models: type[ModelOptions] = ModelOptions
    texts: type[TextOptions] = TextOptions  # its defaults are this command's


ANALYZERS = {
    "heads": Analyzer(
        HeadsConfig,
        "interp.analyzers.heads:heads",
        "How sensitive is the model to removing attention heads?",
    ),
    "asymmetry": Analyzer(
        AsymmetryConfig,
        "interp.analyzers.asymmetry:asymmetry",
        "Does i asking j differ from j asking i?",
        models=ModelsOptions,
    ),
    "ffn-keys": Analyzer(
        FfnKeysConfig,
        "interp.analyzers.ffn_keys:ffn_keys",
        "What do the keys of an FFN answer to, and what do their values say?",
        texts=ManyTextOptions,
    ),
    "qkv": Analyzer(
        QkvConfig,
        "interp.analyzers.qkv:qkv",
        "What are Q, K, V and O each worth, and can heads share them?",
        texts=FewTextOptions,
    ),
    "superposition": Analyzer(
        SuperpositionConfig,
        "probes.run:superposition",
        "Which features does a sparse autoencoder find in an MLP's output, and how good is it?",
        texts=JudgedTextOptions,
    ),
}
