"""The reader of compiled programs against programs whose collectives are known by construction.

The programs are compiled for H100s that are not here, and for the CPU, and read whole: operation, axes, bytes
and executions of every collective, and no other. Notations that are seldom printed are given as text.
"""

import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit.hlo import UNKNOWN, Collective, read_collectives, summarize
from jaxpar.audit.hlo_text import Module
from jaxpar.audit.topology import gpu_devices

AXES = ("data", "pipe", "fsdp", "expert", "context", "tensor")
SHARDED = P(AXES)
LOCAL = 960  # elements per device; every group size here divides it


def make_mesh(devices, **sizes):
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), AXES, axis_types=(AxisType.Explicit,) * 6)


@pytest.fixture(scope="module")
def host():
    """One host of 8 H100s."""
    return make_mesh(gpu_devices("h100:1x8"), data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def cluster():
    """Three hosts, and no two axes of a size, so that no two can be taken for each other."""
    return make_mesh(gpu_devices("h100:3x8"), data=2, fsdp=3, tensor=4)


@pytest.fixture(scope="module")
def cpus():
    return make_mesh(jax.devices(), data=2, fsdp=2, tensor=2)


def compile_text(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def compile_manual(mesh, body, dtype=jnp.float32, out_specs=SHARDED):
    """The text of `body`, which runs on each device on its own LOCAL elements."""
    run = jax.shard_map(body, mesh=mesh, in_specs=SHARDED, out_specs=out_specs, check_vma=False)
    x = jax.ShapeDtypeStruct((mesh.size * LOCAL,), dtype, sharding=NamedSharding(mesh, SHARDED))
    return compile_text(run, x)


def without_trip_counts(text):
    stripped = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert stripped != text
    return stripped


def ring(axes):
    n = lax.axis_size(axes)
    return [(i, (i + 1) % n) for i in range(n)]


def once_each(x, axes):
    """One of each operation, each on the last one's result; the sines keep XLA from merging them."""
    x = jnp.sin(lax.psum(x, axes))
    x = jnp.sin(lax.all_gather(x, axes)).max(0)
    x = jnp.tile(jnp.sin(lax.psum_scatter(x, axes, tiled=True)), lax.axis_size(axes))
    x = jnp.sin(lax.all_to_all(x, axes, 0, 0, tiled=True))
    return jnp.sin(lax.ppermute(x, axes, ring(axes)))


def repeat(f, *trip_counts):
    for trip_count in trip_counts:
        f = lambda x, f=f, n=trip_count: lax.scan(lambda c, _: (f(c), None), x, None, length=n)[0]  # noqa: E731
    return f


def in_and_out_of_loops(axes):
    def body(x):
        for trip_counts in ((), (3,), (5, 2)):
            x = repeat(lambda x: once_each(x, axes), *trip_counts)(x)
        return x

    return body


def sorted_facts(collectives):
    return sorted((c.op, c.axes, c.bytes, c.count) for c in collectives)


def expected_in_and_out_of_loops(mesh, axes):
    buffer = LOCAL * 4
    whole = buffer * math.prod(mesh.shape[axis] for axis in axes)
    operations = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    sizes = {op: whole if op == "all-gather" else buffer for op in operations}
    return [(op, axes, sizes[op], count) for op in operations for count in (1, 3, 10)]


AXIS_SETS = [
    ("data",),
    ("fsdp",),
    ("tensor",),
    ("data", "fsdp"),
    ("data", "tensor"),
    ("fsdp", "tensor"),
    ("data", "fsdp", "tensor"),
]


@pytest.mark.parametrize("axes", AXIS_SETS, ids="+".join)
def test_every_operation_over_every_axis_in_and_out_of_loops(cluster, axes):
    text = compile_manual(cluster, in_and_out_of_loops(axes))
    expected = expected_in_and_out_of_loops(cluster, axes)
    assert sorted_facts(read_collectives(text, cluster.shape)) == expected


@pytest.mark.parametrize("axes", [("fsdp",), ("data", "tensor")], ids="+".join)
@pytest.mark.parametrize("where", ["host", "cpus"])
def test_a_host_and_the_cpu_backend_read_the_same(request, where, axes):
    """Within a host jax 0.12 fuses all-reduces into kernels, each in a computation of its own."""
    mesh = request.getfixturevalue(where)
    collectives = read_collectives(compile_manual(mesh, in_and_out_of_loops(axes)), mesh.shape)
    # The CPU backend sends an all-to-all's pieces as operands of their own, of the same bytes together.
    assert sorted_facts(collectives) == expected_in_and_out_of_loops(mesh, axes)


def test_a_combined_operation_is_one_with_the_sum_of_bytes(host):
    def body(x):
        halves = jnp.cos(x)[: LOCAL // 4].astype(jnp.bfloat16)
        return lax.all_gather(jnp.sin(x), "tensor", tiled=True), lax.all_gather(halves, "tensor", tiled=True)

    text = compile_manual(host, body, out_specs=P(AXES[:-1]))
    expected = [("all-gather", ("tensor",), 2 * (LOCAL * 4 + LOCAL // 4 * 2), 1)]
    assert sorted_facts(read_collectives(text, host.shape)) == expected


def test_sharded_training_step_moves_what_its_layout_says(host):
    num_layers, B, D, F = 5, 32, 64, 256
    mesh = make_mesh(host.devices.ravel(), fsdp=4, tensor=2)
    stored = {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}
    rows = "fsdp"

    def layer(x, w):
        up = jax.reshard(w["up"], P(None, "tensor", reduced={"fsdp"}))
        down = jax.reshard(w["down"], P("tensor", None, reduced={"fsdp"}))
        h = jnp.sin(jnp.einsum("bd,df->bf", x, up, out_sharding=P(rows, "tensor")))
        return jnp.sin(jnp.einsum("bf,fd->bd", h, down, out_sharding=P(rows, None))), None

    def loss(w, x):
        return jnp.sum(lax.scan(layer, x, w)[0].astype(jnp.float32))

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    w = {"up": struct((num_layers, D, F), stored["up"]), "down": struct((num_layers, F, D), stored["down"])}
    with jax.set_mesh(mesh):
        text = compile_text(jax.grad(loss), w, struct((B, D), P(rows, None)))
    totals = summarize(read_collectives(text, mesh.shape))
    weights = num_layers * (2 * D * F) * 2 // 2  # bytes in bf16; each tensor rank has its half
    activations = 2 * num_layers * (B // 4 * D) * 2  # each layer sums its output, and its input's gradient
    assert set(totals) == {"fsdp", "tensor"}
    assert {op: total["bytes"] for op, total in totals["fsdp"].items()} == {
        "all-gather": weights,
        "reduce-scatter": weights,
    }
    assert totals["tensor"] == {"all-reduce": {"count": 2 * num_layers, "bytes": activations}}


def test_each_branch_of_a_conditional_counts_once(host):
    def branches(x):
        def sines(x):
            return lax.psum(jnp.sin(x), "tensor")

        def cosines(x):
            return lax.psum(jnp.cos(x), "data")

        return lax.switch(jnp.sum(x > 0), [sines, cosines, jnp.tan], x)

    collectives = read_collectives(compile_manual(host, repeat(branches, 3)), host.shape)
    assert sorted_facts(collectives) == [
        ("all-reduce", ("data",), LOCAL * 4, 3),
        ("all-reduce", ("tensor",), LOCAL * 4, 3),
    ]


def test_a_named_conditional_counts_as_often_as_it_is_taken(host):
    def twice_in_six(x):
        def sines(x):
            # Whatever else is in the branch has a scope of its own.
            return lax.cond(jnp.sum(x) > 1, lambda x: lax.psum(jnp.sin(x), "tensor"), lambda x: x, x)

        with jax.named_scope("seldom"):
            return lax.cond(jnp.sum(x) > 0, lambda x: x, repeat(sines, 5), x)

    text = compile_manual(host, repeat(twice_in_six, 6))
    for taken, count in (None, 30), ({"often": Fraction(1, 2)}, 30), ({"seldom": Fraction(1, 3)}, 10):
        collectives = read_collectives(text, host.shape, taken)
        assert sorted_facts(collectives) == [("all-reduce", ("tensor",), LOCAL * 4, count)]
    with pytest.raises(ValueError, match="would run 15/2 times; state how often"):
        read_collectives(text, host.shape, {"seldom": Fraction(1, 4)})


@pytest.mark.parametrize("where", ["host", "cpus"])
@pytest.mark.parametrize(("start", "limit", "step"), [(0, 7, 1), (2, 12, 3), (-4, 4, 2)])
def test_trip_count_that_xla_does_not_state_is_derived(request, where, start, limit, step):
    mesh = request.getfixturevalue(where)

    def body(x):
        def proceed(state):
            return state[0] + step, lax.psum(jnp.sin(state[1]), "fsdp")

        return lax.while_loop(lambda state: state[0] < limit, proceed, (jnp.int32(start), x))[1]

    text = without_trip_counts(compile_manual(mesh, body))
    expected = [("all-reduce", ("fsdp",), LOCAL * 4, len(range(start, limit, step)))]
    assert sorted_facts(read_collectives(text, mesh.shape)) == expected


def until_large(f, x):
    return lax.while_loop(lambda x: x[0] < 1, f, x)


def from_data_to_seven(f, x):
    return lax.fori_loop(x[0].astype(jnp.int32), 7, lambda _, x: f(x), x)


@pytest.mark.parametrize("where", ["host", "cpus"])
@pytest.mark.parametrize("loop", [until_large, from_data_to_seven])
def test_trip_count_that_nobody_states_is_an_error_where_collectives_run(request, where, loop):
    mesh = request.getfixturevalue(where)
    text = compile_manual(mesh, lambda x: loop(lambda x: lax.psum(jnp.sin(x), "fsdp"), x))
    with pytest.raises(ValueError, match=r"loop %while\S* \(.*while\) holds .* no static trip count"):
        read_collectives(text, mesh.shape)
    text = compile_manual(mesh, lambda x: lax.psum(loop(jnp.sin, x), "fsdp"))
    assert sorted_facts(read_collectives(text, mesh.shape)) == [("all-reduce", ("fsdp",), LOCAL * 4, 1)]


# Text. XLA's own parser takes the notations of groups below, and its CPU backend, given powers of two to
# all-reduce, sums over these very groups (only device_ids, which it drops, could not be held against it).


def module(body, num_devices=8, before=""):
    return (
        f"HloModule m, is_scheduled=true, num_partitions={num_devices}\n\n"
        "%sum (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %c = f32[] add(%a, %b)\n}\n\n"
        f"{before}\nENTRY %main (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n{body}\n}}\n"
    )


def all_reduce(groups, num_devices=8):
    line = f"  ROOT %r = f32[64]{{0}} all-reduce(%p), channel_id=1, {groups}, use_global_device_ids=true, "
    return module(line + 'to_apply=%sum, metadata={op_name="jit(f)/psum"}', num_devices)


X2Y2Z2 = {"x": 2, "y": 2, "z": 2}
X2Y3Z4 = {"x": 2, "y": 3, "z": 4}


@pytest.mark.parametrize(
    ("groups", "mesh", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", X2Y2Z2, ("z",)),
        ("{{3,1},{2,0},{4,6},{5,7}}", X2Y2Z2, ("y",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", X2Y2Z2, ("x",)),
        ("{{0,1,4,5},{2,3,6,7}}", X2Y2Z2, ("x", "z")),
        ("{{0,1,2,3,4,5,6,7}}", X2Y2Z2, ("x", "y", "z")),
        ("{}", X2Y2Z2, ("x", "y", "z")),
        ("{{0,1,2,3},{4,5,6,7}}", {"data": 2, "pipe": 1, "fsdp": 4}, ("fsdp",)),
        ("[4,2]<=[8]", X2Y2Z2, ("z",)),
        ("[1,8]<=[8]", X2Y2Z2, ("x", "y", "z")),
        ("[4,2]<=[4,2]T(1,0)", X2Y2Z2, ("y",)),
        ("[4,2]<=[2,4]T(1,0)", X2Y2Z2, ("x",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", X2Y2Z2, ("x", "z")),
        ("[8,3]<=[2,3,4]T(0,2,1)", X2Y3Z4, ("y",)),
        ("[4,6]<=[6,4]T(1,0)", X2Y3Z4, ("x", "y")),
        ("mesh['axis_0'=4,'axis_1'=2,'axis_2'=1] {'axis_1'}", X2Y2Z2, ("z",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", X2Y2Z2, ("x", "y")),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2}", X2Y2Z2, ("x",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", X2Y2Z2, ("y",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2,'axis_1'}", X2Y2Z2, ("x", "z")),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", X2Y2Z2, ("x", "z")),
        ("mesh['a'=24] {'a':(2)3}", X2Y3Z4, ("y",)),
        ("mesh['data'=2,'pipe'=1,'fsdp'=3,'tensor'=4] {'fsdp','tensor'}", X2Y3Z4, ("y", "z")),
        ("mesh['data'=2,'pipe'=1,'fsdp'=3,'tensor'=4] {'tensor','data'}", X2Y3Z4, ("x", "z")),
        ("mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'b'}", X2Y2Z2, ("y",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", X2Y2Z2, ("x",)),
        ("{{0,1},{2,3},{4,5}}", X2Y2Z2, UNKNOWN),  # not every device
        ("{{0,1},{2,3,4,5,6,7}}", X2Y2Z2, UNKNOWN),  # not of one size
        ("{{0,3},{1,2},{4,7},{5,6}}", X2Y2Z2, UNKNOWN),  # diagonals
        ("{{0,4},{1,5},{2,3},{6,7}}", X2Y2Z2, UNKNOWN),  # along one axis here, along another there
        ("[4,2]<=[8]", {"x": 2, "y": 4}, ("y",)),  # a part of an axis
    ],
)
def test_groups_in_every_notation(groups, mesh, axes):
    text = all_reduce(f"replica_groups={groups}", math.prod(mesh.values()))
    expected = Collective("all-reduce", axes, bytes=256, count=1, computation="main", op_name="jit(f)/psum")
    assert read_collectives(text, mesh) == [expected]


@pytest.mark.parametrize("groups", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]", "mesh['a'=8,'b'=1] {'b'}"])
def test_groups_of_one_device_do_not_communicate(groups):
    assert read_collectives(all_reduce(f"replica_groups={groups}"), X2Y2Z2) == []


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", ("z",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("y",)),  # one way: the last stage sends nothing
        ("{{0,4},{4,0}}", ("x",)),
        ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("x", "y")),  # a ring through both
        ("{{0,0},{1,1}}", None),
        ("{}", None),
    ],
)
def test_a_permute_is_over_the_axes_its_pairs_cross(pairs, axes):
    line = f"  ROOT %r = f32[64]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
    expected = [("collective-permute", axes, 256, 1)] if axes else []
    assert sorted_facts(read_collectives(module(line), X2Y2Z2)) == expected


BYTES_OF_TEN = {
    "f64": 80,
    "f32": 40,
    "bf16": 20,
    "f16": 20,
    "f8e4m3fn": 10,
    "f8e5m2": 10,
    "f8e8m0fnu": 10,
    "f4e2m1fn": 5,
} | {"s64": 80, "u32": 40, "s16": 20, "u8": 10, "s4": 5, "u2": 3, "u1": 2, "pred": 10, "c64": 80, "c128": 160}


@pytest.mark.parametrize(("dtype", "num_bytes"), BYTES_OF_TEN.items())
def test_bytes_of_every_dtype(dtype, num_bytes):
    array = f"{dtype}[2,<=5]{{1,0:T(8,128)(2,1)S(1)}}"
    reduce = f"  ROOT %r = {array} all-reduce(%x, %t), replica_groups={{}}, to_apply=%sum"
    body = f"  %x = {array} custom-call()\n  %t = token[] after-all()\n{reduce}"
    assert [c.bytes for c in read_collectives(module(body), X2Y2Z2)] == [num_bytes]


CALLED = """\
%gather (q: f32[64]) -> f32[128] {
  %q = f32[64]{0} parameter(0)
  ROOT %g = f32[128]{0} all-gather(%q), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
}

%ask (o: f32[64]) -> pred[] {
  %o = f32[64]{0} parameter(0)
  %v = f32[128]{0} call(%o), to_apply=%gather
  ROOT %e = pred[] custom-call(%v)
}

%step (i: f32[64]) -> f32[64] {
  ROOT %i = f32[64]{0} parameter(0)
}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # The first half of a pair, in the forms that its type has been printed in.
        ("(f32[64], f32[128]) all-gather-start(%p), replica_groups=[4,2]<=[8]", ("all-gather", 512, 1)),
        ("((f32[64]), f32[128]) all-gather-start(%p), replica_groups=[4,2]<=[8]", ("all-gather", 512, 1)),
        ("f32[64] all-reduce-start(%p), replica_groups=[4,2]<=[8], to_apply=%sum", ("all-reduce", 256, 1)),
        (
            "(f32[64], f32[64], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", 256, 1),
        ),
        # The second half, and that of a wrapper, which names the computation again.
        ("f32[128] all-gather-done(%p)", None),
        ("((f32[64]), f32[128], s32[]) async-start(%p), calls=%gather", ("all-gather", 512, 1)),
        ("((f32[64]), f32[128], s32[]) async-update(%p), calls=%gather", None),
        ("f32[128] async-done(%p), calls=%gather", None),
        # One computation, run from two places.
        (
            "f32[128] fusion(%p), kind=kCustom, calls=%gather\n  %t = f32[128] call(%p), to_apply=%gather",
            ("all-gather", 512, 2),
        ),
        # A loop's condition runs once more than its body.
        (
            'f32[64] while(%p), condition=%ask, body=%step, backend_config={"known_trip_count":{"n":"6"}}',
            ("all-gather", 512, 7),
        ),
        # Operands printed with their types, some tuples, some tiled; a string that looks like a call.
        (
            '(f32[64], s8[3]) custom-call(f32[64]{0:T(8,128)} %p), metadata={op_name="calls=%x"}\n'
            "  %r = (f32[64], s8[3]) all-reduce((f32[64]{0:T(8)}, s8[3]) %s, /*index=1*/f32[64] %p), "
            "replica_groups=[4,2]<=[8], to_apply=%sum",
            ("all-reduce", 256 + 3 + 256, 1),
        ),
        # Only the first operand is data.
        (
            "(f32[999], s64[2]) custom-call()\n  %r = f32[999] ragged-all-to-all(%p, %s, %s, %s, %s, "
            "/*index=5*/%s), replica_groups=[4,2]<=[8]",
            ("ragged-all-to-all", 256, 1),
        ),
    ],
)
def test_forms_that_collectives_are_printed_in(body, expected):
    collectives = read_collectives(module(f"  %s = {body}", before=CALLED), X2Y2Z2)
    assert [(c.op, c.bytes, c.count) for c in collectives] == ([expected] if expected else [])
    assert all(c.axes == ("z",) for c in collectives)


CHAINED = """\
%begin (q: f32[64]) -> (f32[64], f32[128]) {
  %q = f32[64]{0} parameter(0)
  %g = f32[128]{0} all-gather(%q), channel_id=3, GROUPS, frontend_attributes={chain_id="0"}
  ROOT %s = (f32[64]{0}, f32[128]{0}) custom-call(%q, %g), custom_call_target="AsyncCollectiveStart"
}

%beside (q: f32[64], a: f32[8,8]) -> f32[8,8] {
  %q = f32[64]{0} parameter(0)
  %a = f32[8,8]{1,0} parameter(1)
  %g = f32[128]{0} all-gather(%q), channel_id=3, GROUPS, frontend_attributes={chain_id="0"}
  ROOT %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%end (q: f32[64]) -> f32[128] {
  %q = f32[64]{0} parameter(0)
  %g = f32[128]{0} all-gather(%q), channel_id=3, GROUPS, frontend_attributes={chain_id="0"}
  ROOT %e = f32[128]{0} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}

%scatter (q: f32[64]) -> f32[36] {
  %q = f32[64]{0} parameter(0)
  %i = s32[] constant(0)
  %z = f32[] constant(0)
  %w = f32[72]{0} pad(%q, %z), padding=0_8
  %r = f32[72]{0} all-reduce(%w), channel_id=4, GROUPS, to_apply=%sum
  ROOT %o = f32[36]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={36}
}
""".replace("GROUPS", "replica_groups=[4,2]<=[8]")


def test_what_tpus_fuse_collectives_with():
    """Steps of a gather beside a matmul are one gather; a reduction of which each keeps a slice is a reduce-scatter,
    of what was padded for it."""
    body = (
        "  %a = f32[8,8]{1,0} constant(0)\n"
        "  %s = (f32[64]{0}, f32[128]{0}) fusion(%p), kind=kCustom, calls=%begin\n"
        "  %m = f32[8,8]{1,0} fusion(%p, %a), kind=kOutput, calls=%beside\n"
        "  %e = f32[128]{0} fusion(%p), kind=kCustom, calls=%end\n"
        "  %o = f32[36]{0} fusion(%p), kind=kCustom, calls=%scatter"
    )
    found = read_collectives(module(body, before=CHAINED), X2Y2Z2)
    assert [(c.op, c.bytes, c.count, c.beside) for c in found] == [
        ("all-gather", 512, 1, "m"),
        ("reduce-scatter", 256, 1, ""),
    ]
    # In a loop whose trips depend on data there may be further steps, and no start.
    parsed = Module.parse(module(body, before=CHAINED))
    assert [parsed.computations[name].communicates for name in ("begin", "beside", "end", "scatter")] == [
        *(True, False, False, True)
    ]


@pytest.mark.parametrize(
    ("between", "beside"),
    [
        ("", ""),
        ("  %c = f32[64]{0} copy(%p)\n", ""),
        ("  %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n", "d"),
    ],
)
def test_what_runs_between_start_and_end(between, beside):
    body = (
        "  %a = f32[8,8]{1,0} constant(0)\n"
        "  %g = (f32[64], f32[128]) all-gather-start(%p), replica_groups=[4,2]<=[8]\n"
        f"{between}  %h = f32[128] all-gather-done(%g)\n"
        "  %z = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    assert [c.beside for c in read_collectives(module(body), X2Y2Z2)] == [beside]


def test_summary_adds_executions_up_by_axes_and_operation():
    def collective(op, axes, bytes_, count):
        return Collective(op, axes, bytes_, count, computation="main", op_name="")

    assert summarize(
        [
            collective("all-gather", ("fsdp",), 10, 3),
            collective("all-gather", ("fsdp",), 7, 1),
            collective("reduce-scatter", ("fsdp",), 5, 2),
            collective("all-reduce", ("data", "fsdp"), 4, 1),
        ]
    ) == {
        "fsdp": {"all-gather": {"count": 4, "bytes": 37}, "reduce-scatter": {"count": 2, "bytes": 10}},
        "data+fsdp": {"all-reduce": {"count": 1, "bytes": 4}},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (all_reduce("replica_groups={}", 16), "compiled for 16 devices, but mesh .* has 8; pass the sizes"),
        (all_reduce("replica_groups=<new>"), "%r groups devices in an unknown notation, .*<new>"),
        ("module @jit_f {\n}\n", "no ENTRY computation; pass the HLO"),
    ],
)
def test_text_that_cannot_be_read_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        read_collectives(text, X2Y2Z2)


# Topologies.


@pytest.mark.parametrize("chip", ["a100", "h100", "h200", "b200"])
def test_every_chip_compiles(chip):
    mesh = make_mesh(gpu_devices(f"{chip}:2x2"), data=2, tensor=2)
    assert {device.device_kind.split()[1].split("-")[0].lower() for device in mesh.devices.flat} == {chip}
    assert [device.process_index for device in mesh.devices.flat] == [0, 0, 1, 1]
    text = compile_manual(mesh, lambda x: lax.psum(jnp.sin(x), "tensor"))
    assert sorted_facts(read_collectives(text, mesh.shape)) == [("all-reduce", ("tensor",), LOCAL * 4, 1)]
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("h100x:1x8", "chip 'h100x' .* is none of a100, b200, h100, h200, v4.*; did you mean 'h100'"),
        ("tpu:1x8", "chip 'tpu' .* is none of a100, b200, h100, h200"),
        ("h100", "topology 'h100' is not CHIP:HOSTSxGPUS; write it like h100:2x8"),
        ("h100:8", "is not CHIP:HOSTSxGPUS"),
        ("h100:1x2x8", "is not CHIP:HOSTSxGPUS"),
        ("h100:0x8", "is not CHIP:HOSTSxGPUS"),
        ("h100:-1x8", "is not CHIP:HOSTSxGPUS"),
        ("../h100:1x8", "is not CHIP:SHAPE"),
    ],
)
def test_topology_that_does_not_exist_is_an_error(topology, message):
    with pytest.raises(ValueError, match=message):
        gpu_devices(topology)


@pytest.mark.parametrize("version", [None, "0.1.0"])
def test_cuda_plugin_missing_or_of_another_version_is_an_error(tmp_path, version):
    """In an installation that links to this one's packages, and has no plugin or another version's."""
    installed = Path(jax.__file__).parents[1]
    for entry in installed.iterdir():
        if not entry.name.startswith(("jax_cuda", "jax_plugins")):
            (tmp_path / entry.name).symlink_to(entry)
    if version:
        metadata = tmp_path / f"jax_cuda12_pjrt-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: jax-cuda12-pjrt\nVersion: {version}\n")
    path = os.pathsep.join((str(Path(__file__).parents[1]), str(tmp_path)))
    script = "from jaxpar.audit.topology import gpu_devices\ngpu_devices('h100:1x8')\n"
    result = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    found = f"jax-cuda12-pjrt {version}" if version else "none"
    assert result.stderr.rstrip().splitlines()[-1] == (
        f"ValueError: compiling for GPUs needs jax's CUDA plugin in version {jaxlib.__version__}, like "
        f'jaxlib, but {found} is installed; run pip install "jaxpar[compile]"'
    )
