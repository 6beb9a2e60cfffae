"""Mixtures of experts by arithmetic: capacity, the balancing loss, parameters in all and per token."""

import math
from collections.abc import Sequence


def capacity(num_tokens: int, num_experts: int, factor: float = 1.0, experts_per_token: int = 1) -> int:
    """Tokens that one expert takes. Source: Switch Transformers (arXiv 2101.03961), equation 3."""
    return math.ceil(num_tokens * experts_per_token * factor / num_experts)


def balancing_loss(alpha: float, shares: Sequence[float], probabilities: Sequence[float]) -> float:
    """alpha N sum f_i P_i. Source: Switch Transformers (arXiv 2101.03961), equation 4."""
    return alpha * len(shares) * sum(f * p for f, p in zip(shares, probabilities, strict=True))
