"""What attention is tested on: features, shapes, tolerances, and the table of support.

`python -m tests.attention_cases` prints the table of docs/reference/attention.md.
"""

import functools
import importlib
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount import attention
from headcount.attention import masks
from headcount.attention.kernels import cpu_build

# The largest difference from the reference in float32 at HIGHEST precision, relative to
# the reference's largest value or 1. bfloat16 has 8 bits of precision, float16 has 11;
# both round the weights before they meet the values.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}

needs_kernels = pytest.mark.skipif(
    cpu_build.unavailable() is not None, reason=f"no kernels: {cpu_build.unavailable()}"
)
CPU = pytest.param("cpu", marks=needs_kernels)

# B, T, S, N, K, H, V. Odd, unequal, and of a single token.
SHAPES = {
    "heads": (2, 13, 13, 4, 4, 16, 16),
    "groups": (2, 11, 17, 4, 2, 16, 16),
    "one key head": (2, 19, 7, 3, 1, 8, 8),
    "V > H": (2, 12, 15, 4, 2, 8, 24),
    "V < H": (1, 9, 21, 2, 2, 48, 5),
    "one query": (2, 1, 14, 4, 2, 16, 16),
    "one key": (2, 14, 1, 2, 2, 16, 16),
}


def normal(rng, *shape):
    return jax.device_put(np.float32(rng.normal(size=shape)))


def allowed(rng, *shape):
    return jnp.asarray(rng.random(shape) < 0.6)


def ids(rng, B, size):
    """Segments in order, of any length; padding at the end, or a row of it alone."""
    ids = np.sort(rng.integers(1, 4, (B, size)), 1)
    ids[:, size - size // 5 :] = 0
    return jnp.asarray(ids, jnp.int32)


def unordered_ids(rng, B, size):
    return jnp.asarray(rng.integers(0, 3, (B, size)), jnp.int32)


def lengths(rng, B, size):
    return jnp.asarray(rng.integers(0, size + 1, B), jnp.int32).at[0].set(size)


def pair(make):
    """The arguments of both sequences, by name."""
    kind = "segment_ids" if make in (ids, unordered_ids) else "seq_lengths"
    return lambda rng, B, T, S, N: {
        f"query_{kind}": make(rng, B, T),
        f"key_value_{kind}": make(rng, B, S),
    }


def a_map(name, make, letters):
    """A mask or bias with these axes, the others broadcast."""

    def arguments(rng, B, T, S, N):
        sizes = zip("BNTS", (B, N, T, S), strict=True)
        return {name: make(rng, *(n if x in letters else 1 for x, n in sizes))}

    return arguments


def fixed(**arguments):
    return lambda *_: arguments


# Feature: a shape, and the arguments that ask for it.
FEATURES = {
    "nothing": ("heads", fixed()),
    "K < N": ("groups", fixed()),
    "K = 1": ("one key head", fixed(scale=0.3)),
    "V > H": ("V > H", fixed()),
    "V < H": ("V < H", fixed(is_causal=True)),
    "one query": ("one query", fixed(is_causal=True)),
    "one key": ("one key", fixed()),
    "causal": ("groups", fixed(is_causal=True)),
    "window": ("groups", fixed(local_window_size=(3, 2))),
    "causal window": ("heads", fixed(local_window_size=4, is_causal=True)),
    "lengths": ("groups", pair(lengths)),
    "segments": ("groups", pair(ids)),
    "unordered segments": ("one key head", pair(unordered_ids)),
    "mask of B N T S": ("groups", a_map("mask", allowed, "BNTS")),
    "mask of B S": ("one key head", a_map("mask", allowed, "BS")),
    "mask of N T": ("groups", a_map("mask", allowed, "NT")),
    "bias of B N T S": ("groups", a_map("bias", normal, "BNTS")),
    "bias of N T S": ("groups", a_map("bias", normal, "NTS")),
    "bias of B T": ("one key head", a_map("bias", normal, "BT")),
    "alibi_slopes": (
        "groups",
        lambda rng, B, T, S, N: {
            **pair(ids)(rng, B, T, S, N),
            "alibi_slopes": jnp.abs(normal(rng, N)),
        },
    ),
    "dropout": ("groups", fixed(dropout_rate=0.3, dropout_seed=7, is_causal=True)),
    "dropout of segments": (
        "one key head",
        lambda *sizes: {
            **pair(unordered_ids)(*sizes),
            "dropout_rate": 0.1,
            "dropout_seed": jnp.uint32(2**32 - 5),
        },
    ),
    "head_gate": ("groups", lambda rng, B, T, S, N: {"head_gate": normal(rng, B, N)}),
    "sink": ("one key head", lambda rng, B, T, S, N: {"sink": normal(rng, N)}),
    "sink of B N": (
        "groups",
        lambda rng, *sizes: {
            **pair(unordered_ids)(rng, *sizes),
            "sink": 2 * normal(rng, sizes[0], sizes[-1]),
        },
    ),
    "everything": (
        "groups",
        lambda *sizes: {
            **pair(ids)(*sizes),
            **pair(lengths)(*sizes),
            **a_map("mask", allowed, "BTS")(*sizes),
            "is_causal": True,
            "local_window_size": (9, 9),
        },
    ),
}
# What reaches kernels: `attention.api` multiplies by gates and adds sinks itself.
KERNEL_FEATURES = [f for f in FEATURES if f not in ("head_gate", "sink", "sink of B N")]


def make(feature, dtype=jnp.float32, shape=None):
    """Inputs (query, key, value) and arguments of a feature, the same at every call."""
    name, arguments = FEATURES[feature]
    rng = np.random.default_rng(sum(map(ord, feature)))
    B, T, S, N, K, H, V = shape or SHAPES[name]
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, V))
    inputs = tuple(normal(rng, *size).astype(dtype) for size in sizes)
    return inputs, arguments(rng, B, T, S, N)


