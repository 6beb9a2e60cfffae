"""Parameters: of models by name, and of sizes as papers list them; mixtures of experts."""

from collections.abc import Sequence

from jaxpar.planning import routing
from jaxpar.planning.oracles.engine import VALUE, Quantities, rule
from models.published import shape as published
from models.shapes import Shape


@rule("params")
def model(model: str, includes: str = "") -> Quantities:
    """includes: "rotary": with the buffers of inverse frequencies that older checkpoints carry, one per layer."""
    found = published(model)
    buffers = found.num_layers * found.head_dim // 2 if "rotary" in includes else 0
    total = found.parameters + buffers
    return {
        VALUE: found.non_embedding_parameters if found.non_embedding else total,
        "total": total,
        "active": found.active_parameters,
        "non_embedding": found.non_embedding_parameters,
        "nonemb": found.non_embedding_parameters,
        "embedding": found.embedding,
    }


@rule("moe", "mfu_published")
def experts_of_model(model: str) -> Quantities:
    found = published(model)
    return {VALUE: found.matmul_parameters, "total": found.parameters, "active": found.active_parameters}


@rule("params")
def with_padded_vocabulary(nonemb: int, vocab: int, hidden: int, tied: bool = False) -> Quantities:
    return {VALUE: nonemb + (1 if tied else 2) * vocab * hidden}


@rule("params", "moe", experts_per_token="topk")
def active(total: int, layers: int, experts: int, experts_per_token: int, hidden: int, ffn: int) -> Quantities:
    unused = Shape("", layers, hidden, 1, 1, ffn, 0, num_experts=experts, expert_dim=ffn).expert_weights
    return {VALUE: total - (experts - experts_per_token) * layers * unused}


@rule("params", heads="heads", head_dim="head_dim", hidden="d_model")
def decoder(
    layers: int,
    heads: int,
    head_dim: int,
    hidden: int,
    ffn: int,
    vocab: int,
    kv_heads: int | None = None,
    multi_query: bool = False,
    tied: bool = False,
    swiglu: bool = True,
) -> Quantities:
    found = Shape("", layers, hidden, heads, head_dim, ffn, vocab, 1 if multi_query else kv_heads, swiglu, tied)
    return {VALUE: found.parameters, "total": found.parameters}


@rule("params", layers="L", hidden="D", ffn="F", heads="N", kv_heads="K", head_dim="H", vocab="V")
def book(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    head_dim: int,
    vocab: int,
    kv_heads: int | None = None,
    tied: bool = False,
) -> Quantities:
    """As How to Scale Your Model counts: kernels alone."""
    found = Shape("", layers, hidden, heads, head_dim, ffn, vocab, kv_heads, tied=tied)
    parts = {
        "ffw": layers * found.mlp_weights,
        "attn": layers * found.attention_weights,
        "vocab": found.embedding * (1 if tied else 2),
    }
    total = sum(parts.values())
    return {**parts, VALUE: total, "total": total}


@rule("params")
def gpt(layers: int, hidden: int, vocab: int, seq: int) -> Quantities:
    """GPT-2's layers, to the last bias."""
    found = Shape(
        "",
        layers,
        hidden,
        1,
        hidden,
        4 * hidden,
        vocab,
        gated=False,
        tied=True,
        norm=2,
        biases=True,
        extras=seq * hidden,
    )
    return {VALUE: found.parameters, "total": found.parameters}


@rule("moe", experts_per_token="topk", kv_heads="kv")
def custom(
    hidden: int,
    ffn: int,
    experts: int,
    experts_per_token: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
    layers: int,
    vocab: int = 0,
) -> Quantities:
    found = Shape(
        "",
        layers,
        hidden,
        heads,
        head_dim,
        ffn,
        vocab,
        kv_heads,
        num_experts=experts,
        num_experts_per_token=experts_per_token,
        expert_dim=ffn,
    )
    return {"total": found.parameters, "active": found.active_parameters}


@rule("moe")
def capacity(tokens: int, experts: int, capacity_factor: float = 1.0, experts_per_token: int = 1) -> Quantities:
    """cf1_5 is the capacity at factor 1.5."""
    at = {f"cf{text.replace('.', '_')}": float(text) for text in ("1", "1.25", "1.5", "2", "2.5", "3", "4")}
    known = {name: routing.capacity(tokens, experts, each, experts_per_token) for name, each in at.items()}
    return {**known, VALUE: routing.capacity(tokens, experts, capacity_factor, experts_per_token)}


@rule("moe", shares="f", probabilities="P")
def balancing_loss(alpha: float, shares: Sequence[float], probabilities: Sequence[float], N: int = 0) -> Quantities:
    return {VALUE: routing.balancing_loss(alpha, shares, probabilities)}


@rule("moe", tokens="S", groups="G", experts="E", experts_per_token="k")
def group_capacity(tokens: int, groups: int, experts: int, experts_per_token: int = 2) -> Quantities:
    group = tokens // groups
    return {
        "group_tokens": group,
        "capacity_2N_over_E": routing.capacity(group, experts, 1.0, experts_per_token),
        "capacity": routing.capacity(group, experts, 1.0, experts_per_token),
    }


@rule("moe")
def core_years(devices: int, days: float) -> Quantities:
    return {VALUE: devices * days / 365.25}
