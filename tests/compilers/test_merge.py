"""Merge rules and whole models through the compilers for TPUs and an H200."""

import jax.numpy as jnp
import pytest

from benchmarks.merge import programs
from headcount.runtime import topology as targets
from headcount.runtime.topology import compile_for

SIZE = 8, 128, 256, 8  # B, T, D, N
TARGETS = ("v5e:2x2", "h200:1")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rule", ["dynamic", "mixture", "shared_mixture"])
def test_rules_that_are_more_than_a_product_compile(rule, target):
    function, arguments = programs(rule, *SIZE, jnp.bfloat16)[0]["merge + backward"]
    compile_for(targets.devices(target), function, *arguments)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rule", ["concat", "mixture"])
def test_a_layer_compiles_with_the_fused_kernel(rule, target):
    function, arguments = programs(rule, *SIZE, jnp.bfloat16)[0]["layer + backward"]
    program = compile_for(targets.devices(target), function, *arguments)
    assert ("tpu_custom_call" if target[0] == "v" else "mosaic_gpu") in (
        program.as_text()
    )


def test_averaging_reads_a_kernel_of_one_head():
    device = targets.devices("v5e:2x2")
    moved = {}
    for rule in ("concat", "mean", "weighted"):
        function, arguments = programs(rule, *SIZE)[0]["merge"]
        costs = compile_for(device, function, *arguments).cost_analysis()
        moved[rule] = costs["bytes accessed"]
    # no copy of the heads' outputs beyond the one that it is given
    heads = 4 * 8 * 128 * 256
    assert max(moved["mean"], moved["weighted"]) < heads * 2.5 < moved["concat"]


@pytest.mark.parametrize("target", ["v5e", "v5e:", "h300:1", "v5e:2y2"])
def test_an_unknown_target_is_named(target):
    with pytest.raises(ValueError, match=f"There is no target '{target}'"):
        targets.devices(target)
