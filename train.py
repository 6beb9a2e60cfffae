"""Train a Transformer: `python train.py --help`."""

import contextlib
import logging
import sys
from collections.abc import Callable

import jax
from rich.console import Console

from jaxpar import config as configs
from jaxpar import data
from jaxpar.config import Config
from jaxpar.decoding.sample import sample
from jaxpar.parallel.batch import Batch
from jaxpar.training import compiler_options, distributed, loop, optimizers, runtime, setup
from jaxpar.training.checkpoints.checkpoint import Checkpoints
from jaxpar.training.checkpoints.run_directory import RunDirectory
from jaxpar.training.distributed import processes
from jaxpar.training.evaluate import Evaluation, Evaluator
from jaxpar.training.model import Model
from jaxpar.training.reporting import html_report, progress
from jaxpar.training.reporting.memory import DeviceMemory
from jaxpar.training.reporting.metrics import Meter
from jaxpar.training.reporting.profiler import Profile, parse_steps
from jaxpar.training.reporting.trackers import Trackers, parse_trackers
from jaxpar.training.step import TrainState, abstract_state, init_state, make_step
from models.count import num_parameters

log = logging.getLogger("jaxpar")


def main(args: list[str]) -> None:
    config = configs.parse(args, prog="train.py", description=__doc__)
    logging.basicConfig(format="%(message)s", force=True)
    log.setLevel(logging.INFO)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's, with a traceback of all that it raises too
    runtime.prepare(config)
    distributed.start(config.run)
    distributed.check_same(config)
    console = Console(quiet=not processes.is_first(), highlight=False)

    # What can be wrong is found before anything long starts.
    mesh = setup.make_mesh(config)
    config = configs.with_mesh(config, mesh.shape)
    model = setup.make_model(config, mesh)
    tx = optimizers.make(config.optimizer, config.run.steps, model.names, config.model.vocab_size)
    options = compiler_options.resolve(config.run.compiler_options, jax.default_backend(), model.sends_ragged)
    abstract_state(model, tx)  # or ValueError, where an optimizer cannot keep its state so
    trackers = parse_trackers(config.run.trackers)
    profiled = parse_steps(config.run.profile, config.stop_at)
    # What to run, not as which process of which run.
    resolved = compiler_options.as_text(options)
    config = configs.with_run(config, compiler_options=resolved, coordinator="", num_processes=1, process_id=0)
    corpus = data.prepare(
        config.data,
        eval_data=config.run.eval_data,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        num_microbatches=config.parallel.grad_accumulation,
    )
    if corpus.evaluation is None and (config.run.eval_every or config.run.eval_only):
        raise ValueError("there is nothing to evaluate on; give --eval-data, or an --eval-fraction above 0")
    run = RunDirectory.choose(config)
    checkpoints = Checkpoints(run.checkpoints, model, tx, config, corpus.fingerprint)

    first = checkpoints.latest() or 0
    if first >= config.stop_at and not config.run.eval_only:
        console.print(f"{run.path} is at step {first} already: nothing to do")
        return

    processes.wait_for_all("start")
    with jax.set_mesh(mesh), checkpoints, distributed.stop_requests() as should_stop, contextlib.ExitStack() as stack:
        state = checkpoints.restore(first) if first else init_state(model, tx, config.run.seed)
        evaluate = make_evaluate(model, state, corpus, config)
        if config.run.eval_only:
            assert evaluate is not None
            processes.wait_for_all("compiled")
            console.print(f"{run.path}, step {first}: {evaluate(state)}", soft_wrap=True)
            return

        run.start(config, first)
        rows = run.read_metrics()
        peak = distributed.peak_flops(list(mesh.devices.flat), config.run.precision)
        console.print(
            f"{config.model.name}: {num_parameters(config.model):,} parameters on {config.parallel.mesh}\n"
            f"{config.data.source}: {corpus.num_tokens:,} tokens\n"
            f"MFU against {peak.label}"
        )
        if first:
            console.print(f"resumed {run.path} after step {first}")

        batch_sharding = model.layout.sharding(model.layout.stacked_batch_spec())
        assert batch_sharding is not None
        order = model.layout.sequence_order(config.data.seq_len)

        def make_batch(step: int) -> Batch:
            return corpus.train.batch(step, batch_sharding, order)

        step = jax.jit(make_step(model, tx, config.optimizer.clip_norm, config.run.log_norms), donate_argnums=0)
        compiled = step.lower(state, make_batch(first)).compile(compiler_options=options)
        processes.wait_for_all("compiled")

        memory = DeviceMemory(jax.local_devices(), compiled)
        tokens = rows[-1]["tokens"] if rows else first * config.data.batch_size * config.data.seq_len
        learning_rate = optimizers.schedule(config.optimizer, config.run.steps)
        meter = Meter(config, mesh.size, peak, learning_rate, tokens, memory.peak_bytes)
        if processes.is_first():
            stack.callback(draw, run)
        else:
            trackers, profiled = (), range(0)
        batches = stack.enter_context(data.Prefetcher(make_batch, first, config.stop_at, config.run.prefetch))
        profile = stack.enter_context(contextlib.closing(Profile(profiled, run.path / "profile")))
        tracking = stack.enter_context(contextlib.closing(Trackers.start(trackers, run.path, config, first)))
        bar = stack.enter_context(progress.ProgressReport(console, first, config.stop_at))

        def record(row: dict) -> None:
            run.append_metrics(row)
            tracking.log(row)
            bar.update(row)

        state = loop.run(
            compiled,
            state,
            lambda step: (batches.next(), batches.wait_seconds),
            meter,
            first=first,
            stop_at=config.stop_at,
            save=checkpoints.save,
            save_every=config.run.checkpoint_every,
            evaluate=None if evaluate is None else lambda state: evaluate(state).row(),
            eval_every=config.run.eval_every,
            profile=profile,
            should_stop=should_stop,
            report=record,
        )
        stack.close()
        checkpoints.wait()
        last = int(state.step)
        if checkpoints.last_saved != last:
            have = "none" if checkpoints.last_saved is None else f"of step {checkpoints.last_saved}"
            raise ValueError(
                f"step {last} is done, but not saved (the last checkpoint: {have}); see the warning above, then give "
                f"--run-dir {run.path} to do the steps since again"
            )
        console.print(str(memory))
        if last < config.stop_at:
            console.print(f"stopped after step {last}, which is saved: --run-dir {run.path} goes on", soft_wrap=True)
            return
        if config.run.sample_tokens:
            prompt = corpus.prompt(64)
            params = optimizers.evaluation_params(state.opt_state, state.params)
            drawn = sample(model, params, prompt, config.run.sample_tokens, config.data.seq_len, config.run.seed)
            console.print(corpus.tokenizer.decode([*prompt, *drawn]), markup=False)
    console.print(f"{run.path}: config.toml, metrics.jsonl, report.html, loss.png, checkpoints/{last}", soft_wrap=True)


