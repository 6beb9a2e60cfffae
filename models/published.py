"""Sizes of published models, by name: those of `presets` and others that are known for planning alone."""

import difflib
import re

from models.presets import preset, preset_names
from models.published_shapes import SHAPES
from models.shapes import Shape

_BY_NAME = {known.name: known for known in SHAPES} | {name: Shape.of(preset(name)) for name in preset_names()}
_OTHER_NAMES = {
    "bloom": "bloom-176b",
    "gpt3": "gpt3-175b",
    "gpt2-small": "gpt2",
    "gpt2-124m": "gpt2",
    "gpt2-1.5b": "gpt2-xl",
    "gpt-neox": "gpt-neox-20b",
    "gpt-j": "gpt-j-6b",
    "mistral-7b-v0.1": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "smollm3": "smollm3-3b",
    "smollm2-135m": "smollm-135m",
    "smollm2-360m": "smollm-360m",
    "smollm2-1.7b": "smollm-1.7b",
    "codellama-34b": "llama2-34b",
    "llama-30b": "llama-33b",
    "llama1-7b": "llama-7b",
    "llama1-13b": "llama-13b",
    "llama1-33b": "llama-33b",
    "llama1-65b": "llama-65b",
    "llama4-scout-17b-16e": "llama4-scout",
    "llama4-17b-16e": "llama4-scout",
    "llama4-maverick-17b-128e": "llama4-maverick",
    "llama4-17b-128e": "llama4-maverick",
    "deepseek2-16b": "deepseek-v2-lite",
    "deepseek-v2-16b": "deepseek-v2-lite",
    "deepseek2-236b": "deepseek-v2",
    "deepseek3-671b": "deepseek-v3",
    "deepseek3.2-671b": "deepseek-v3",
    "deepseek-v3-671b": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "kimi-k2-1t": "kimi-k2",
    "chinchilla": "chinchilla-70b",
    "gopher": "gopher-280b",
    "palm": "palm-540b",
    "mt-nlg": "mt-nlg-530b",
    "starcoder": "starcoder-15b",
    "bloomberggpt": "bloomberggpt-50b",
    "grok1": "grok-1",
    "1t": "megatron-1t",
}


def shape_names() -> list[str]:
    """The names that `shape` knows."""
    return list(_BY_NAME)


def shape(name: str) -> Shape:
    """The published model of this name; organisation, case and separators do not matter, nor "base" or "hf" at the end.

    Raises:
      ValueError: no such model; names the nearest.
    """
    by_key = {_key(known): known for known in _BY_NAME} | {_key(other): known for other, known in _OTHER_NAMES.items()}
    key = _key(name)
    if key in by_key:
        return _BY_NAME[by_key[key]]
    nearest = [by_key[near] for near in difflib.get_close_matches(key, by_key)]
    raise ValueError(f"no model is called {name!r}; nearest: {', '.join(dict.fromkeys(nearest or preset_names()))}")


def _key(name: str) -> str:
    key = re.sub(r"[-_\s]", "", name.rsplit("/", 1)[-1].lower()).removeprefix("meta")
    return re.sub(r"(base|hf|instruct)$", "", key)
