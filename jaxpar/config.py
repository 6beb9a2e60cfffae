"""Every setting of a run: frozen, nested, one TOML form, one set of flags.

A field is `--group.field` on the command line; those with a short alias have it beside them. The precedence is
defaults < `--config FILE` < `--model PRESET` < flags.
"""

import contextlib
import dataclasses
import io
import itertools
import math
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxpar import toml
from models.config import ModelConfig
from models.presets import load_model


def _alias(*names: str) -> Any:
    return tyro.conf.arg(aliases=[f"--{name}" for name in names])


MAX_EMULATED = 512


OptimizerName = Literal["adamw", "adafactor", "lion", "sgd", "muon", "schedule-free"]
ScheduleName = Literal["auto", "cosine", "linear", "wsd", "constant", "rsqrt"]


@dataclass(frozen=True)
class DataConfig:
    source: Annotated[str, _alias("data")] = "stdlib"
    """Files, globs, directories, or `stdlib`, the Python standard library's own sources; several are separated by
    commas, each with its weight in the mixture if need be: `web/*.jsonl=3,code=1`."""
    tokenizer: Annotated[str, _alias("tokenizer")] = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the data), or the path of a tokenizer.json."""
    text_field: Annotated[str, _alias("text-field")] = "text"
    """Where .jsonl and .parquet files have a document's text."""
    pack_documents: Annotated[bool, _alias("pack-documents")] = False
    """Lay whole documents into sequences, each attending to itself alone; else the text is cut every seq_len tokens."""
    eval_fraction: Annotated[float, _alias("eval-fraction")] = 0.01
    """Share of the documents, by hash, that is held out of training for evaluation."""
    batch_size: Annotated[int, _alias("batch-size")] = 16
    """Sequences per step, over all devices and microbatches."""
    seq_len: Annotated[int, _alias("seq-len")] = 128
    """Tokens per sequence."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: Annotated[OptimizerName, _alias("optimizer")] = "adamw"
    schedule: Annotated[ScheduleName, _alias("schedule")] = "auto"
    """How the learning rate goes on after warm-up; wsd: constant, then linear to the final one; auto: cosine, constant
    with schedule-free."""
    learning_rate: Annotated[float, _alias("learning-rate")] = 3e-3
    """The peak, reached after warm-up."""
    final_learning_rate: float = 3e-4
    """Where cosine, linear and wsd end, at step `run.steps`."""
    warmup_steps: Annotated[int, _alias("warmup-steps")] = 20
    decay_fraction: float = 0.2
    """Share of the run in which wsd decays."""
    learning_rate_groups: str = ""
    """Factors of the learning rate by parameter name, the first match counting: `embedding=0.1,blocks.*.scale=0.5`."""
    beta1: float = 0.9
    """Of sgd: its momentum."""
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: Annotated[float, _alias("weight-decay")] = 0.1
    decay_groups: str = ""
    """Names of the parameters that decay, as `blocks.*,head`; empty: matmul kernels, no norm, bias or embedding."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them alone."""
    state_dtype: Annotated[Literal["auto", "float32", "bfloat16"], _alias("optimizer-dtype")] = "auto"
    """Of moments; auto: float32, in float64 runs that."""
    ema: Annotated[float, _alias("ema")] = 0.0
    """Decay of an exponential moving average of the parameters, which is then what is evaluated; 0: none."""
    z_loss: Annotated[float, _alias("z-loss")] = 0.0
    """Weight of the square of the logits' log-sum-exp (PaLM, arXiv 2204.02311, section 5)."""
    label_smoothing: Annotated[float, _alias("label-smoothing")] = 0.0
    """Share of the target's probability that goes to all tokens alike."""


