"""Train a Transformer: `python train.py --help`."""

import logging
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxpar import config as configs
from jaxpar.data import Loader, build_token_file, find_files
from jaxpar.decoding.sample import sample
from jaxpar.parallel.batch import Batch
from jaxpar.training import compiler_options, distributed, loop, optimizer, report, runtime, setup
from jaxpar.training.checkpoint import Checkpoints
from jaxpar.training.metrics import Meter
from jaxpar.training.run_directory import RunDirectory
from jaxpar.training.step import init_state, make_step
from models.count import num_parameters


def main(args: list[str]) -> None:
    config = configs.parse(args, prog="train.py", description=__doc__)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("jaxpar").setLevel(logging.INFO)
    runtime.prepare(config)
    distributed.start(config.run)
    console = Console(quiet=not distributed.is_first())

    # What can be wrong is found before anything long starts.
    mesh = setup.make_mesh(config)
    config = configs.with_mesh(config, mesh.shape)
    model = setup.make_model(config, mesh)
    options = compiler_options.resolve(config.run.compiler_options, jax.default_backend())
    # What to run, not as which process of which run.
    resolved = compiler_options.as_text(options)
    config = configs.with_run(config, compiler_options=resolved, coordinator="", num_processes=1, process_id=0)
    tokens = build_token_file(find_files(config.data.source))
    if tokens.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the data has token ids up to {tokens.vocab_size - 1}, the model's vocabulary ends at "
            f"{config.model.vocab_size - 1}; set --model.vocab-size {tokens.vocab_size} or more"
        )
    loader = Loader(
        tokens,
        batch_size=config.data.batch_size,
        seq_len=config.data.seq_len,
        num_microbatches=config.parallel.grad_accumulation,
        seed=config.run.seed,
    )
    run = RunDirectory(Path(distributed.from_first("run directory", lambda: str(RunDirectory.choose(config).path))))

    learning_rate = optimizer.schedule(config.optimizer, config.run.steps)
    tx = optimizer.make(config.optimizer, config.run.steps, model.names, config.model.vocab_size)
    checkpoints = Checkpoints(run.checkpoints, model, tx)

    first = checkpoints.latest() or 0
    if first >= config.stop_at:
        console.print(f"{run.path} is at step {first} already: nothing to do", highlight=False)
        return

    distributed.wait_for_all("start")
    should_stop = distributed.stop_requests()
    with jax.set_mesh(mesh):
        state = checkpoints.restore(first) if first else init_state(model, tx, config.run.seed)
        if distributed.is_first():
            run.start(config, first)
        rows = run.read_metrics()
        peak = distributed.peak_flops(list(mesh.devices.flat), config.run.precision)
        console.print(
            f"{config.model.name}: {num_parameters(config.model):,} parameters on {config.parallel.mesh}\n"
            f"{config.data.source}: {tokens.num_tokens:,} tokens\n"
            f"MFU against {peak.label}",
            highlight=False,
        )
        if first:
            console.print(f"resumed {run.path} after step {first}", highlight=False)

        batch_sharding = model.layout.sharding(model.layout.stacked_batch_spec())
        assert batch_sharding is not None

        def batch_of(step: int) -> Batch:
            return loader.batch(step, batch_sharding)

        step = jax.jit(make_step(model, tx, config.optimizer.clip_norm), donate_argnums=0)
        compiled = step.lower(state, batch_of(first)).compile(compiler_options=options)
        distributed.wait_for_all("compiled")

        tokens_per_step = config.data.batch_size * config.data.seq_len
        meter = Meter(config, mesh.size, peak, learning_rate, rows[-1]["tokens"] if rows else first * tokens_per_step)
        with report.ProgressReport(console, first, config.stop_at) as progress:

            def log(row: dict) -> None:
                if distributed.is_first():
                    run.append_metrics(row)
                progress.update(row)

            state = loop.run(
                compiled,
                state,
                batch_of,
                meter,
                first=first,
                stop_at=config.stop_at,
                save=checkpoints.save,
                save_every=config.run.checkpoint_every,
                report=log,
                should_stop=should_stop,
            )

        last = int(state.step)
        if last < config.stop_at:
            console.print(f"stopped by SIGTERM; {run.path} is saved at step {last} and goes on from there")
            return
        if distributed.is_first():
            report.plot_loss(run.read_metrics(), run.path / "loss.png")
        if config.run.sample_tokens:
            prompt = np.asarray(tokens.tokens[:64], np.int32)
            drawn = sample(model, state.params, prompt, config.run.sample_tokens, config.data.seq_len, config.run.seed)
            text = bytes([*prompt.tolist(), *drawn.clip(0, 255).tolist()]).decode("utf-8", "replace")
            console.print(text, highlight=False, markup=False)
    console.print(f"{run.path}: config.toml, metrics.jsonl, loss.png, checkpoints/{config.stop_at}", highlight=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        distributed.leave(error)
