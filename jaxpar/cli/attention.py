"""`jaxpar attention`."""

import argparse
import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from jaxpar.cli.arguments import positive

_HELP = """Hold a context strategy against dense attention: values and gradients, in float64 on emulated devices at
a short length; at the asked one each rank's FLOPs, bytes sent and, as compiled for H100s, memory. Exit status 1 where
an error is off."""


def add(commands) -> None:
    attention = commands.add_parser("attention", help=_HELP, description=_HELP)
    attention.add_argument(
        "--strategy", "--context-strategy", default="ring", metavar="ring|ulysses|allgather|hybrid=RxU"
    )
    attention.add_argument("--order", "--context-order", default="zigzag", choices=("zigzag", "contiguous", "striped"))
    sizes = {"ranks": 8, "seq-len": 65536, "heads": 8, "kv-heads": 2, "head-dim": 64}
    for name, default in sizes.items():
        attention.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"by default {default}")
    attention.add_argument("--window", "--sliding-window", type=int, metavar="N", help="keys that a query sees")
    attention.add_argument(
        "--documents", type=positive, default=1, metavar="N", help="that share the sequence, alike long"
    )
    attention.add_argument("--json", action="store_true")
    attention.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    # Here, since they take a second to import, and devices must be counted before JAX is.
    import jax

    from jaxpar.attention_report import Case, report
    from jaxpar.parallel.context import ContextStrategy
    from jaxpar.planning.attention import AttentionSize
    from jaxpar.training import runtime

    case = Case(
        strategy=ContextStrategy.parse(given.strategy, given.order, given.ranks),
        ranks=given.ranks,
        size=AttentionSize(given.seq_len, given.heads, given.kv_heads, given.head_dim),
        window=given.window,
        num_documents=given.documents,
    )
    case.check()
    runtime.emulate(given.ranks)
    jax.config.update("jax_enable_x64", True)
    found = report(case)
    if given.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _print(found)
    sys.exit(0 if found.ok else 1)


def _print(found) -> None:
    flops, mib = found.flops_per_rank, 2**20
    table = Table("per rank, one layer, one sequence", "", title="attention")
    table.columns[1].justify = "right"
    for name, value in {
        "forward GFLOPs, mean": f"{sum(flops) / len(flops) / 1e9:,.1f}",
        "busiest / mean": f"{max(flops) * len(flops) / sum(flops):.3f}",
        "all ranks / dense causal": f"{sum(flops) / found.flops_dense_causal:.3f}",
        "MiB sent, forward": f"{found.bytes_sent_per_rank_forward / mib:,.1f}",
        "MiB sent, backward": f"{found.bytes_sent_per_rank_backward / mib:,.1f}",
        "MiB of temporaries, compiled for H100s": f"{found.peak_temp_bytes_per_rank / mib:,.1f}",
        "max error": f"{found.max_error:.1e}",
        "max gradient error": f"{found.max_gradient_error:.1e}",
    }.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print("[green]ok[/]" if found.ok else "[red]not ok[/]")
