"""What the processes of a run must agree on."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def agreed(function: Callable[[], str]) -> str:
    """function() of process 0, in every process; so too its ValueError. All must call this, outside of a step."""
    if jax.process_count() == 1:
        return function()
    told = b""
    if jax.process_index() == 0:
        try:
            told = b"+" + function().encode()
        except ValueError as error:
            told = b"-" + str(error).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(told))))
    buffer = np.frombuffer(told.ljust(size, b"\0")[:size], np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8).tobytes()
    if told.startswith(b"-"):
        raise ValueError(told[1:].decode())
    return told[1:].decode()


def any_process(flag: bool) -> bool:
    """Whether the flag is up in any process. All must call this, outside of a step."""
    return flag if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))
