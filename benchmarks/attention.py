"""Attention on one CPU: jaxpar's tiles against jax.nn.dot_product_attention (XLA), causal, forward and backward.

    python -m benchmarks.attention --seq-len 4096 --heads 8 --kv-heads 2 --head-dim 64 --pairs 7

Runs of the two in turns; the time's ratio is the median over pairs. Temporaries are the compiler's word.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpar.attention_report import random_arrays, relative_error
from jaxpar.kernels.attention import attention
from jaxpar.kernels.mask import AttentionMask
from jaxpar.planning.attention import AttentionSize, documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"seq-len": 4096, "heads": 8, "kv-heads": 2, "head-dim": 64, "pairs": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    size = AttentionSize(given.seq_len, given.heads, given.kv_heads, given.head_dim)
    arrays = [jnp.asarray(x, jnp.float32) for x in random_arrays(1, size)]
    tokens = jax.tree.map(jnp.asarray, documents(size.seq_len, 1))
    scale = size.head_dim**-0.5
    programs = {
        "jaxpar": compiled(lambda q, k, v: attention(q, k, v, tokens, tokens, AttentionMask(), scale), arrays),
        "jax.nn": compiled(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), arrays),
    }
    ours, theirs = (run(*arrays) for run in programs.values())
    assert max(map(relative_error, map(np.asarray, ours), map(np.asarray, theirs))) < 1e-4
    seconds = np.array([[timed(run, arrays) for run in programs.values()] for _ in range(given.pairs)])

    table = Table("", *programs, "ratio", title=f"forward and backward, S={size.seq_len}, float32")
    ratio = np.median(seconds[:, 0] / seconds[:, 1])
    table.add_row("seconds, median", *(f"{each:.3f}" for each in np.median(seconds, axis=0)), f"{ratio:.3f}")
    memory = [run.memory_analysis().temp_size_in_bytes / 2**20 for run in programs.values()]
    table.add_row("temporaries, MiB", *(f"{each:,.1f}" for each in memory), f"{memory[0] / memory[1]:.4f}")
    Console().print(table)


def compiled(attend: Callable, arrays: list[jax.Array]) -> jax.stages.Compiled:
    def run(q, k, v, cotangent):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(cotangent)

    return jax.jit(run).lower(*arrays).compile()


def timed(run: Callable, arrays: list[jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