def make_evaluate(
    model: Model, state: TrainState, corpus: data.Corpus, config: Config
) -> Callable[[TrainState], Evaluation] | None:
    """evaluate(state), compiled; None where the run does not ask for it."""
    evaluation = corpus.evaluation
    if evaluation is None or not (config.run.eval_every or config.run.eval_only):
        return None
    sharding = model.layout.sharding(model.layout.stacked_batch_spec())
    assert sharding is not None
    order = model.layout.sequence_order(config.data.seq_len)
    evaluator = Evaluator.compile(
        model,
        optimizers.evaluation_params(state.opt_state, state.params),
        lambda index: evaluation.loader.batch(index, sharding, order),
        min(config.run.eval_batches, evaluation.num_batches),
        evaluation.bytes_per_token,
    )
    return lambda state: evaluator(optimizers.evaluation_params(state.opt_state, state.params))


def draw(run: RunDirectory) -> None:
    """The run's pictures, of whatever it has come to."""
    try:
        rows = run.read_metrics()
        progress.plot_loss(rows, run.path / "loss.png")
        html_report.write_report(rows, (run.path / "config.toml").read_text(), run.path / "report.html")
    except OSError as error:
        log.warning("no pictures of %s: %s", run.path, error.strerror)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        distributed.leave(error)
