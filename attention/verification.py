"""Compare a fused kernel with `reference` on this device before it is first picked.

The accelerator kernels were developed without an accelerator; only the GPU's has run on
one, an H200. Wrong results on other hardware or with another compiler could go
unnoticed. So `resolve_implementation` calls `is_accepted`, which runs small problems
once per device kind, jaxlib version and kernel source, and caches the verdict in the
user's cache folder. `python -m headcount.attention` prints the verdicts.

With $HEADCOUNT_VERIFY=0 the problems are not run, and a kernel without a cached verdict
is not picked.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from headcount.attention import dropout, masks, reference

# Largest allowed error, relative to the largest number of the reference's result. As in
# the tests of compilers and simulation; 16-bit tolerances allow for rounded products.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
SLOWER = 1.0  # relative time above which a kernel is not picked
LONG = (4, 2048, 8, 64)  # B, T, N, H of the timed problem
_verdicts: dict[tuple, "Verdict"] = {}
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of verifying a kernel on a device."""

    implementation: str
    dtype: str
    device: str  # device kind
    error: float | None  # largest relative error; None if the kernel did not run
    relative_time: float | None  # to blockwise, forward and backward; None if not timed
    reason: str | None  # why the kernel is rejected; None if accepted


def is_accepted(implementation: str, dtype: str) -> bool:
    """Return whether a kernel agrees with `reference` here and isn't slower."""
    found = verdict(implementation, dtype)
    return found is not None and found.reason is None


def verdict(implementation: str, dtype: str) -> Verdict | None:
    """Return the verdict on a kernel: from memory, from the cache, or by running it.

    Returns:
        The verdict, or None if there is none and $HEADCOUNT_VERIFY is 0.
    """
    device = jax.devices()[0].device_kind
    key = (implementation, dtype, device, jaxlib.__version__, source_hash())
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        found = _read(key)
        if found is None and os.environ.get("HEADCOUNT_VERIFY") != "0":
            # in a thread of its own: the caller may be tracing
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                found = pool.submit(verify, implementation, dtype).result()
            if "RESOURCE_EXHAUSTED" not in (found.reason or ""):  # which may pass
                _write(key, found)
        if found is not None:
            _verdicts[key] = found
        return found


def verdicts() -> list[Verdict]:
    """Return the verdicts that this process has used, for run.json."""
    return list(_verdicts.values())


