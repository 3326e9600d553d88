"""Whether a recipe and a model go together, before anything is read or built."""

from __future__ import annotations

from dsc.compiler.recipe import Recipe
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.spec import ModelSpec


def check_fit(recipe: Recipe, spec: ModelSpec) -> None:
    """Raise DscError with everything the recipe asks for that the model does not have."""
    faults = []
    if recipe.limits.context_tokens > spec.max_position_embeddings:
        faults.append(
            DscError(
                "limits.context_tokens is longer than the model's context",
                where=recipe.where,
                wanted=f"at most {spec.max_position_embeddings} (max_position_embeddings)",
                got=str(recipe.limits.context_tokens),
            )
        )
    if recipe.mtp.enabled and not spec.num_mtp_layers:
        faults.append(
            DscError(
                "mtp is enabled and the checkpoint has no MTP layer",
                where=recipe.where,
                wanted="num_nextn_predict_layers: 1 and its tensors",
                try_="mtp: {enabled: false, drafts: 0}",
            )
        )
    raise_all(recipe.where, faults)
