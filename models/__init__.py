"""What is computed: Transformers that know logical axis names and no mesh.

The description (`ModelConfig`, presets, counts) is plain arithmetic; `models.transformer` is the Flax module.
"""

from models.config import ModelConfig

__all__ = ["ModelConfig"]
