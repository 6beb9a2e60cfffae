"""What XLA is told beyond its defaults, per platform: to send while it computes.

A table has only what the platform's compiler takes, on every topology, and what changes for the better the program that
it makes of a sharded train step: a test compiles each option, with and without. Options are applied per program,
`lowered.compile(compiler_options=...)`, so that no environment variable decides what a run does.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import jax

Options = dict[str, str | bool]


@dataclass(frozen=True)
class Option:
    name: str
    value: str | bool
    purpose: str
    with_ragged: bool = True
    """Whether programs that send ragged all-to-alls take it too."""


_GPU = (
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "8",
        "transfers that may be under way at once, for one: they go in turn all the same, on one stream, but each may "
        "start as soon as there is what it sends, beside whatever matmul then runs, and need not wait for another's "
        "end: FSDP's gathers of a layer's kernels, a ring's permutes of keys and values",
        # Others found the backward pass corrupted where ragged all-to-alls overlapped, and send one at a time
        # (marin-community/marin, pull request 8081).
        with_ragged=False,
    ),
)
# With 4, Llama 3 8B's FSDP on 256 H100s sends less of its bytes beside matmuls (0.88 for 0.93 on jax 0.12); 16 is no
# more than 8. A loop of two layers an iteration (xla_gpu_enable_while_loop_double_buffering) holds two layers' gathered
# weights, a sixth more memory there, for 1% of the step's estimated time, and hides 0.81 of a ring for all of it; with
# gathers started an iteration ahead (xla_gpu_enable_pipelined_all_gather) besides, a step of Llama 3 70B with tensor=8
# recomputes attention twice.

_TPU: tuple[Option, ...] = (
    Option(
        "xla_tpu_prefer_async_allgather_to_allreduce",
        True,
        "small gathers over a slice of two dimensions are gathers, beside matmuls, not all-reduces of twice the bytes",
    ),
)
# Else what the TPUs' compiler does unasked is no worse than what it could be asked for. Gathers pipelined over layers
# (xla_tpu_enable_ici_ag_pipelining) gave Llama 2 7B's step on v5e:16x16 more cycles and memory; asynchronous
# all-to-alls (xla_tpu_enable_async_all_to_all) are refused there; a scheduler with less memory
# (xla_tpu_scheduler_percent_shared_memory_limit=20) left 30% of the gathered bytes beside a matmul, of 91%.

TABLES: Mapping[str, tuple[Option, ...]] = {"cpu": (), "gpu": _GPU, "tpu": _TPU}
"""By `jax.default_backend()`. CPU devices compute and send in turn: there is nothing to overlap."""


def resolve(text: str, platform: str, sends_ragged: bool = False) -> Options:
    """The options of `--compiler-options` on a platform of TABLES.

    `auto`: its table, what of it suits a program that sends ragged all-to-alls or does not. `none`: nothing.
    NAME=VALUE, separated by commas, after either word or alone (which is after `auto`): on top.

    Raises ValueError for what is not of this form, and for options that are of another platform or that the process's
    own compiler, if it is this platform's, does not know.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    base = items.pop(0) if items and "=" not in items[0] else "auto"
    if base not in ("auto", "none"):
        raise ValueError(f"--compiler-options {text!r} begins with {base!r}; write auto, none or NAME=VALUE")
    table = TABLES[platform] if base == "auto" else ()
    options: Options = {option.name: option.value for option in table if option.with_ragged or not sends_ragged}
    given = dict(_parsed(item, text) for item in items)
    for name in given:
        _check_name(name, platform)
    if given and jax.default_backend() == platform:
        _check_compiler(given, platform)
    return options | given


def as_text(options: Options) -> str:
    """What `resolve` makes the same options of, whatever the tables then have."""
    values = (str(value).lower() if isinstance(value, bool) else str(value) for value in options.values())
    return ",".join(["none", *(f"{name}={value}" for name, value in zip(options, values))])


def _parsed(item: str, text: str) -> tuple[str, str | bool]:
    name, equals, value = (part.strip() for part in item.partition("="))
    if not (name and equals and value):
        raise ValueError(f"--compiler-options {text!r} has {item!r}; write NAME=VALUE")
    return name, value.lower() == "true" if value.lower() in ("true", "false") else value


def _check_name(name: str, platform: str) -> None:
    others = sorted({"cpu", "gpu", "tpu"} - {platform})
    if not name.startswith("xla_") or name.startswith(tuple(f"xla_{other}_" for other in others)):
        raise ValueError(f"--compiler-options: {name!r} is no option for {platform}{_nearest(name, platform)}")


def _check_compiler(options: Options, platform: str) -> None:
    """Let the compiler say now, on a program of nothing, what it would say after the step was traced."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        unknown = next((name for name in options if reason.endswith(f"option: '{name}'")), None)
        hint = _nearest(unknown, platform) if unknown else ""
        raise ValueError(f"--compiler-options: the {platform} compiler says: {reason}{hint}") from None


def _nearest(name: str, platform: str) -> str:
    close = difflib.get_close_matches(name, [option.name for option in TABLES[platform]], n=1)
    return f"; did you mean {close[0]!r}?" if close else "; leave it out"
