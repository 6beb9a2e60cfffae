"""The table of `published`: sizes of models that presets do not have.

Each is the configuration of the model hub's checkpoint of that name, or of its paper where a source stands beside it.
"""

from models.shapes import Shape


def _mla(width: int, heads: int, q_rank: int, kv_rank: int = 512, nope: int = 128, rope: int = 64, v: int = 128) -> int:
    """Weights of multi-head latent attention. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""
    query = width * q_rank + q_rank * heads * (nope + rope) if q_rank else width * heads * (nope + rope)
    return query + width * (kv_rank + rope) + kv_rank * heads * (nope + v) + heads * v * width


def _sizes(names: str, layers: str, widths: str, heads: str) -> list[tuple[str, int, int, int]]:
    columns = [[int(number) for number in column.split()] for column in (layers, widths, heads)]
    return [(name, *sizes) for name, *sizes in zip(names.split(), *columns, strict=True)]


def _gpts(rows: list[tuple[str, int, int, int]], vocab: int, positions: int) -> list[Shape]:
    """GPT-2's layers: biases, LayerNorm, tied head."""
    return [
        Shape(
            name,
            layers,
            width,
            heads,
            width // heads,
            4 * width,
            vocab,
            None,
            False,
            True,
            2,
            biases=True,
            extras=positions * width,
        )
        for name, layers, width, heads in rows
    ]


def _llamas(vocab: int, rows: dict[str, tuple[int, ...]], **common) -> list[Shape]:
    """Rows: layers, width, heads, kv heads, head dim, mlp dim."""
    return [
        Shape(name, layers, width, heads, head_dim, mlp, vocab, kv, **common)
        for name, (layers, width, heads, kv, head_dim, mlp) in rows.items()
    ]


