"""Context parallelism: the sequence cut over `context`, of which attention alone sees across the cuts."""

from jaxpar.parallel.context.strategy import AXIS, ContextStrategy, attention

__all__ = ["AXIS", "ContextStrategy", "attention"]
