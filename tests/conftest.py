"""Sixteen emulated devices, and numerics that pass over nothing: no implicit promotion of dtypes or ranks."""

import gc
import os

# Compiling is most of the suite's time, and speed is not what it measures. The older emitters of fusions compile two
# to four times as fast; versions that lack them pass over the option.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects and few cycles.
gc.freeze()
gc.set_threshold(100_000, 20, 20)
