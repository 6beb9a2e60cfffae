"""Which parallelism to begin with: rules of thumb by size, before any search.

| devices | parameters | sequence | take |
|---|---|---|---|
| to 128 | to 1B | to 16K | data parallelism |
| to 256 | above 1B, or above 128 devices | to 16K | FSDP and activation checkpointing |
| above 256 | to 50B | to 16K | HSDP: FSDP within groups, data parallelism between them |
| above 1,000 devices, 50B parameters or 16K tokens | | | context, pipeline and tensor parallelism as well |

Source: Stanford CS231n (2025), lecture 11, "Large Scale Distributed Training", "Recipe for scaling up".
"""

from dataclasses import dataclass

MAX_DATA_DEVICES = 128
MAX_DATA_PARAMETERS = 1e9
MAX_FSDP_DEVICES = 256
MAX_HSDP_DEVICES = 1000
MAX_HSDP_PARAMETERS = 50e9
MAX_SEQ_LEN = 16384


@dataclass(frozen=True)
class Step:
    """One thing to turn on, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Recipe:
    strategy: str
    """DP, FSDP, HSDP or ND: the last with what splits layers, the stack of them or the sequence."""
    steps: tuple[Step, ...]
    """All that it consists of, in the order in which to turn them on."""


def recipe(num_parameters: float, num_devices: int, seq_len: int) -> Recipe:
    """The recipe for a model on so many devices. ValueError for sizes below 1."""
    for name, number in (("parameters", num_parameters), ("devices", num_devices), ("tokens a sequence", seq_len)):
        if not number >= 1:
            raise ValueError(f"{number:g} {name}: take at least 1")
    devices, size = f"{num_devices:,} devices", _size(num_parameters)
    if num_devices <= MAX_DATA_DEVICES and num_parameters <= MAX_DATA_PARAMETERS and seq_len <= MAX_SEQ_LEN:
        reason = f"{size} on each of {devices}: all fits without splitting it, and gradients are all that is sent"
        return Recipe("DP", (Step("DP", reason),))
    if num_parameters > MAX_DATA_PARAMETERS:
        why = f"{size} are more than {_size(MAX_DATA_PARAMETERS)}: weights, gradients and optimizer state are split"
    elif num_devices > MAX_DATA_DEVICES:
        why = f"{devices} are more than {MAX_DATA_DEVICES}: split over them, the state leaves room for larger batches"
    else:
        why = f"{seq_len:,} tokens are more than {MAX_SEQ_LEN:,}: the state's share makes room for activations"
    steps = [
        Step("FSDP", why),
        Step("activation checkpointing", "a layer's input is kept and the rest computed again, for a larger batch"),
    ]
    if num_devices > MAX_FSDP_DEVICES:
        hybrid = f"{devices} are more than {MAX_FSDP_DEVICES}: weights are gathered within groups on fast links, only "
        steps.append(Step("HSDP", hybrid + "gradients are summed between them"))
    nd = _beyond_data(num_parameters, num_devices, seq_len)
    strategy = "ND" if nd else "HSDP" if num_devices > MAX_FSDP_DEVICES else "FSDP"
    return Recipe(strategy, (*steps, *nd))


def _beyond_data(num_parameters: float, num_devices: int, seq_len: int) -> list[Step]:
    """What splits a layer, the layers or the sequence; each where it is what is too large, all above 1,000 devices."""
    steps = []
    many = num_devices > MAX_HSDP_DEVICES
    too_many = f"{num_devices:,} devices are more than {MAX_HSDP_DEVICES:,}: a batch of one sequence each is too large"
    large = num_parameters > MAX_HSDP_PARAMETERS
    too_large = f"{_size(num_parameters)} are more than {_size(MAX_HSDP_PARAMETERS)}"
    if seq_len > MAX_SEQ_LEN:
        steps.append(Step("CP", f"{seq_len:,} tokens are more than {MAX_SEQ_LEN:,}: the sequence is cut"))
    if many or large:
        steps.append(Step("PP", f"{too_large if large else too_many}; layers between servers"))
        steps.append(Step("TP", f"{too_large if large else too_many}; heads and MLPs within a server"))
    return steps


def _size(num_parameters: float) -> str:
    return f"{num_parameters / 1e9:g}B parameters" if num_parameters >= 1e9 else f"{num_parameters / 1e6:g}M parameters"
