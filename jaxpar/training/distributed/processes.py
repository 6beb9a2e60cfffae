"""What the processes of a run agree on, by JAX's coordination service: it needs no devices, and may wait long where
collectives cannot. Each key serves once. In a run of one process nothing is asked of anyone."""

import contextlib
import json
from collections.abc import Callable

import jax
from jax._src.distributed import global_state  # its key-value store, for which jax has no public name

SKEW_SECONDS = 1800
"""By how much one process may be ahead of another: as long as it may take to compile a program, or to tokenize."""
_LAST_WORDS_SECONDS = 3


def is_first() -> bool:
    """Whether this process speaks for the run: prints, writes metrics."""
    return global_state.process_id == 0


def name() -> str:
    return f"process {global_state.process_id} of {global_state.num_processes}"


def from_first(key: str, make: Callable[[], str]) -> str:
    """What `make` gives in process 0, in every process; its ValueError too."""
    client = global_state.client
    if client is None:
        return make()
    key = f"jaxpar/{key}"
    if is_first():
        try:
            message = {"value": make()}
        except ValueError as error:
            message = {"error": str(error)}
        client.key_value_set(key, json.dumps(message))
    else:
        message = json.loads(client.blocking_key_value_get(key, SKEW_SECONDS * 1000))
    if "error" in message:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # not all came in time to be told
            client.wait_at_barrier(f"{key}/told", _LAST_WORDS_SECONDS * 1000)
        raise ValueError(message["error"])
    return message["value"]


def from_each(key: str, value: str) -> list[str]:
    """The values of all processes."""
    client = global_state.client
    if client is None:
        return [value]
    client.key_value_set(f"jaxpar/{key}/{global_state.process_id}", value)
    wait_for_all(key)
    return [value for _, value in client.key_value_dir_get(f"jaxpar/{key}/")]


def wait_for_all(key: str) -> None:
    """Return when every process has come here.

    To be called before the first run of a compiled program: gloo gives up after 30 s where one process makes its first
    collective with others that still compile.
    """
    if global_state.client is not None:
        global_state.client.wait_at_barrier(f"jaxpar/{key}", SKEW_SECONDS * 1000)
