"""Which parameters a setting is of, by patterns over their dotted names, such as `blocks.attention.query`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import jax
from jaxtyping import PyTree

from jaxpar import toml

_DECAY = "--optimizer.decay-groups"
_RATES = "--optimizer.learning-rate-groups"


def decay_mask(groups: str, names: PyTree) -> PyTree:
    """Whether each parameter decays. `names` has each one's logical axes. Without patterns, kernels do: parameters
    that contract or make the residual stream; not embeddings, norms and biases. Raises ValueError."""
    if not groups:
        return jax.tree.map(is_kernel, names, is_leaf=_is_names)
    patterns = [item.strip() for item in groups.split(",")]
    return _by_first_match(_DECAY, patterns, [True] * len(patterns), False, names)


def learning_rate_factors(groups: str, names: PyTree) -> PyTree:
    """What each parameter's learning rate is multiplied by: of the first pattern that matches, else 1. Raises
    ValueError."""
    if not groups:
        return jax.tree.map(lambda _: 1.0, names, is_leaf=_is_names)
    patterns, factors = [], []
    for item in groups.split(","):
        pattern, _, text = item.partition("=")
        try:
            factor = float(text)
        except ValueError:
            raise ValueError(f"{_RATES} {item.strip()!r} is not NAME=FACTOR, as in embedding=0.1") from None
        toml.check_range(f"{_RATES} {pattern.strip()}", factor, 0)
        patterns.append(pattern.strip())
        factors.append(factor)
    return _by_first_match(_RATES, patterns, factors, 1.0, names)


def is_kernel(names: tuple[str | None, ...]) -> bool:
    """Whether a parameter of these logical axes is a matmul's."""
    return "embed" in names and names[0] not in ("vocab", "position")


def _by_first_match(flag: str, patterns: Sequence[str], values: Sequence, otherwise: object, names: PyTree) -> PyTree:
    dotted = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="."), names, is_leaf=_is_names
    )
    known = jax.tree.leaves(dotted)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"{flag} {pattern!r} matches no parameter{toml.nearest(pattern, known)}")

    def value(name: str) -> object:
        return next((value for pattern, value in zip(patterns, values) if fnmatchcase(name, pattern)), otherwise)

    return jax.tree.map(value, dotted)


def _is_names(node: object) -> bool:
    return isinstance(node, tuple)