def differentiate(implementation, inputs, arguments, residual=True, statistics=False):
    """Output, log-sum-exp, and the gradients of a number made of both, by name.

    And the statistics of the same pass.
    """
    rng = np.random.default_rng(0)
    out_shape = (*inputs[0].shape[:3], inputs[2].shape[-1])
    out_weight, lse_weight = normal(rng, *out_shape), normal(rng, *out_shape[:3])
    differentiable = dict(zip(("query", "key", "value"), inputs, strict=True))
    constant = dict(arguments)
    for name in ("bias", "head_gate", "sink"):
        if name in constant:
            differentiable[name] = constant.pop(name)

    def loss(differentiable):
        out, lse, *rest = attention.dot_product_attention(
            **differentiable,
            **constant,
            implementation=implementation,
            return_residual=True,
            return_statistics=statistics,
        )
        total = (out.astype(jnp.float32) * out_weight).sum()
        # Rows that see nothing have no log-sum-exp to weigh.
        seen = lse > 0.5 * masks.EMPTY
        if residual:
            total += jnp.where(seen, lse * lse_weight, 0).sum()
        found = rest[0]._asdict() if statistics else {}
        return total, found | {"out": out, "lse": lse}

    gradients, outcomes = jax.grad(loss, has_aux=True)(differentiable)
    return outcomes | {f"gradient of {name}": x for name, x in gradients.items()}


def statistics(implementation, inputs, arguments):
    """The statistics of a feature, by name."""
    told = arguments.keys() - {"head_gate", "sink", "dropout_rate", "dropout_seed"}
    arguments = {name: arguments[name] for name in told}
    return attention.head_statistics(
        *inputs[:2], implementation=implementation, **arguments
    )._asdict()


def everything(implementation, inputs, arguments, residual=True):
    """Values, gradients and statistics, compiled as one quickly rather than well."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(inputs):
        told = implementation != "xla"  # which has no statistics
        return differentiate(implementation, inputs, arguments, residual, told)

    return run(inputs)


@functools.cache
def expected(feature):
    """What the reference gives for a feature in float32."""
    return everything("reference", *make(feature))


def check(got, want, dtype=jnp.float32):
    """Every outcome within the table's tolerance, and never NaN."""
    for name in got:
        x, y = (np.asarray(z[name], np.float64) for z in (got, want))
        # Beside the log-sum-exp of a row that sees nothing all others would count 0.
        empty = y < 0.5 * masks.EMPTY
        np.testing.assert_array_equal(x < 0.5 * masks.EMPTY, empty, err_msg=name)
        x, y = np.where(empty, 0, x), np.where(empty, 0, y)
        difference = np.abs(x - y).max() / max(1, np.abs(y).max())
        assert difference <= TOLERANCE[jnp.dtype(dtype).name], (name, difference)


COLUMNS = {
    "reference": "reference",
    "blockwise": "blockwise",
    "cpu": "cpu",
    "gpu": "gpu_interpret",
    "tpu": "tpu_interpret",
    "xla": "xla",
}
ROWS = {
    "T = S = 8192": lambda *_: ("nothing", {"shape": (1, 8192, 8192, 2, 2, 64, 64)}),
    "H = V = 256": lambda *_: ("nothing", {"shape": (1, 16, 16, 2, 2, 256, 256)}),
}


def takes(implementation, dtype):
    """Whether it takes a dtype: kernels for accelerators say so, and run elsewhere."""
    if implementation in ("gpu_interpret", "tpu_interpret"):
        kernel = importlib.import_module(attention.IMPLEMENTATIONS[implementation][0])
        x = jax.ShapeDtypeStruct((1, 8, 2, 16), dtype)
        return "–" if kernel.unsupported(x, x, None, None) else "yes"
    return supports(
        implementation,
        functools.partial(differentiate, residual=False),
        *make("nothing", dtype),
    )


def supports(implementation, function, *arguments):
    """Whether it traces: a dash where it refuses."""
    call = functools.partial(function, implementation, arguments=arguments[1])
    try:
        with mock.patch(
            "headcount.attention.kernels.gpu.THREADS", 0
        ):  # nothing will run
            jax.eval_shape(lambda inputs: call(inputs=inputs), arguments[0])
    except NotImplementedError:
        return "–"
    return "yes"


def table() -> str:
    """What each implementation supports, as Markdown."""
    lines = [
        "| | " + " | ".join(COLUMNS) + " |",
        "| --- |" + " :---: |" * len(COLUMNS),
    ]
    values = functools.partial(differentiate, residual=False)
    rows = [(feature, values, make(feature)) for feature in FEATURES]
    rows += [(name, values, make(row()[0], **row()[1])) for name, row in ROWS.items()]
    rows += [
        ("gradient of the residual", differentiate, make("nothing")),
        ("statistics", statistics, make("segments")),
    ]
    for name, function, arguments in rows:
        cells = [supports(column, function, *arguments) for column in COLUMNS.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for dtype in ("float32", "bfloat16", "float16"):
        cells = [takes(column, jnp.dtype(dtype)) for column in COLUMNS.values()]
        lines.append(f"| {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reference" / "attention.md"

if __name__ == "__main__":
    print(table())
