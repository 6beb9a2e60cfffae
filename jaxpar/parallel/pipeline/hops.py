"""What stages send each other in a tick, each hop beside work that does not need it.

A tick, with what is under way meanwhile (see Program.is_late and is_urgent):
    forward pass    gradients that the tick before made, for this tick's backward passes
    backward pass   outputs of this tick's forward passes, for the next tick's
    both            what the tick before made and nobody needs in this one
A stage does one of the two; so what hides a hop is in time, and not in the text alone, where its ends are at work
beside each other, as in 1F1B's steady state (outputs) or in tables whose hops have a tick to themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.parallel.pipeline import trees
from jaxpar.parallel.pipeline.program import Hop, Pass, Program

State = TypeVar("State")


class Mail(NamedTuple):
    """Of a stage, from a tick to the next."""

    inputs: Float[Array, "slots B S D"]
    gradients: Float[Array, "slots B S D"]
    unsent: dict[Pass, Float[Array, "B S D"]]


@dataclass(frozen=True)
class Hops:
    program: Program
    axis: str

    def none(self, activation: Any, fill: float) -> Mail:
        """Before the first tick: `fill` in all that holds nothing. Something arrives in every tick; what nobody reads
        goes to a spare slot."""

        def empty(*slots: int) -> Array:
            return jnp.full((*slots, *activation.shape), fill, activation.dtype)

        made_by = {hop.made_by for hop in self.program.hops if self.program.is_late(hop)}
        inputs, gradients = (empty(self.program.num_slots[name] + 1) for name in ("inputs", "gradients"))
        return Mail(inputs, gradients, {each: empty() for each in sorted(made_by)})

    def tick(
        self,
        row: dict[str, Any],
        mail: Mail,
        state: State,
        forward: Callable[[Array, State], tuple[Array, Array, State]],
        backward: Callable[[Array, Array, State], tuple[Array, State]],
        end: Callable[[Array, State], State],
    ) -> tuple[Mail, State]:
        """forward(inputs, state) -> (its own input, output, state); backward(its own input, gradients, state) ->
        (gradient by it, state); end(this gradient, state) -> state, what the model's first part alone does with it.

        Barriers keep the order of the three, weight gradients that waited included: in an order of the compiler's a
        hop may be left with nothing beside it, and a stage with work that has to wait for its neighbour's of the same
        tick.
        """
        arrived = self._sent(mail.unsent, late=True)
        x, y, state = forward(mail.inputs, state)
        urgent = {hop: arrived.pop(hop) for hop in self.program.hops if self.program.is_urgent(hop)}
        x, y, urgent = lax.optimization_barrier((x, y, urgent))
        mail = self._stored(mail, urgent, row)
        arrived |= self._sent({"forward": y}, late=False)
        dx, state = backward(x, mail.gradients, state)
        dx, state, arrived = lax.optimization_barrier((dx, state, arrived))
        mail = mail._replace(inputs=trees.put(mail.inputs, x, row["looked_up"]))
        mail = self._stored(mail, arrived, row)
        state = end(dx, state)
        made: dict[Pass, Array] = {"forward": y, "backward": dx}
        return mail._replace(unsent={each: made[each] for each in mail.unsent}), state

    def _sent(self, made: Mapping[Pass, Array], late: bool) -> dict[Hop, Array]:
        return {
            hop: lax.ppermute(made[hop.made_by], self.axis, pairs) if hop.shift else made[hop.made_by]
            for hop, pairs in self.program.hops.items()
            if hop.made_by in made and self.program.is_late(hop) == late
        }

    def _stored(self, mail: Mail, arrived: Mapping[Hop, Array], row: dict[str, Any]) -> Mail:
        for (hop, buffer), slot in zip(self.program.arrivals, row["arrivals"], strict=True):
            if hop in arrived:
                mail = mail._replace(**{buffer: trees.put(getattr(mail, buffer), arrived[hop], slot)})
        return mail
