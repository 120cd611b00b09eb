"""Kernels on arrays sharded over trials, batch and heads: same numbers, no gathers.

In a process of its own, for this machine's processor must pretend to be four devices.
"""

import contextlib
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from headcount import attention
from headcount.attention import dropout, masks, reference
from headcount.attention.kernels import partition, tpu
from tests.processes import ROOT, with_devices

CASES = [
    (axis_type, num_kv_heads, trials)
    for axis_type in ("Auto", "Explicit")
    for num_kv_heads, trials in ((4, 0), (2, 0), (1, 0), (2, 2))
]


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.test_partition"],
        env=with_devices(4),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (line.split(" ", 2) for line in done.stdout.splitlines())
    return {
        int(index): (float(difference), moved) for index, difference, moved in lines
    }


@pytest.mark.parametrize("index", range(len(CASES)))
@pytest.mark.slow
def test_sharded_kernels(index, outcomes):
    difference, moved = outcomes[index]
    assert difference < 1e-5
    # The loss is summed over the devices, as is the gradient by what they share.
    assert moved == "['all-reduce']"


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads_that_cannot_be_divided_are_told(num_kv_heads, monkeypatch):
    """Two key/value heads on four devices: gathered, and said."""
    monkeypatch.setattr(partition, "platform", lambda: "tpu")  # where names decide
    mesh = jax.sharding.AbstractMesh((4,), ("model",), (AxisType.Auto,))
    query = jax.ShapeDtypeStruct((2, 200, 8, 8), jnp.float32)
    key = jax.ShapeDtypeStruct((2, 200, num_kv_heads, 8), jnp.float32)
    call = functools.partial(
        attention.dot_product_attention, implementation="blockwise"
    )
    told = contextlib.nullcontext()
    if num_kv_heads == 2:
        words = r"2 key/value heads .* axis .*model.* of 4 devices"
        told = pytest.warns(UserWarning, match=words)
    with told, jax.sharding.use_abstract_mesh(mesh):
        assert jax.eval_shape(call, query, key, key).shape == query.shape


def test_blockwise_runs_on_a_mesh_whose_axes_nobody_knows(monkeypatch):
    """So None picks it there, for rows of several blocks too; kernels raise errors."""
    monkeypatch.setattr(partition, "platform", lambda: "tpu")  # where names decide
    mesh = jax.sharding.AbstractMesh((4,), ("fsdp",), (AxisType.Auto,))
    query = jax.ShapeDtypeStruct((4, 300, 2, 8), jnp.float32)

    def gradient(implementation):
        def loss(x):
            options = {"implementation": implementation}
            return attention.dot_product_attention(x, x, x, **options).sum()

        return jax.eval_shape(jax.grad(loss), query)

    with jax.sharding.use_abstract_mesh(mesh):
        assert gradient(None).shape == gradient("blockwise").shape == query.shape
        with pytest.raises(NotImplementedError, match="'fsdp'"):
            gradient("tpu_interpret")


def main():
    def normal(seed, *shape):
        return np.float32(np.random.default_rng(seed).normal(size=shape))

    def gradients(implementation, ids, **options):
        def loss(query, key, value, ids):
            out, lse = implementation(
                query,
                key,
                value,
                None,
                None,
                scale=0.25,
                is_causal=True,
                local_window_size=None,
                query_seq_lengths=None,
                key_value_seq_lengths=None,
                query_segment_ids=ids,
                key_value_segment_ids=ids,
                alibi_slopes=jnp.float32([0.1, 0.2, 0.3, 0.4]),
                dropout_rate=0.2,
                dropout_keys=dropout.row_keys(jnp.int32(1), 2, 40, 4),
                **options,
            )
            return (out**2).mean() + jnp.where(lse > masks.EMPTY, lse, 0).mean()

        one = jax.value_and_grad(loss, (0, 1, 2))
        return jax.jit(jax.vmap(one) if ids.ndim == 3 else one)

    for index, (axis_type, num_kv_heads, trials) in enumerate(CASES):
        names = ("trial", "data") if trials else ("data", "model")
        mesh = jax.make_mesh((2, 2), names, axis_types=(AxisType[axis_type],) * 2)
        lead = (trials,) if trials else ()
        ids = np.sort(np.random.default_rng(0).integers(0, 3, (*lead, 2, 40)))
        arrays = (
            normal(1, *lead, 2, 40, 4, 16),
            normal(2, *lead, 2, 40, num_kv_heads, 16),
            normal(3, *lead, 2, 40, num_kv_heads, 24),
            jnp.int32(ids),
        )
        want = gradients(reference.attend, arrays[3])(*arrays)
        rows = PartitionSpec("trial", "data") if trials else PartitionSpec("data")
        heads = rows if trials else PartitionSpec("data", None, "model")
        keys = heads if num_kv_heads > 1 else rows
        with jax.set_mesh(mesh):
            sharded = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(arrays, (heads, keys, keys, rows), strict=True)
            ]
            function = gradients(tpu.attend, arrays[3], interpret=True)
            compiled = function.lower(*sharded).compile()
            got, text = jax.device_get(compiled(*sharded)), compiled.as_text()
        difference = max(
            np.abs(x - y).max()
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        )
        found = re.findall(r"all-(?:gather|reduce|to-all)|collective-permute", text)
        print(index, difference, sorted(set(found)))


if __name__ == "__main__":
    main()
