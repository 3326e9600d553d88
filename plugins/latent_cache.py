"""The paged latent cache: blocks of tokens, each token its normed latent and then its rotated key. Imports torch only."""

from __future__ import annotations

import torch


def cache_rows(cache: torch.Tensor, dtype: str, width: int) -> torch.Tensor:
    """cache uint8 [N, block_bytes] as rows of `dtype` [N * block_tokens, width]: row `slot` is a token's."""
    return cache.view(getattr(torch, dtype)).view(-1, width)


def context_slots(blocks: torch.Tensor, length: int, block_tokens: int) -> torch.Tensor:
    """Slots, int64 [length], of a sequence's tokens from its row of the block table [P]."""
    tokens = torch.arange(length)
    return blocks.long()[tokens // block_tokens] * block_tokens + tokens % block_tokens