@dataclass(frozen=True)
class ParallelConfig:
    mesh: Annotated[str, _alias("mesh")] = ""
    """Sizes of the mesh's axes, as in `data=2,fsdp=-1,tensor=2`; one -1 takes the rest. Empty: all devices on fsdp."""
    dcn_mesh: Annotated[str, _alias("dcn-mesh")] = ""
    """What part of the mesh's axes crosses the slow network between slices or hosts, as in `data=2`."""
    zero: Annotated[Literal[1, 2, 3], _alias("zero")] = 3
    """What `fsdp` cuts: 3: parameters, gradients and optimizer state; over `data` too, 2: gradients and optimizer
    state, 1: optimizer state alone."""
    sequence_parallel: Annotated[bool, _alias("sequence-parallel")] = True
    """Cut the sequence over `tensor` between blocks; no effect at tensor=1."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Gather FSDP's weights again for the backward pass, three transfers a step (`--reshard-after-forward`), or keep
    them, two (`--no-reshard-after-forward`). In a pipeline: for each microbatch, or once a step. auto: gather again,
    but in a pipeline once."""
    remat: Annotated[str, _alias("remat")] = "full"
    """What the backward pass recomputes: none; full (all but each layer's input); every=K or sqrt (all but every K-th,
    or sqrt(layers)-th, layer's input); dots (all but matmuls); save=NAME,NAME (all but these); offload (as full,
    layers' inputs in the host's memory)."""
    context_strategy: Annotated[str, _alias("context-strategy")] = "auto"
    """How attention sees across the parts of a sequence cut over `context`: ring, ulysses, allgather, or hybrid=RxU, a
    ring of R groups of U that exchange tokens for heads; auto: ring, under a schedule of `pipe` that branches (all but
    gpipe and looped-bfs) allgather."""
    context_order: Annotated[Literal["zigzag", "contiguous", "striped"], _alias("context-order")] = "zigzag"
    """How the sequence lies over `context`; zigzag and striped give every rank equal causal work."""
    attention: Annotated[Literal["auto", "tiled", "cudnn", "splash"], _alias("attention")] = "auto"
    """Kernel for a device that has the whole sequence; auto: cuDNN's on NVIDIA GPUs, splash attention on TPUs (there
    under `context`, too), where their limits allow, else plain JAX in tiles."""
    grad_accumulation: Annotated[int, _alias("grad-accumulation", "microbatches")] = 1
    """Microbatches per step, the pipeline's under `pipe`; gradients are summed over `data` once, after the last."""
    moe_dispatch: Annotated[Literal["dropless", "capacity"], _alias("moe-dispatch")] = "dropless"
    """How tokens go to their experts: dropless, in grouped matmuls of whatever sizes; capacity, as many of a sequence
    to each expert as it has slots for, the rest passing by."""
    capacity_factor: Annotated[float, _alias("capacity-factor")] = 1.25
    """Slots of an expert, in units of what balanced routing sends it."""
    capacity_order: Annotated[Literal["arrival", "score"], _alias("capacity-order")] = "arrival"
    """Who gets the slots: a sequence's first tokens, or those with the largest weights."""
    pipeline: Annotated[str, _alias("pipeline")] = "1f1b"
    """Schedule of the microbatches through the stages of `pipe`: gpipe, 1f1b, eager-1f1b, zb-h1, zb-h2; with chunks
    interleaved-1f1b, looped-bfs, zb-v, dualpipe-v; with slices terapipe; auto: searched for, by the stages' modelled
    times; asynchronous, a step's microbatches changing the weights one after another, pipedream (each) and
    pipedream-2bw (by at least as many as stages). `jaxpar schedule` draws them."""
    pipeline_memory_limit: Annotated[float | None, _alias("pipeline-memory-limit")] = None
    """Of --pipeline auto, per stage: activations of one microbatch in one stage, 1 or more; none: as many as it
    takes."""
    chunks: Annotated[int, _alias("chunks")] = 1
    """Parts of the model that a stage of `pipe` holds."""
    slices: Annotated[int, _alias("slices")] = 1
    """Token slices that terapipe cuts each sequence into, later ones shorter, since they attend to more."""
    layers_per_stage: Annotated[str, _alias("layers-per-stage")] = ""
    """Layers of each part of the model, stages x chunks of them, in the model's order: `7,8,8,7`. Empty: as many in
    each, and where that cannot be the cut whose slowest stage is fastest (`jaxpar partition`)."""
    pipeline_residuals: Annotated[bool, _alias("pipeline-residuals")] = False
    """Keep what a stage's backward pass needs, as `--remat` has it, from its forward pass on, in place of its input."""
    spread_head: Annotated[bool, _alias("spread-head")] = False
    """Embedding and head are the work of all stages together, each with its part of the vocabulary, in place of the
    first stage's and the last one's."""


