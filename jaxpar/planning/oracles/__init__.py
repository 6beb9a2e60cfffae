"""Answers to published figures (see `engine`): one module of rules per group of topics."""

from collections.abc import Mapping
from typing import Any

from jaxpar.planning.oracles import (
    engine,
    feasibility,
    hardware,
    inference,
    lecture,
    links,
    memory,
    pipelines,
    runs,
    scaling_book,
    sizes,
    training,
)

RULES = tuple(
    value
    for module in (
        hardware,
        sizes,
        memory,
        feasibility,
        runs,
        training,
        links,
        scaling_book,
        pipelines,
        inference,
        lecture,
    )
    for value in vars(module).values()
    if isinstance(value, engine.Rule)
)


def answer(case: Mapping[str, Any]) -> Any:
    """The answer to a case {"topic", "inputs", "answer_form"}, or None where none is known."""
    return engine.answer(case, RULES)
