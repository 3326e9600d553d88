"""A model's shape without its weights: where its config.json is, and fewer layers of it."""

from __future__ import annotations

import importlib.resources
from dataclasses import replace
from pathlib import Path

from dsc.compiler.config import read_config
from dsc.compiler.hub import find_model
from dsc.runtime.errors import DscError
from dsc.runtime.spec import ModelSpec

# Released models whose config.json comes with dsc: what differs between those of one file is not in it.
KNOWN = {
    **dict.fromkeys(
        (
            "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3-0324",
            "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-Zero", "deepseek-ai/DeepSeek-R1-0528",
        ),
        "deepseek-r1.json",
    ),
    **dict.fromkeys(
        (
            "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat",
            "deepseek-ai/DeepSeek-Coder-V2-Lite-Base", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
        ),
        "deepseek-v2-lite.json",
    ),
}  # fmt: skip
DENSE_LAYERS_FROM = 4  # a slice of fewer layers keeps one dense layer, so that it has experts


def read_shape(model: str) -> tuple[ModelSpec, Path]:
    """The spec of a model, and the folder its config.json lies in.

    model   a folder with config.json, a known model's name, or a repository of which config.json is in the cache
    raises  DscError where there is none
    """
    if not Path(model).expanduser().is_dir() and model in KNOWN:
        with importlib.resources.as_file(importlib.resources.files("dsc.compiler.known_models")) as folder:
            return read_config(folder, KNOWN[model]), folder
    folder = find_model(model)
    return read_config(folder), folder


def first_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """The model with its first `layers` decoder layers alone: dense ones first, under 4 layers only one of them.

    The MTP layer stays, as layer number `layers`. Raises DscError for a number the model does not have.
    """
    if not 1 <= layers <= spec.num_layers:
        raise DscError("the model has no such slice", wanted=f"--layers 1 to {spec.num_layers}", got=str(layers))
    dense = min(spec.num_dense_layers, layers if layers >= DENSE_LAYERS_FROM else 1)
    return replace(spec, num_layers=layers, num_dense_layers=dense)
