"""A finished SAE instead of training one: from a folder, or from SAELens' registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interp import hooks, hub
from interp.checkpoint import first_line
from interp.errors import InterpError, UsageError
from interp.model import Model
from probes.activations import SITE
from probes.training import CONFIG, from_folder


def hook_name(layer: int) -> str:
    """TransformerLens' name of what is taken apart."""
    return hooks.BLOCK.format(layer=layer) + hooks.SITES[SITE][0]


def load_sae(named: str, model: Model, layer: int) -> tuple[Any, list[str]]:
    """The SAE that --sae names, and what to mind about it.

    Args:
        named: a folder with SAELens' cfg.json (or a run's folder with `sae/`), or RELEASE/ID.
        model: that it is for.
        layer: whose MLP output it takes.

    Raises:
        UsageError: neither a folder nor RELEASE/ID, or an SAE of another site or size.
        InterpError: it cannot be loaded.
    """
    folder = Path(named).expanduser()
    if (folder / "sae" / CONFIG).is_file():
        folder = folder / "sae"
    try:
        if (folder / CONFIG).is_file():
            sae = from_folder(folder, model.device)
        elif folder.exists():
            raise UsageError(f"--sae {named} holds no SAE: there is no {CONFIG} in it.")
        else:
            sae = _from_registry(named, model)
    except InterpError:
        raise
    except Exception as error:
        raise InterpError(f"--sae {named} cannot be loaded: {first_line(error)}") from error
    if sae.cfg.d_in != model.cfg.d_model:
        raise UsageError(
            f"--sae {named} takes activations of {sae.cfg.d_in} dimensions; those of {model.name} "
            f"have {model.cfg.d_model}: it is of another model."
        )
    return sae, _notices(named, sae, model, layer)


def _from_registry(named: str, model: Model) -> Any:
    from sae_lens import SAE

    release, slash, sae_id = named.partition("/")
    if not slash or not sae_id:
        raise UsageError(
            f"--sae {named} is no folder, and no RELEASE/ID of SAELens' registry "
            "(gpt2-small-mlp-tm/blocks.6.hook_mlp_out)."
        )
    with hub.asked_if_reachable():
        sae = SAE.from_pretrained(release, sae_id, device=str(model.device))
    sae.requires_grad_(False)
    return sae.eval()


def _notices(named: str, sae: Any, model: Model, layer: int) -> list[str]:
    known = sae.cfg.metadata
    out = []
    wanted = hook_name(layer)
    if known.hook_name is not None and known.hook_name != wanted:
        raise UsageError(f"--sae {named} is of {known.hook_name}; --layer {layer} is {wanted}.")
    if sae.cfg.normalize_activations == "expected_average_only_in":
        raise InterpError(
            f"--sae {named} takes activations times a constant that is not saved with it, so it "
            "cannot be used on the model's own."
        )
    if known.model_name is not None and known.model_name not in (model.name, model.source):
        out.append(f"The SAE says it is of {known.model_name}; the model here is {model.name}.")
    if known.model_from_pretrained_kwargs:
        out.append(
            f"The SAE was trained on a model loaded with {known.model_from_pretrained_kwargs}; "
            "here weights are raw."
        )
    return out
