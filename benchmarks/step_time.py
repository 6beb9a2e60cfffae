"""What jaxpar costs: its compiled training step against the same model written by hand, in one process.

    python -m benchmarks.step_time --devices 8 --mesh fsdp=4,tensor=2
    python -m benchmarks.step_time --startup

Takes train.py's flags; --steps of each are timed, in turns. By default it is MaxText's architecture at embed 256, 4
layers, 2 sequences of 256 tokens a device. On a machine that is shared, CPU seconds are steadier than wall time.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from benchmarks.plain import Plain
from jaxpar import config as configs
from jaxpar.training import optimizer, runtime, setup
from jaxpar.training.step import init_state, make_step
from jaxpar.verify import random_batch
from models.config import ModelConfig

MODEL = ModelConfig(
    "maxtext-256", 1024, embed_dim=256, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=1024
)
LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-3}

Step = Callable[[], jax.Array]
"""Does a step on a state of its own; its loss."""


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="step_time", add_help=False)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--startup", action="store_true")
    parser.add_argument("--json", action="store_true")
    given, rest = parser.parse_known_args(args)
    base = configs.Config(
        model=MODEL,
        data=configs.DataConfig(batch_size=2 * given.devices),
        run=configs.RunConfig(steps=20, emulate=given.devices, compilation_cache=""),
    )
    config = configs.parse(rest, prog="step_time", description=f"{__doc__}\n--devices N --startup --json", base=base)
    result = startup() if given.startup else step_time(config)
    print(json.dumps(result)) if given.json else show(result)


def step_time(config: configs.Config) -> dict[str, dict[str, float]]:
    """Medians of seconds a step, wall and CPU, and the median over pairs of steps of jaxpar's to the plain one's."""
    runtime.prepare(config)
    steps = dict(zip(("jaxpar", "plain"), build(config)))
    for _ in range(2):  # the first step's parameters have moved by the second
        losses = [float(step()) for step in steps.values()]
        assert np.isclose(*losses, rtol=LOSS_TOLERANCE[config.run.precision]), losses
    seconds = [[timed(step) for step in steps.values()] for _ in range(config.run.steps)]
    result = {}
    for clock, pairs in zip(("wall", "cpu"), np.moveaxis(np.array(seconds), -1, 0)):
        medians = dict(zip(steps, np.median(pairs, axis=0).tolist()))
        result[clock] = medians | {"ratio": float(np.median(pairs[:, 0] / pairs[:, 1]))}
    return result


def build(config: configs.Config) -> tuple[Step, Step]:
    """jaxpar's step as train.py makes it, and the plain one, from the same parameters on the same devices."""
    mesh = setup.make_mesh(config)
    model = setup.make_model(config, mesh)
    tx = optimizer.adamw(config.optimizer, config.run.steps, model.names)
    host = random_batch(config)
    host = dataclasses.replace(host, loss_weights=np.ones_like(host.loss_weights))
    batch = jax.device_put(host, model.layout.sharding(model.layout.stacked_batch_spec()))
    with jax.set_mesh(mesh):
        state = init_state(model, tx, config.run.seed)
        jitted = jax.jit(make_step(model, tx, config.optimizer.clip_norm), donate_argnums=0)
        compiled = jitted.lower(state, batch).compile()

    auto = Mesh(mesh.devices, mesh.axis_names)
    placed = lambda x: jax.device_put(np.array(x), NamedSharding(auto, x.sharding.spec))  # noqa: E731
    plain = Plain(
        config.model,
        auto,
        model.layout.spec("batch", "residual_seq"),
        runtime.precision(config.run.precision).compute,
        optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), tx),
    )
    plain_state = jax.tree.map(placed, (state.params, (optax.EmptyState(), state.opt_state)))
    shardings = jax.tree.map(lambda x: x.sharding, plain_state)
    plain_step = jax.jit(plain.step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    tokens, targets = (placed(x[0]) for x in (batch.tokens, batch.targets))

    def jaxpar_once():
        nonlocal state
        state, metrics = compiled(state, batch)
        return jax.block_until_ready((state, metrics))[1].loss

    def plain_once():
        nonlocal plain_state
        *plain_state, loss = plain_step(*plain_state, tokens, targets)
        return jax.block_until_ready((plain_state, loss))[1]

    return jaxpar_once, plain_once


def timed(step: Step) -> tuple[float, float]:
    """Seconds by the wall and of this process's CPUs."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def startup() -> dict[str, dict[str, float]]:
    """Seconds from the start of a process to `import jaxpar` done, and to train.py's first step done, with empty
    caches (tokens and compiled programs) and with those that it left."""
    return {}


def show(result: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(result.values())))
    table = Table("seconds", *columns)
    for name, row in result.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
