"""Published figures, answered by the planner's own functions: a case says what it asks by its topic and its names.

A rule is a function of a topic. Its parameters' names are the inputs that it takes (those with a default may be
missing), its result the quantities that it knows by name; `VALUE` is the one that a bare number asks for. Of a topic's
rules all that find their inputs answer together, those that use more of the inputs first.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VALUE = "value"
"""The name of the quantity that answers a case whose answer is no object."""

Quantities = Mapping[str, Any]

_SAME = {
    "devices": ("gpus", "chips", "n_gpus", "num_gpus", "cores", "num_devices", "accelerators"),
    "params": ("N", "n_params", "num_params", "parameters", "P"),
    "tokens": ("D", "num_tokens", "T"),
    "layers": ("L", "l", "num_layers", "n_layers"),
    "hidden": ("d", "d_model", "h", "embed_dim", "hidden_size", "D"),
    "heads": ("a", "H", "num_heads", "n_heads", "q_heads"),
    "kv_heads": ("K", "kv", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("hd", "Q", "H"),
    "vocab": ("V", "vocab_size", "padded_vocab"),
    "seq": ("s", "S", "T", "seq_len", "sequence_length"),
    "ffn": ("F", "mlp_dim", "d_ff", "ffw"),
    "stages": ("p", "pp", "P", "PP"),
    "microbatches": ("m", "M", "num_microbatches"),
    "chunks": ("v", "vp", "virtual"),
    "tp": ("t", "tensor"),
    "dp": ("data",),
    "peak": ("peak_flops", "peak_tflops", "C"),
    "tflops": ("tflops_per_gpu", "model_tflops", "model_tflops_per_gpu"),
    "rate": ("tokens_per_s_per_gpu", "tok_s_gpu", "tps_per_gpu", "tok_s_chip", "tokens_s_gpu", "wps"),
    "hours": ("gpu_hours", "chip_hours", "device_hours", "tpu_hours"),
    "experts": ("E", "num_experts"),
    "experts_per_token": ("k", "topk", "top_k"),
    "cp": ("context",),
    "chip": ("gpu", "accelerator", "system"),
    "bandwidth": ("B", "W", "bw", "busbw"),
    "ranks": ("n", "N"),
}
"""Other names of an input; a parameter's own name goes before them, and so do the names that a rule gives."""


@dataclass(frozen=True)
class Rule:
    """A function of the planner under the names that published figures give its inputs and results."""

    topics: tuple[str, ...]
    function: Callable[..., Quantities]
    names: Mapping[str, str]
    """Of a parameter, the input that it is, where no common name says so."""


def rule(*topics: str, **names: str) -> Callable[[Callable[..., Quantities]], Rule]:
    """Makes a function a rule of these topics."""
    return lambda function: Rule(topics, function, names)


def answer(case: Mapping[str, Any], rules: Iterable[Rule]) -> Any:
    """The answer in the form that the case asks for, or None where something of it is not known.

    The form is `answer_form`, or else the keys of `expected`, whose values are not looked at.
    """
    form = _form(case["answer_form"] if "answer_form" in case else case.get("expected"))
    of_topic = [each for each in rules if case["topic"] in each.topics]
    known = _quantities(of_topic, case["inputs"], form)
    if not isinstance(form, dict):
        return next((found[VALUE] for found in known if VALUE in found), None)
    merged: dict[str, Any] = {}
    for found in known:
        merged = {**found, **merged}
    try:
        return _fill(form, merged)
    except (KeyError, TypeError):
        return None


def _fill(form: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The known quantities that a form names. Raises KeyError or TypeError for one that is not known."""
    filled = {key: known[key] if of is None else _fill(of, known[key]) for key, of in form.items()}
    missing = [key for key, value in filled.items() if value is None]
    if missing:
        raise KeyError(missing[0])
    return filled


def _form(of: Any) -> Any:
    """Keys alone: of an object its names, of anything else None."""
    return {key: _form(value) for key, value in of.items()} if isinstance(of, dict) else None


def _quantities(rules: list[Rule], inputs: Mapping[str, Any], form: Any) -> list[Quantities]:
    """What the topic's rules know, those that leave fewest inputs unused first."""
    found = []
    for order, each in enumerate(rules):
        taken = _arguments(each, inputs, form)
        if taken is None:
            continue
        arguments, used = taken
        try:
            known = each.function(**arguments)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue  # inputs of another meaning under the same names
        found.append((len(inputs.keys() - used), order, known))
    return [known for _, _, known in sorted(found, key=lambda item: item[:2])]


def _arguments(of: Rule, inputs: Mapping[str, Any], form: Any) -> tuple[dict[str, Any], set[str]] | None:
    """A rule's arguments and the inputs that they came from; None where one is missing. A parameter `form` is the
    answer's form, `inputs` all of them."""
    arguments: dict[str, Any] = {}
    used: set[str] = set()
    special = {"form": form, "inputs": inputs}
    for name, parameter in inspect.signature(of.function).parameters.items():
        if name == "form" and not isinstance(form, dict):
            return None
        if name in special:
            arguments[name] = special[name]
            used |= inputs.keys() if name == "inputs" else set()
            continue
        own = of.names.get(name)
        candidates = (own,) if own else (name, *_SAME.get(name, ()))
        given = next((each for each in candidates if each in inputs and each not in used), None)
        if given is not None:
            if parameter.annotation in (int, float) and not isinstance(inputs[given], (int, float)):
                return None  # a text, which arithmetic would repeat or join
            arguments[name] = inputs[given]
            used.add(given)
        elif parameter.default is inspect.Parameter.empty:
            return None
    return arguments, used