@functools.cache
def source_hash() -> str:
    """Return a hash of the sources of the kernels and of the reference."""
    folder = Path(__file__).parent
    names = "arguments", "dropout", "masks", "platform", "reference", "statistics"
    files = [folder / f"{name}.py" for name in (*names, "verification")]
    files += sorted(folder.glob("kernels/*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    return digest.hexdigest()[:16]


def cache_path(key: tuple) -> Path:
    """Return a verdict's path in the user's cache folder."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return root / "headcount" / "verdicts" / f"{name}.json"


def verify(implementation: str, dtype: str, module=None) -> Verdict:
    """Run a kernel on small problems and one long one; never raises.

    Args:
        implementation: a name in `attention.IMPLEMENTATIONS`.
        dtype: the problems' dtype.
        module: the kernel's module. Defaults to that of the implementation.
    """
    device = jax.devices()[0].device_kind
    found = {"implementation": implementation, "dtype": dtype, "device": device}
    error = relative_time = reason = None
    try:
        name = f"headcount.attention.kernels.{implementation}"
        module = importlib.import_module(name) if module is None else module
        with concurrent.futures.ThreadPoolExecutor() as pool:  # compile in parallel
            timed = pool.submit(timed_programs, module, dtype)
            errors = pool.map(
                lambda problem: problem_error(module, dtype, **problem),
                PROBLEMS.values(),
            )
            errors = dict(zip(PROBLEMS, errors, strict=True))
        worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
        error = errors[worst]
        if not error <= TOLERANCES[dtype]:  # also NaN
            reason = f"differs from reference by {error:.1e} in the problem {worst!r}"
        else:
            relative_time = time_ratio(*timed.result())
            if relative_time > SLOWER:
                reason = f"takes {relative_time:.2f} times as long as blockwise"
    except Exception as failure:  # whatever a compiler or driver may raise
        message = str(failure).partition("\n")[0][:200]
        reason = f"{type(failure).__name__}: {message}"
    return Verdict(**found, error=error, relative_time=relative_time, reason=reason)


# Sizes (T, S, N, K, H, V) and arguments by name. Odd lengths end within a block.
PROBLEMS = {
    "causal": {"sizes": (200, 200, 4, 4, 64, 64), "is_causal": True},
    "grouped, V != H, gates": {
        "sizes": (130, 77, 4, 2, 32, 64),
        "gates": (0.0, -0.5, 1.0, 2.0),
    },
    "segments": {"sizes": (150, 150, 2, 1, 64, 32), "segments": True},
    "window and lengths": {
        "sizes": (129, 257, 2, 2, 64, 64),
        "local_window_size": (40, 9),
        "lengths": True,
    },
    "dropout and slopes": {
        "sizes": (140, 190, 4, 2, 64, 64),
        "is_causal": True,
        "dropout_rate": 0.2,
        "slopes": True,
    },
}
NOTHING = {
    "is_causal": False,
    "local_window_size": None,
    **dict.fromkeys(masks.STRUCTURE),
}


def problem_error(
    module,
    dtype,
    *,
    sizes,
    segments=False,
    lengths=False,
    slopes=False,
    gates=None,
    **options,
):
    """Return a kernel's largest error on a problem, relative to the reference's result.

    Compares output, log-sum-exp, statistics, and the gradients with respect to query,
    key, value and head gates. A gate of 0 makes its head's gradients zero.
    """
    T, S, N, K, H, V = sizes
    random = np.random.default_rng(0)
    shapes = {"query": (2, T, N, H), "key": (2, S, K, H), "value": (2, S, K, V)}
    arrays = [jnp.asarray(random.normal(size=x), dtype) for x in shapes.values()]
    structure = NOTHING | {"scale": H**-0.5} | options
    if segments:
        ids = jnp.asarray(np.sort(random.integers(0, 4, (2, T)), axis=1), jnp.int32)
        structure |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    if lengths:
        structure["query_seq_lengths"] = jnp.asarray([T, T // 2], jnp.int32)
        structure["key_value_seq_lengths"] = jnp.asarray([S // 3, S], jnp.int32)
    if slopes:
        structure["alibi_slopes"] = jnp.asarray(
            2.0 ** -np.arange(1, N + 1), jnp.float32
        )
    if "dropout_rate" in options:
        structure["dropout_keys"] = dropout.row_keys(jnp.int32(0), 2, T, N)
    cotangent = jnp.asarray(random.normal(size=(2, T, N, V)), dtype)
    if gates is not None:
        arrays.append(jnp.asarray(gates, jnp.float32)[:, None])

    def results(module, arrays, cotangent):
        def attend(query, key, value, *gates):
            out, lse, statistics = module.attend(
                query, key, value, None, None, statistics=True, **structure
            )
            for gate in gates:
                out = out * gate
            return out, (jnp.where(lse > masks.EMPTY, lse, 0.0), statistics)

        out, pullback, rows = jax.vjp(attend, *arrays, has_aux=True)
        return out, rows, pullback(cotangent.astype(out.dtype))

    def wanted():
        exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangent))
        on_gpu = jax.default_backend() == "gpu"  # where tuning products takes seconds
        run = jax.jit(
            functools.partial(results, reference),
            compiler_options={"xla_gpu_autotune_level": 0} if on_gpu else None,
        )
        with jax.default_matmul_precision("highest"):
            return run(*exact)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(wanted)
        ours = jax.jit(functools.partial(results, module))(arrays, cotangent)

    def error(found, exact):
        found, exact = (np.asarray(x, np.float64) for x in (found, exact))
        return np.abs(found - exact).max() / max(1.0, np.abs(exact).max())

    return float(np.max(jax.tree.leaves(jax.tree.map(error, ours, theirs.result()))))


def timed_programs(module, dtype) -> tuple[list, list]:
    """Return compiled programs of a kernel and of blockwise, and their arguments."""
    blockwise = importlib.import_module("headcount.attention.kernels.blockwise")
    B, T, N, H = LONG
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.normal(size=(B, T, N, H)), dtype) for _ in range(3)]

    def program(module):
        structure = NOTHING | {"scale": H**-0.5, "is_causal": True}

        def loss(*arrays):
            out, _ = module.attend(*arrays, None, None, **structure)
            return out.astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()

    return [program(module), program(blockwise)], arrays


def time_ratio(programs: list, arrays: list) -> float:
    """Return the first program's time as a ratio to the second's."""
    for run in programs:
        jax.block_until_ready(run(*arrays))
    seconds = [[], []]
    for _ in range(5):
        for run, each in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            each.append(time.perf_counter() - start)
    return min(seconds[0]) / min(seconds[1])


def _read(key: tuple) -> Verdict | None:
    try:
        return Verdict(**json.loads(cache_path(key).read_text()))
    except (OSError, RuntimeError, ValueError, TypeError):
        return None  # missing, damaged, or there is no home: verify again


def _write(key: tuple, found: Verdict) -> None:
    try:
        path = cache_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(dataclasses.asdict(found)))
        part.replace(path)
    except (OSError, RuntimeError):  # read-only or no home: the next process verifies
        pass