@dataclass(frozen=True)
class RunConfig:
    steps: Annotated[int, _alias("steps")] = 200
    """Length of the run and of the learning rate's schedule."""
    stop_at: Annotated[int | None, _alias("stop-at")] = None
    """End after this step, the schedule unchanged."""
    seed: Annotated[int, _alias("seed")] = 0
    precision: Annotated[Literal["bfloat16", "float16", "float32", "float64"], _alias("precision")] = "bfloat16"
    """Of matmuls and activations. 16-bit ones keep master parameters and gradient sums in float32; float16 scales its
    loss dynamically."""
    params_dtype: Annotated[Literal["auto", "bfloat16"], _alias("params-dtype")] = "auto"
    """bfloat16: no float32 master parameters; updates are rounded stochastically."""
    reduce_dtype: Annotated[Literal["auto", "float32", "bfloat16"], _alias("reduce-dtype")] = "auto"
    """In which gradients are summed over ranks; auto: float32."""
    matmul: Annotated[Literal["auto", "fp8"], _alias("matmul")] = "auto"
    """fp8: the layers' matmuls in 8-bit floats, scaled per tensor; else in `precision`."""
    directory: Annotated[str, _alias("run-dir")] = ""
    """Where the run is written; empty: runs/<time>-<model>. A directory with a checkpoint is resumed."""
    resume: Literal["auto", "require", "never"] = "auto"
    """auto: where there is a checkpoint; `--resume` demands one; `--no-resume` starts over in a new directory."""
    checkpoint_every: Annotated[int, _alias("checkpoint-every")] = 0
    """Steps between checkpoints; one is always written at the end. 0: only that."""
    keep_checkpoints: Annotated[int, _alias("keep-checkpoints")] = 3
    """The newest so many checkpoints are kept; 0: all."""
    keep_every: Annotated[int, _alias("keep-every")] = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    eval_every: Annotated[int, _alias("eval-every")] = 0
    """Steps between evaluations; 0: none."""
    eval_batches: Annotated[int, _alias("eval-batches")] = 8
    """Batches of one evaluation, the same each time; fewer where the data has fewer."""
    eval_data: Annotated[str, _alias("eval-data")] = ""
    """What to evaluate on, written as --data; empty: the documents held out by --eval-fraction."""
    eval_only: Annotated[bool, _alias("eval-only")] = False
    """Evaluate the run directory's newest checkpoint, train nothing."""
    sample_tokens: int = 128
    """Length of the continuation that is sampled at the end; 0: none."""
    prefetch: int = 2
    """Batches made ready ahead of the step that takes them."""
    log_norms: Annotated[bool, _alias("log-norms")] = False
    """Write each parameter group's norm, and its gradient's, to metrics.jsonl."""
    trackers: Annotated[str, _alias("trackers")] = ""
    """Where else metrics go: any of tensorboard, wandb, mlflow, separated by commas."""
    profile: Annotated[str, _alias("profile")] = ""
    """START:STOP: trace these steps, both included, for XProf, into the run directory's profile/."""
    emulate: Annotated[int, _alias("emulate")] = 0
    """Run on this many emulated CPU devices (of this process); 0: on the devices that there are."""
    coordinator: Annotated[str, _alias("coordinator")] = ""
    """HOST:PORT of process 0. Under SLURM, Open MPI and on TPU pods the processes find each other without."""
    num_processes: Annotated[int, _alias("num-processes")] = 1
    process_id: Annotated[int, _alias("process-id")] = 0
    compiler_options: Annotated[str, _alias("compiler-options")] = "auto"
    """auto: the platform's table, for overlap of compute and communication; none: the compiler's defaults; NAME=VALUE,
    separated by commas, after either word or alone: on top."""
    compilation_cache: str = "auto"
    """Directory of compiled programs; auto: ~/.cache/jaxpar/xla; empty: none."""


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> "Config":
        """Itself. Raises ValueError, in one line, for what is out of range."""
        self.model.check()
        optimizer = self.optimizer
        for flag, value, least, most in (
            ("--batch-size", self.data.batch_size, 1, None),
            ("--seq-len", self.data.seq_len, 1, None),
            ("--steps", self.run.steps, 1, None),
            ("--grad-accumulation", self.parallel.grad_accumulation, 1, None),
            ("--chunks", self.parallel.chunks, 1, None),
            ("--slices", self.parallel.slices, 1, None),
            ("--emulate", self.run.emulate, 0, MAX_EMULATED),
            ("--seed", self.run.seed, 0, 2**32 - 1),
            ("--checkpoint-every", self.run.checkpoint_every, 0, None),
            ("--run.sample-tokens", self.run.sample_tokens, 0, None),
            ("--learning-rate", optimizer.learning_rate, 0, None),
            ("--optimizer.final-learning-rate", optimizer.final_learning_rate, 0, None),
            ("--warmup-steps", optimizer.warmup_steps, 0, None),
            ("--optimizer.beta1", optimizer.beta1, 0, 1),
            ("--optimizer.beta2", optimizer.beta2, 0, 1),
            ("--optimizer.eps", optimizer.eps, 0, None),
            ("--weight-decay", optimizer.weight_decay, 0, None),
            ("--optimizer.clip-norm", optimizer.clip_norm, 0, None),
            ("--optimizer.decay-fraction", optimizer.decay_fraction, 0, 1),
            ("--ema", optimizer.ema, 0, 1),
            ("--z-loss", optimizer.z_loss, 0, None),
            ("--label-smoothing", optimizer.label_smoothing, 0, 1),
            ("--eval-fraction", self.data.eval_fraction, 0, 0.9),
            ("--keep-checkpoints", self.run.keep_checkpoints, 0, None),
            ("--keep-every", self.run.keep_every, 0, None),
            ("--eval-every", self.run.eval_every, 0, None),
            ("--eval-batches", self.run.eval_batches, 1, None),
            ("--run.prefetch", self.run.prefetch, 0, None),
            ("--num-processes", self.run.num_processes, 1, None),
            ("--process-id", self.run.process_id, 0, self.run.num_processes - 1),
        ):
            toml.check_range(flag, value, least, most)
        if not 0 < self.parallel.capacity_factor < math.inf:
            raise ValueError(
                f"--capacity-factor is {self.parallel.capacity_factor}; it must be above 0, and finite: 1 has a slot "
                "for each token under balanced routing"
            )
        if self.run.stop_at is not None and not 1 <= self.run.stop_at <= self.run.steps:
            raise ValueError(f"--stop-at {self.run.stop_at} is outside of the run: 1 to --steps {self.run.steps}")
        if self.model.positions == "learned" and self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"--seq-len {self.data.seq_len} exceeds the {self.model.max_seq_len} learned positions of "
                f"{self.model.name}; lower it or set --model.max-seq-len"
            )
        return self

    @property
    def stop_at(self) -> int:
        return self.run.stop_at or self.run.steps


