"""All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): each rank gathers all keys and values.

Splits: the sequence over n ranks; queries stay, keys and values are whole on every rank while a layer attends.
Collectives per layer and microbatch, with |K|, |V| a rank's own: all-gather of n (|K| + |V|) forward, reduce-scatter of
as much back. It may stand in a branch of a pipeline schedule, and any mask costs the same.
Limits: memory of a layer's whole K and V, small where there are few kv heads.
"""

from jax import lax
from jaxtyping import Array, Float


def gather(x: Float[Array, "B C G K"], axis: str) -> Float[Array, "B S G K"]:
    """Every rank's part, in the order of the ranks."""
    if x.shape[0] == 1:
        # Of a reduce-scatter behind a dim of size 1, this one's transpose, TPUs' compiler makes an all-reduce.
        return lax.all_gather(x[0], axis, axis=0, tiled=True)[None]
    return lax.all_gather(x, axis, axis=1, tiled=True)
