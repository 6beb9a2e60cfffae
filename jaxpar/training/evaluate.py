"""What a model is worth on text that it does not train on: cross-entropy, one sum over tokens by one count."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from jaxpar.numerics import widened
from jaxpar.parallel.batch import Batch
from jaxpar.training.model import Model

EvalStep = Callable[[PyTree, Batch], tuple[Float[Array, ""], Float[Array, ""]]]


def make_eval_step(model: Model) -> EvalStep:
    """The function to compile: (params, batch [M, B, S]) -> (sum of negative log-likelihoods in nats, valid tokens)."""
    layout = model.layout
    dtype = widened(layout.compute_dtype)

    def local(params: PyTree, batch: Batch) -> tuple[Array, Array]:
        weights = batch.loss_weights.astype(dtype)
        weighted = dataclasses.replace(batch, loss_weights=weights)

        def add(total: Array, microbatch: Batch) -> tuple[Array, None]:
            return total + model.loss(params, microbatch)[1].loss, None

        nll, _ = lax.scan(add, jnp.zeros((), dtype), weighted)
        return layout.sum_over_tokens(nll), layout.sum_over_tokens(jnp.sum(weights))

    def step(params: PyTree, batch: Batch) -> tuple[Array, Array]:
        region = layout.region(local, (model.computed_specs, layout.stacked_batch_spec()), (P(), P()))
        return region(model.computed_with(params), batch)

    return step


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Nats per valid token."""
    bits_per_byte: float | None
    """Of the text, comparable between tokenizers; None where its size in bytes is not known."""
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 709 else math.inf

    def row(self) -> dict[str, float | None]:
        """What it adds to its step's row of metrics.jsonl."""
        return {
            "eval_loss": self.loss,
            "eval_perplexity": self.perplexity,
            "eval_bits_per_byte": self.bits_per_byte,
        }

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f"  {self.bits_per_byte:.4f} bits per byte"
        return f"eval loss {self.loss:.4f}  perplexity {self.perplexity:,.2f}{bits}  ({self.num_tokens:,} tokens)"


@dataclass(frozen=True)
class Evaluator:
    """evaluator(params) -> Evaluation, over the same batches each time."""

    step: EvalStep
    batch_of: Callable[[int], Batch]
    num_batches: int
    bytes_per_token: float | None
    """Of the evaluation text, over all of its tokens."""

    @classmethod
    def compile(
        cls,
        model: Model,
        params: PyTree,
        batch_of: Callable[[int], Batch],
        num_batches: int,
        bytes_per_token: float | None,
    ) -> "Evaluator":
        """The evaluation of parameters of these types (arrays or abstract), compiled ahead."""
        assert num_batches >= 1
        step = jax.jit(make_eval_step(model)).lower(params, batch_of(0)).compile()
        return cls(step, batch_of, num_batches, bytes_per_token)

    def __call__(self, params: PyTree) -> Evaluation:
        nll = num_tokens = 0.0  # Python's own floats: float32 would round a sum over many batches
        for index in range(self.num_batches):
            batch_nll, batch_tokens = self.step(params, self.batch_of(index))
            nll += float(batch_nll)
            num_tokens += float(batch_tokens)
        assert num_tokens > 0, "the evaluation batches have no token that counts"
        loss = nll / num_tokens
        bits = loss / math.log(2)
        return Evaluation(loss, bits / self.bytes_per_token if self.bytes_per_token else None, int(num_tokens))