def load(path: Path, base: Config) -> Config:
    """`base` with the settings of a TOML file, such as a run directory's config.toml. Raises ValueError."""
    return toml.build(base, toml.read(path), str(path))


def with_mesh(config: Config, mesh: Mapping[str, int]) -> Config:
    """The config with the mesh's sizes as they turned out."""
    text = ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "data=1"
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, mesh=text))


def with_run(config: Config, **changes: Any) -> Config:
    """The config with other settings of its `run`."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))


# What stands on the command line for something else; --sliding-window has its own field's group.
_SHORTHANDS = {
    "--resume": ["--run.resume", "require"],
    "--no-resume": ["--run.resume", "never"],
    "--sliding-window": ["--model.sliding-window"],
    "--reshard-after-forward": ["--parallel.reshard-after-forward", "always"],
    "--no-reshard-after-forward": ["--parallel.reshard-after-forward", "never"],
}


def parse(args: Sequence[str], *, prog: str, description: str, base: Config | None = None) -> Config:
    """The Config of a command line. Raises ValueError, in one line, for what is unknown or out of range."""
    args = [word for arg in args for word in _longhand(arg)]
    config_files, args = _take(args, "--config")
    models, args = _take(args, "--model")
    base = base or Config()
    for path in config_files:
        base = load(Path(path), base)
    for name in models:
        base = dataclasses.replace(base, model=load_model(name))
    known = {"--help", "-h", "--config", "--model", *_flags(Config)}
    for arg in args:
        flag = arg.split("=")[0].replace("_", "-")
        if arg.startswith("--") and flag not in known:
            raise ValueError(f"unknown flag {arg.split('=')[0]}{toml.nearest(flag, known)}")
    description += (
        "\n\n--model takes a preset's name (`jaxpar models`) or a TOML file, --config a config.toml; "
        "--resume demands a checkpoint in --run-dir, --no-resume starts over; --sliding-window N is "
        "--model.sliding-window N."
    )
    return _quiet_cli(prog, description, base, args).check()


def _longhand(arg: str) -> list[str]:
    flag, equals, value = arg.partition("=")
    long = _SHORTHANDS.get(flag, [flag])
    return [*long[:-1], f"{long[-1]}{equals}{value}"]


def _quiet_cli(prog: str, description: str, base: Config, args: list[str]) -> Config:
    """tyro's parser, whose framed complaints become a ValueError of one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(Config, prog=prog, description=description, default=base, args=args)
    except SystemExit as stop:
        if not stop.code:
            raise
    words = [line.strip("│╭╮╰╯─ ") for line in complaint.getvalue().splitlines()[1:]]
    told = list(itertools.takewhile(lambda line: not line.startswith("For full helptext"), filter(None, words)))
    raise ValueError(" ".join(told))


def _take(args: list[str], flag: str) -> tuple[list[str], list[str]]:
    """The values of a flag, and the arguments without it."""
    values, rest = [], []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        given = value if equals else next(words, None)
        if given is None or given.startswith("--"):
            raise ValueError(f"{flag} needs a value")
        values.append(given)
    return values, rest


def _flags(group: type, prefix: str = "") -> set[str]:
    """Every spelling that tyro takes for a dataclass's fields."""
    flags: set[str] = set()
    for name, hint in typing.get_type_hints(group, include_extras=True).items():
        plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        if dataclasses.is_dataclass(plain):
            flags |= _flags(typing.cast(type, plain), f"{prefix}{name}.")
            continue
        spellings = [f"{prefix}{name}".replace("_", "-")]
        for extra in getattr(hint, "__metadata__", ()):
            spellings += [alias.removeprefix("--") for alias in extra.aliases or ()]
        flags |= {f"--{spelling}" for spelling in spellings}
        if plain is bool:
            flags |= {f"--{head}{dot}no-{last}" for head, dot, last in (s.rpartition(".") for s in spellings)}
    return flags


def exit_with(error: ValueError) -> typing.NoReturn:
    """A user's error: one line, exit status 2."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)
