"""What the tests of loading share."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from interp.errors import InterpError
from interp.model import load_model
from tests import oracle, tiny


def weights_of(folder):
    """A copy of a checkpoint's weights: loaded ones are mapped from the file."""
    return {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}


def put_weights(folder, weights):
    (folder / "model.safetensors").unlink()  # never write into a file that may be mapped
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def logits_of(model, ids):
    with model.measuring():
        return model.bridge(torch.tensor([ids]), use_cache=False)[0]


def refused(*words, folder, **options):
    """load_model fails with one short message that holds these words."""
    with pytest.raises(InterpError) as caught:
        load_model(folder, device="cpu", **options)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


def saved(family, folder, edit=None, **overrides):
    """A tiny checkpoint, edited before it is saved; returns (interp model, plain model)."""
    model = tiny.make_model(family, **overrides).requires_grad_(False)
    if edit is not None:
        edit(model)
    model.save_pretrained(folder)
    tiny.make_tokenizer(family).save_pretrained(folder)
    return load_model(folder, device="cpu"), oracle.load(folder)