SHAPES = (
    # arXiv 2005.14165, table 2.1.
    *_gpts(
        _sizes(
            "gpt3-125m gpt3-350m gpt3-760m gpt3-1.3b gpt3-2.7b gpt3-6.7b gpt3-13b",
            "12 24 24 24 32 32 40",
            "768 1024 1536 2048 2560 4096 5120",
            "12 16 16 16 32 32 40",
        ),
        50257,
        2048,
    ),
    *_gpts(
        _sizes(
            "mpt-125m mpt-350m mpt-760m mpt-1b mpt-3b mpt-7b mpt-13b mpt-30b mpt-70b",
            "12 24 24 24 32 32 40 48 80",
            "768 1024 1536 2048 2560 4096 5120 7168 8192",
            "12 16 12 16 20 32 40 56 64",
        ),
        50368,
        2048,
    ),
    *_gpts(
        _sizes(
            "cerebras-gpt-111m cerebras-gpt-256m cerebras-gpt-590m cerebras-gpt-1.3b cerebras-gpt-2.7b "
            "cerebras-gpt-6.7b cerebras-gpt-13b",
            "10 14 18 24 32 32 40",
            "768 1088 1536 2048 2560 4096 5120",
            "12 17 12 16 32 32 40",
        ),
        50257,
        2048,
    ),
    *(
        Shape(
            name,
            layers,
            width,
            heads,
            width // heads,
            4 * width,
            50257,
            None,
            False,
            True,
            2,
            layer_extras=6 * width,
            extras=2048 * width,
        )
        for name, layers, width, heads in (
            ("gpt-neo-125m", 12, 768, 12),
            ("gpt-neo-1.3b", 24, 2048, 16),
            ("gpt-neo-2.7b", 32, 2560, 20),
        )
    ),
    # Two positions of each table are padding.
    *_gpts(
        _sizes(
            "opt-125m opt-1.3b opt-2.7b opt-6.7b opt-13b opt-30b opt-66b opt-175b",
            "12 24 32 32 40 48 64 96",
            "768 2048 2560 4096 5120 7168 9216 12288",
            "12 32 32 32 40 56 72 96",
        ),
        50272,
        2050,
    ),
    # arXiv 2201.11990 and 2104.04473, table 1; their padded vocabulary.
    *_gpts(
        _sizes(
            "mt-nlg-530b megatron-1.7b megatron-3.6b megatron-7.5b megatron-18.4b megatron-39.1b megatron-76.1b "
            "megatron-145.6b megatron-310.1b megatron-529.6b megatron-1t",
            "105 24 30 36 40 48 60 80 96 105 128",
            "20480 2304 3072 4096 6144 8192 10240 12288 16384 20480 25600",
            "128 24 32 32 48 64 80 96 128 128 160",
        ),
        51200,
        2048,
    ),
    # arXiv 2205.05198, table 3.
    *_gpts(
        _sizes("megatron-22b megatron-175b megatron-530b", "48 96 105", "6144 12288 20480", "64 96 128"), 51200, 2048
    ),
    # ALiBi and a norm of the embedding.
    *(
        Shape(
            name,
            layers,
            width,
            heads,
            width // heads,
            4 * width,
            vocab,
            None,
            False,
            True,
            2,
            2,
            True,
            extras=2 * width,
        )
        for name, layers, width, heads, vocab in (
            ("bloom-560m", 24, 1024, 16, 250880),
            ("bloom-1b1", 24, 1536, 16, 250880),
            ("bloom-1b7", 24, 2048, 16, 250880),
            ("bloom-3b", 30, 2560, 32, 250880),
            ("bloom-7b1", 30, 4096, 32, 250880),
            ("bloom-176b", 70, 14336, 112, 250880),
            ("bloomberggpt-50b", 70, 7680, 40, 131072),
        )
    ),
    *(
        Shape(
            name,
            layers,
            width,
            heads,
            width // heads,
            4 * width,
            vocab,
            None,
            False,
            norm=2,
            biases=True,
            non_embedding=True,
        )
        for name, layers, width, heads, vocab in (
            ("pythia-14m", 6, 128, 4, 50304),
            ("pythia-31m", 6, 256, 8, 50304),
            ("pythia-70m", 6, 512, 8, 50304),
            ("pythia-160m", 12, 768, 12, 50304),
            ("pythia-410m", 24, 1024, 16, 50304),
            ("pythia-1b", 16, 2048, 8, 50304),
            ("pythia-1.4b", 24, 2048, 16, 50304),
            ("pythia-2.8b", 32, 2560, 32, 50304),
            ("pythia-6.9b", 32, 4096, 32, 50432),
            ("pythia-12b", 36, 5120, 40, 50688),
        )
    ),
    Shape("gpt-neox-20b", 44, 6144, 64, 96, 24576, 50432, None, False, norm=2, biases=True),
    Shape(
        "gpt-j-6b", 28, 4096, 16, 256, 16384, 50400, None, False, False, 2, 1, layer_extras=16384 + 4096, extras=50400
    ),
    # arXiv 2204.02311, table 1: multi-query attention, one norm for each parallel block, no biases.
    *(
        Shape(name, layers, width, heads, 256, 4 * width, 256000, 1, tied=True, norms_per_layer=1)
        for name, layers, width, heads in (
            ("palm-8b", 32, 4096, 16),
            ("palm-62b", 64, 8192, 32),
            ("palm-540b", 118, 18432, 48),
        )
    ),
    # arXiv 2203.15556, table 4, and 2112.11446, table 1: relative positions have a kernel and two biases in each layer.
    *(
        Shape(
            name,
            layers,
            width,
            heads,
            128,
            4 * width,
            32000,
            gated=False,
            tied=True,
            norm=2,
            biases=True,
            attention_kernels=5 * width**2,
            layer_extras=2 * width,
        )
        for name, layers, width, heads in (
            ("chinchilla-70b", 80, 8192, 64),
            ("gopher-280b", 80, 16384, 128),
        )
    ),
    *_llamas(
        32000,
        {
            "llama-7b": (32, 4096, 32, 32, 128, 11008),
            "llama-13b": (40, 5120, 40, 40, 128, 13824),
            "llama-33b": (60, 6656, 52, 52, 128, 17920),
            "llama-65b": (80, 8192, 64, 64, 128, 22016),
            "llama2-34b": (48, 8192, 64, 8, 128, 22016),
            "tinyllama-1.1b": (22, 2048, 32, 4, 64, 5632),
        },
    ),
    *_llamas(64000, {"yi-6b": (32, 4096, 32, 4, 128, 11008), "yi-34b": (60, 7168, 56, 8, 128, 20480)}),
    *_llamas(151936, {"qwen1.5-0.5b": (24, 1024, 16, 16, 64, 2816)}, tied=True, qkv_bias=True),
    *_llamas(151936, {"qwen1.5-7b": (32, 4096, 32, 32, 128, 11008)}, qkv_bias=True),
    *_llamas(128256, {"llama3.3-70b": (80, 8192, 64, 8, 128, 28672)}),
    *_llamas(
        202048,
        {"llama4-scout": (48, 5120, 40, 8, 128, 16384)},
        num_experts=16,
        num_experts_per_token=1,
        expert_dim=8192,
        num_shared_experts=1,
    ),
    *_llamas(
        202048,
        {"llama4-maverick": (48, 5120, 40, 8, 128, 16384)},
        num_experts=128,
        num_experts_per_token=1,
        expert_dim=8192,
        num_shared_experts=1,
        moe_every=2,
    ),
    *_llamas(
        151936,
        {"qwen2-0.5b": (24, 896, 14, 2, 64, 4864), "qwen2-1.5b": (28, 1536, 12, 2, 128, 8960)},
        tied=True,
        qkv_bias=True,
    ),
    *_llamas(
        152064, {"qwen2-7b": (28, 3584, 28, 4, 128, 18944), "qwen2-72b": (80, 8192, 64, 8, 128, 29568)}, qkv_bias=True
    ),
    *(
        Shape(
            name,
            layers,
            width,
            heads,
            128,
            3 * width,
            151936,
            kv,
            layer_extras=2 * 128,
            num_experts=experts,
            num_experts_per_token=8,
            expert_dim=expert_dim,
        )
        for name, layers, width, heads, kv, experts, expert_dim in (
            ("qwen3-coder-480b-a35b", 62, 6144, 96, 8, 160, 2560),
        )
    ),
    *_llamas(
        131072, {"mistral-nemo-12b": (40, 5120, 32, 8, 128, 14336), "mistral-small-24b": (40, 5120, 32, 8, 128, 32768)}
    ),
    *_llamas(
        32768, {"mistral-large-123b": (88, 12288, 96, 8, 128, 28672), "mistral-7b-v0.3": (32, 4096, 32, 8, 128, 14336)}
    ),
    *(
        Shape(
            name,
            layers,
            width,
            heads,
            128,
            mlp,
            vocab,
            8,
            norms_per_layer=norms,
            tied=tied,
            num_experts=experts,
            num_experts_per_token=top,
            expert_dim=mlp,
        )
        for name, layers, width, heads, mlp, vocab, experts, top, norms, tied in (
            ("grok-1", 64, 6144, 48, 32768, 131072, 8, 2, 4, True),
            ("dbrx", 40, 6144, 48, 10752, 100352, 16, 4, 2, False),
        )
    ),
    *_llamas(256000, {"gemma-2b": (18, 2048, 8, 1, 256, 16384), "gemma-7b": (28, 3072, 16, 16, 256, 24576)}, tied=True),
    *_llamas(
        256000,
        {
            "gemma2-2b": (26, 2304, 8, 4, 256, 9216),
            "gemma2-9b": (42, 3584, 16, 8, 256, 14336),
            "gemma2-27b": (46, 4608, 32, 16, 128, 36864),
        },
        tied=True,
        norms_per_layer=4,
    ),
    *_llamas(262144, {"gemma3-1b": (26, 1152, 4, 1, 256, 6912)}, tied=True, norms_per_layer=4, layer_extras=2 * 256),
    *_llamas(
        262208,
        {
            "gemma3-4b": (34, 2560, 8, 4, 256, 10240),
            "gemma3-12b": (48, 3840, 16, 8, 256, 15360),
        },
        tied=True,
        norms_per_layer=4,
        layer_extras=2 * 256,
    ),
    *_llamas(
        262208, {"gemma3-27b": (62, 5376, 32, 16, 128, 21504)}, tied=True, norms_per_layer=4, layer_extras=2 * 128
    ),
    # One norm for a parallel block; biases everywhere, also on the head.
    *(
        Shape(name, layers, width, 32, width // 32, 4 * width, 51200, None, False, False, 2, 1, True, extras=51200)
        for name, layers, width in (("phi-1", 24, 2048), ("phi-1.5", 24, 2048), ("phi-2", 32, 2560))
    ),
    *_llamas(32064, {"phi-3-mini": (32, 3072, 32, 32, 96, 8192), "phi-3-medium": (40, 5120, 40, 10, 128, 17920)}),
    *_llamas(100352, {"phi-4": (40, 5120, 40, 10, 128, 17920)}),
    Shape("falcon-7b", 32, 4544, 71, 64, 18176, 65024, 1, False, True, 2, 1),
    Shape("falcon-40b", 60, 8192, 128, 64, 32768, 65024, 8, False, True, 2, 2),
    Shape("falcon-180b", 80, 14848, 232, 64, 59392, 65024, 8, False, True, 2, 2),
    *_llamas(50304, {"olmo-1b": (16, 2048, 16, 16, 128, 8192)}, norm=0, tied=True),
    *_llamas(50304, {"olmo-7b": (32, 4096, 32, 32, 128, 11008)}, norm=0),
    *(
        Shape(name, layers, width, width // 128, 128, mlp, 100352, kv, layer_extras=width + 128 * kv)
        for name, layers, width, kv, mlp in (
            ("olmo2-7b", 32, 4096, 32, 11008),
            ("olmo2-13b", 40, 5120, 40, 13824),
            ("olmo2-32b", 64, 5120, 8, 27648),
        )
    ),
    *_llamas(128256, {"smollm3-3b": (36, 2048, 16, 4, 128, 11008)}, tied=True),
    *_llamas(
        49152,
        {
            "smollm-135m": (30, 576, 9, 3, 64, 1536),
            "smollm-360m": (32, 960, 15, 5, 64, 2560),
            "smollm-1.7b": (24, 2048, 32, 32, 64, 8192),
        },
        tied=True,
    ),
    Shape("starcoder-15b", 40, 6144, 48, 128, 24576, 49152, 1, False, True, 2, 2, True, extras=8192 * 6144),
    # arXiv 2402.16819 and 2406.11704: squared ReLU, no biases.
    Shape("nemotron-4-15b", 32, 6144, 48, 128, 24576, 256000, 8, False, norm=2),
    Shape("nemotron-4-340b", 96, 18432, 96, 192, 73728, 256000, 8, False, norm=2),
    # Norms of the latents; V3's bias of the router.
    Shape(
        "deepseek-v2-lite",
        27,
        2048,
        16,
        128,
        10944,
        102400,
        attention_kernels=_mla(2048, 16, 0),
        attention_dims=320,
        layer_extras=512,
        num_experts=64,
        num_experts_per_token=6,
        expert_dim=1408,
        num_shared_experts=2,
        num_dense_layers=1,
    ),
    Shape(
        "deepseek-v2",
        60,
        5120,
        128,
        128,
        12288,
        102400,
        attention_kernels=_mla(5120, 128, 1536),
        attention_dims=320,
        layer_extras=512 + 1536,
        num_experts=160,
        num_experts_per_token=6,
        expert_dim=1536,
        num_shared_experts=2,
        num_dense_layers=1,
    ),
    Shape(
        "deepseek-v3",
        61,
        7168,
        128,
        128,
        18432,
        129280,
        attention_kernels=_mla(7168, 128, 1536),
        attention_dims=320,
        layer_extras=512 + 1536,
        extras=58 * 256,
        num_experts=256,
        num_experts_per_token=8,
        expert_dim=2048,
        num_shared_experts=1,
        num_dense_layers=3,
    ),
    Shape(
        "kimi-k2",
        61,
        7168,
        64,
        128,
        18432,
        163840,
        attention_kernels=_mla(7168, 64, 1536),
        attention_dims=320,
        layer_extras=512 + 1536,
        extras=60 * 384,
        num_experts=384,
        num_experts_per_token=8,
        expert_dim=2048,
        num_shared_experts=1,
        num_dense_layers=1,
    ),
    *(
        Shape(
            name,
            layers,
            2880,
            64,
            64,
            2880,
            201088,
            8,
            qkv_bias=True,
            layer_extras=2880 + 64,
            num_experts=experts,
            num_experts_per_token=4,
            expert_dim=2880,
            expert_biases=True,
        )
        for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128))
    ),
)
