"""What jaxpar costs: its training step, compiled as train.py does, against the same model written by hand.

    python -m benchmarks.step_time --devices 8 --mesh fsdp=4,tensor=2
    python -m benchmarks.step_time --startup

Takes train.py's flags; --steps of each are timed, in turns. The default model is MaxText's default architecture at
embed 256, with 2 sequences of 256 tokens a device. Where others use the machine too, seconds of CPU are steadier
than those of the wall.

    --devices N    so many emulated CPU devices (1); 0: the devices that there are
    --startup      time the start of train.py --model tiny instead
    --json         print that, not a table
"""

import argparse
import dataclasses
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from benchmarks.plain import Plain
from jaxpar import config as configs
from jaxpar.training import optimizers, runtime, setup
from jaxpar.training.precision import Precision
from jaxpar.training.step import init_state, make_step
from jaxpar.verify import random_batch
from models.config import ModelConfig

MODEL = ModelConfig(
    "maxtext-256", 1024, embed_dim=256, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=1024
)
LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-3}

Step = Callable[[], jax.Array]
"""Does a step on a state of its own, to its end; its loss."""
Rows = dict[str, dict[str, float]]


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--startup", action="store_true")
    parser.add_argument("--json", action="store_true")
    given, rest = parser.parse_known_args(args)
    base = configs.Config(
        model=MODEL,
        data=configs.DataConfig(batch_size=2 * (given.devices or jax.device_count()), seq_len=256),
        optimizer=configs.OptimizerConfig(warmup_steps=0),  # a first step at learning rate 0 would prove nothing
        run=configs.RunConfig(steps=20, emulate=given.devices, compilation_cache=""),
    )
    config = configs.parse(rest, prog="step_time", description=str(__doc__), base=base)
    rows = startup() if given.startup else step_time(config)
    if given.json:
        print(json.dumps(rows))
    else:
        show(rows)


def step_time(config: configs.Config) -> Rows:
    """Median seconds of a step, and over pairs of steps the median ratio of jaxpar's to the plain one's."""
    runtime.prepare(config)
    steps = dict(zip(("jaxpar", "plain"), build(config)))
    for number in range(2):  # the second is of parameters that the first has moved
        ours, plain = (float(step()) for step in steps.values())
        assert math.isclose(ours, plain, rel_tol=LOSS_TOLERANCE[config.run.precision]), (number, ours, plain)
    seconds = np.array([[timed(step) for step in steps.values()] for _ in range(config.run.steps)])
    rows = {}
    for clock, pairs in zip(("wall", "cpu"), np.moveaxis(seconds, -1, 0)):
        medians = dict(zip(steps, np.median(pairs, axis=0).tolist()))
        rows[clock] = medians | {"ratio": float(np.median(pairs[:, 0] / pairs[:, 1]))}
    return rows


def build(config: configs.Config) -> tuple[Step, Step]:
    """jaxpar's step and the plain one, from the same parameters, on the same devices, with the same batch."""
    if config.parallel.grad_accumulation > 1 or config.parallel.remat != "full":
        raise ValueError("the plain step has one microbatch and full remat; leave --grad-accumulation and --remat out")
    mesh = setup.make_mesh(config)
    model = setup.make_model(config, mesh)
    tx = optimizers.make(config.optimizer, config.run.steps, model.names, config.model.vocab_size)
    with jax.set_mesh(mesh):
        batch = jax.device_put(random_batch(config), model.layout.sharding(model.layout.stacked_batch_spec()))
        batch = dataclasses.replace(batch, loss_weights=jnp.ones_like(batch.loss_weights))
        state = init_state(model, tx, config.run.seed)
        step = jax.jit(make_step(model, tx, config.optimizer.clip_norm), donate_argnums=0)
        compiled = step.lower(state, batch).compile()

    auto, stream = Mesh(mesh.devices, mesh.axis_names), model.layout.spec("batch", "residual_seq")
    assert stream is not None

    def copied(x: jax.Array) -> jax.Array:
        return jax.device_put(np.array(x), NamedSharding(auto, jax.typeof(x).sharding.spec))

    plain = Plain(
        config=config.model,
        mesh=auto,
        stream=stream,
        dtype=Precision.of(config.run).compute,
        optimizer=optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), tx),
    )
    plain_state = jax.tree.map(copied, (state.params, (optax.EmptyState(), state.opt_state)))
    shardings = jax.tree.map(lambda x: x.sharding, plain_state)
    plain_step = jax.jit(plain.step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    tokens, targets = copied(batch.tokens[0]), copied(batch.targets[0])

    def jaxpar_once() -> jax.Array:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, batch))
        return metrics.loss

    def plain_once() -> jax.Array:
        nonlocal plain_state
        *plain_state, loss = jax.block_until_ready(plain_step(*plain_state, tokens, targets))
        return loss

    return jaxpar_once, plain_once


def timed(step: Step) -> tuple[float, float]:
    """Seconds by the wall, and of this process's CPUs."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def startup() -> Rows:
    """Seconds from a process's start to the end of `import jaxpar`, and of train.py's first step: with no compiled
    program in its cache, then with all of them."""
    rows = {"import jaxpar": until("done", "-c", "import jaxpar; print('done')")}
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model=tiny", "--steps=1", "--run.sample-tokens=0", f"--run.compilation-cache={directory}/xla"]
        for cache in ("cold", "warm"):
            rows[f"first step, {cache}"] = until("step 1/1", "train.py", *flags, f"--run-dir={directory}/{cache}")
    return rows


def until(line: str, *args: str) -> dict[str, float]:
    """Seconds until Python with these arguments prints a line that begins so; it is ended there."""
    wall, cpu = time.perf_counter(), children_cpu()
    command = [sys.executable, *args]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = any(printed.startswith(line) for printed in process.stdout)
        wall = time.perf_counter() - wall
        process.kill()
    assert found, f"{command} did not print {line}"
    return {"wall": wall, "cpu": children_cpu() - cpu}


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(rows: Rows) -> None:
    columns = list(next(iter(rows.values())))
    table = Table("seconds", *columns)
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        configs.exit_with(error)
