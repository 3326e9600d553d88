"""Where a model is: a folder, or a repository in the local Hugging Face cache. The network is used by `fetch` alone."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dsc.runtime.errors import DscError

# What a checkpoint needs: never code (*.py), never pickles, never a second copy of the weights in another format.
SMALL_FILES = ("*.json", "*.jinja", "*.model")
WEIGHTS = ("model*.safetensors",)
# Bytes of the released weights, to 0.1 GB.
SIZES = {
    **dict.fromkeys(
        (
            "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3-0324",
            "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-Zero", "deepseek-ai/DeepSeek-R1-0528",
            "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base", "deepseek-ai/DeepSeek-V3.1-Terminus",
        ),
        688_600_000_000,
    ),
    **dict.fromkeys(
        (
            "deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Chat", "deepseek-ai/DeepSeek-V2-Chat-0628",
            "deepseek-ai/DeepSeek-V2.5", "deepseek-ai/DeepSeek-V2.5-1210",
            "deepseek-ai/DeepSeek-Coder-V2-Base", "deepseek-ai/DeepSeek-Coder-V2-Instruct",
        ),
        471_500_000_000,
    ),
    **dict.fromkeys(
        (
            "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat",
            "deepseek-ai/DeepSeek-Coder-V2-Lite-Base", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
        ),
        31_400_000_000,
    ),
    **dict.fromkeys(
        ("moonshotai/Kimi-K2-Base", "moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Instruct-0905"), 1_029_200_000_000
    ),
}  # fmt: skip


def find_model(model: str, beside: Sequence[Path] = (), download: Callable[[str], Path] | None = None) -> Path:
    """The folder of a model: a path (from the working folder, then from each folder of `beside`, then from a checkout of
    dsc, whose recipes name examples/tiny-r1), else a cached repository.

    beside    folders that a recipe's relative path may start from, such as the recipe's own
    download  called with a repository's name instead of looking into the cache; it gives the folder
    raises    DscError with the command that fetches the model and its bytes
    """
    tried = [Path(model).expanduser(), *(folder / model for folder in beside)]
    for folder in (*tried, _checkout() / model):
        if folder.is_dir():
            return folder
    if model.startswith("examples/"):  # looks like a repository's name, and is none
        raise DscError(
            f"no model at {model}",
            wanted="a checkout of dsc, whose examples no wheel has",
            got=_looked_at(tried),
            try_="--model FOLDER",
        )
    if not _is_repository(model):
        raise DscError(f"no model at {model}", wanted="a folder, or owner/name on Hugging Face", got=_looked_at(tried))
    if download is not None:
        return download(model)
    cached = _cached(model)
    if cached is None:
        raise _not_here(model, tried)
    return cached


def fetch(model: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Fetch files of a repository into the Hugging Face cache and return its folder; what is already there is kept.

    patterns  of names, as fnmatch reads them
    revision  the commit, which is the name of an earlier call's folder; None: the newest one
    raises    DscError where the hub cannot be reached or refuses
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise DscError(
            f"{model} cannot be downloaded",
            got=reason[0] if reason else type(error).__name__,
            try_=f"{_command(model)}: run again, it goes on where it stopped",
        ) from error


def _checkout() -> Path:
    """The folder above the packaged recipes: the repository's root where dsc runs from one."""
    return Path(str(importlib.resources.files("dsc.recipes"))).parent


def _is_repository(model: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) is not None


def _cached(model: str) -> Path | None:
    """The snapshot of a repository in the cache that has a config.json; what else is missing the checkpoint will tell."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _not_here(model: str, tried: Sequence[Path]) -> DscError:
    from huggingface_hub.constants import HF_HUB_CACHE

    size = f"about {SIZES[model]:,} bytes" if model in SIZES else "unknown"
    return DscError(
        f"{model} is not on this machine",
        details=[("folders", _looked_at(tried)), ("cache", str(HF_HUB_CACHE)), ("size", size)],
        try_=f"{_command(model)}    (or --download, or --model FOLDER)",
    )


def _looked_at(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))


def _command(model: str) -> str:
    return f"hf download {model}"
