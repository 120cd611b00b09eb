"""Compare a fused kernel with `reference` on this device before it is first picked.

The accelerator kernels were developed without an accelerator; only the GPU's has run on
one, an H200. Wrong results on other hardware or with another compiler could go
unnoticed. So `resolve_implementation` calls `is_accepted`, which runs small problems
once per device kind, versions of JAX, jaxlib and driver, and kernel source, and caches
the verdict in the user's cache folder. `python -m headcount.attention` prints the
verdicts; with `--again`, it verifies again.

With $HEADCOUNT_VERIFY=0 the problems are not run, and a kernel without a cached verdict
is not picked.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import json
import logging
import os
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from headcount.attention import dropout, masks, reference
from headcount.attention.kernels import jax_nn
from headcount.attention.kernels.cpu_build import cache_folder, make_private

# Largest allowed error, relative to the largest number of the reference's result. As in
# the tests of compilers and simulation; 16-bit tolerances allow for rounded products.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
# Of the long problem, where a kernel is compared with blockwise, which rounds as well:
# to 16 bits, or on a TPU the factors of float32 products to bfloat16.
LONG_TOLERANCE = 4e-2
SMALL_STATISTIC = 0.01  # errors of smaller statistics are relative to this
SLOWER = 1.0  # relative time above which a kernel is not picked
LONG = (4, 2048, 8, 64)  # B, T, N, H of the timed problem
PARTS = 16  # of LONG's rows; errors are relative to a part, as later queries have less
DAY = 24 * 60 * 60  # seconds
_log = logging.getLogger(__name__)
_verdicts: dict[tuple, "Verdict"] = {}
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of verifying a kernel on a device."""

    implementation: str
    dtype: str
    device: str  # device kind
    error: float | None  # largest relative error; None if the kernel failed
    relative_time: float | None  # to blockwise, forward and backward; None if not timed
    reason: str | None  # why the kernel is rejected; None if accepted
    seconds: float | None = None  # that verification took
    relative_to_cudnn: float | None = None  # as relative_time; None if not timed

    def is_final(self) -> bool:
        """Return whether the kernel is accepted, or differs from the reference.

        One that fails or is slow may share the device with another program. That it
        fails is not cached, and that it is slow only for a day.
        """
        differs = self.error is not None and self.relative_time is None
        return self.reason is None or differs


def is_accepted(implementation: str, dtype: str, beside_cudnn: bool = False) -> bool:
    """Return whether a kernel agrees with `reference` here and isn't slower.

    Args:
        implementation: a name in `attention.IMPLEMENTATIONS`.
        dtype: of the call.
        beside_cudnn: whether cuDNN can do the call, too. Then a kernel for which it was
            found to be faster is not accepted.
    """
    result = verdict(implementation, dtype)
    if result is None or result.reason is not None:
        return False
    return not (beside_cudnn and (result.relative_to_cudnn or 0) > SLOWER)


def verdict(implementation: str, dtype: str) -> Verdict | None:
    """Return the verdict on a kernel: from memory, from the cache, or by running it.

    Returns:
        The verdict, or None if there is none and $HEADCOUNT_VERIFY is 0.
    """
    key = _key(implementation, dtype)
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        with _locked(key):  # two processes would slow each other down
            result = _read(key)
            if result is None and os.environ.get("HEADCOUNT_VERIFY") != "0":
                _log.warning(
                    "Verifying attention kernel %s (%s), once per kind of device. "
                    "HEADCOUNT_VERIFY=0 skips this, and the kernel.",
                    *(implementation, dtype),
                )
                # in a thread of its own: the caller may be tracing
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    result = pool.submit(verify, implementation, dtype).result()
                if result.error is not None:  # it ran
                    _write(key, result)
        if result is not None:
            _verdicts[key] = result
            if result.reason is not None:
                log_unused(f"{implementation} ({dtype})", result.reason)
        return result


@functools.cache
def log_unused(kernel: str, reason: str) -> None:
    """Log, once per process, why a kernel is not used."""
    _log.warning("Attention kernel %s is not used: %s.", kernel, reason)


def verdicts() -> list[Verdict]:
    """Return the verdicts that this process has used, for run.json."""
    return list(_verdicts.values())


def adopt(others: list[Verdict]) -> None:
    """Use verdicts of another process, which has devices of the same kind."""
    _verdicts.update(
        {_key(other.implementation, other.dtype): other for other in others}
    )


def forget(implementation: str, dtype: str) -> None:
    """Remove a verdict from memory and from the cache."""
    key = _key(implementation, dtype)
    _verdicts.pop(key, None)
    with contextlib.suppress(OSError, RuntimeError):
        cache_path(key).unlink()


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
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return cache_folder() / "verdicts" / f"{name}.json"


def verify(implementation: str, dtype: str, module=None) -> Verdict:
    """Run a kernel on small problems and one long one; never raises.

    Args:
        implementation: a name in `attention.IMPLEMENTATIONS`.
        dtype: the problems' dtype.
        module: the kernel's module. Defaults to that of the implementation.
    """
    device = jax.devices()[0].device_kind
    error = relative_time = relative_to_cudnn = reason = None
    began = time.perf_counter()
    try:
        name = f"headcount.attention.kernels.{implementation}"
        module = importlib.import_module(name) if module is None else module
        problems = {
            name: problem
            for name, problem in PROBLEMS.items()
            if max(problem["sizes"][-2:]) <= getattr(module, "LARGEST", np.inf)
        }
        with concurrent.futures.ThreadPoolExecutor() as pool:  # compile in parallel
            timed = pool.submit(timed_programs, module, dtype)
            errors = pool.map(
                lambda problem: problem_error(module, dtype, **problem),
                problems.values(),
            )
            errors = dict(zip(problems, errors, strict=True))
        worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
        error = errors[worst]
        if not error <= TOLERANCES[dtype]:  # also NaN
            reason = f"differs from reference by {error:.1e} in the problem {worst!r}"
        elif not (long := long_error(*timed.result())) <= LONG_TOLERANCE:
            error = long
            reason = f"differs from blockwise by {long:.1e} in the long problem"
        else:
            relative_time = time_ratio(*timed.result())
            if relative_time > SLOWER:
                reason = f"takes {relative_time:.2f} times as long as blockwise"
            elif implementation == "gpu":
                relative_to_cudnn = cudnn_ratio(*timed.result())
    except Exception as failure:  # whatever a compiler or driver may raise
        message = str(failure).partition("\n")[0][:200]
        reason = f"{type(failure).__name__}: {message}"
        error = None
    seconds = time.perf_counter() - began
    return Verdict(
        *(implementation, dtype, device, error, relative_time, reason, seconds),
        relative_to_cudnn=relative_to_cudnn,
    )


# Sizes (T, S, N, K, H, V) and arguments by name. Odd lengths end within a block, and
# the longest rows have several blocks in every kernel. They are few, because a GPU's
# kernels compile one after another, each for seconds. Kernels that do not take heads of
# 256 skip that problem.
PROBLEMS = {
    "causal, grouped, V != H, gates": {
        "sizes": (201, 201, 4, 2, 128, 64),
        "is_causal": True,
        "gates": (0.0, -0.5, 1.0, 2.0),
        "statistics": True,
    },
    "segments": {
        "sizes": (1100, 1100, 2, 1, 64, 32),
        "segments": True,
        "statistics": True,
    },
    "window, lengths, mask": {
        "sizes": (129, 257, 2, 2, 64, 64),
        "local_window_size": (40, 9),
        "lengths": True,
        "mask": True,
    },
    "dropout, slopes, vmap, small heads": {
        "sizes": (140, 190, 4, 2, 8, 8),
        "is_causal": True,
        "dropout_rate": 0.2,
        "slopes": True,
        "num_trials": 2,
    },
    "large heads, mask of keys": {
        "sizes": (150, 140, 2, 1, 256, 256),
        "mask": (1, 2, 1, 140),
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
    statistics=False,
    segments=False,
    lengths=False,
    mask=False,
    slopes=False,
    gates=None,
    num_trials=None,
    **options,
):
    """Return a kernel's largest error on a problem, relative to the reference's result.

    Compares output, log-sum-exp, statistics if asked for, and the gradients with
    respect to query, key, value and head gates. Errors are relative to an array's
    largest number, or to 1 if that is larger (to 0.01 for a statistic). A gate of 0
    makes its head's gradients zero. `mask` is its shape, or True for all but heads. A
    mask is left out if the kernel doesn't support it. With `num_trials`, the kernel
    runs under `jax.vmap`.
    """
    T, S, N, K, H, V = sizes
    random = np.random.default_rng(0)
    trials = () if num_trials is None else (num_trials,)

    # jnp.asarray would compile a small program for each shape
    put = jax.device_put

    def normal(*shape):
        return random.normal(size=(*trials, 2, *shape)).astype(jnp.dtype(dtype))

    arrays = [normal(T, N, H), normal(S, K, H), normal(S, K, V)]
    cotangents = normal(T, N, V), normal(T, N)
    structure = NOTHING | {"scale": H**-0.5} | options
    if segments:
        ids = put(np.int32(np.sort(random.integers(0, 4, (2, T)), axis=1)))
        structure |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    if lengths:
        structure["query_seq_lengths"] = put(np.int32([T, T // 2]))
        structure["key_value_seq_lengths"] = put(np.int32([S // 3, S]))
    if slopes:
        structure["alibi_slopes"] = put(np.float32(2.0 ** -np.arange(1, N + 1)))
    keys = None
    if "dropout_rate" in options:
        seeds = np.arange(num_trials or 1, dtype=np.int32).reshape(trials)
        hashed = functools.partial(dropout.row_keys, B=2, T=T, N=N)
        keys = jax.jit(jax.vmap(hashed) if trials else hashed)(seeds)
    shape = (2, 1, T, S) if mask is True else mask
    allowed = put(random.random(shape) < 0.7) if mask else None
    if mask and module.unsupported(arrays[0], arrays[2], None, allowed):
        allowed = None
    if gates is not None:
        arrays.append(np.float32(gates)[:, None])

    def results(module, arrays, cotangents, keys):
        def attend(query, key, value, *gates):
            out, lse, *rows = module.attend(
                *(query, key, value, None, allowed),
                dropout_keys=keys,
                statistics=statistics,
                **structure,
            )
            lse = jnp.where(lse > masks.EMPTY, lse, 0.0)
            for gate in gates:
                out, lse = out * gate, lse * gate[:, 0]
            return (out, lse), rows

        outputs, pullback, rows = jax.vjp(attend, *arrays, has_aux=True)
        cotangents = tuple(
            x.astype(y.dtype) for x, y in zip(cotangents, outputs, strict=True)
        )
        return outputs, rows, pullback(cotangents)

    def program(module):
        function = functools.partial(results, module)
        return function if num_trials is None else jax.vmap(function)

    def wanted():
        exact = jax.tree.map(np.float32, (arrays, cotangents))
        on_gpu = jax.default_backend() == "gpu"  # where tuning products takes seconds
        run = jax.jit(
            program(reference),
            compiler_options={"xla_gpu_autotune_level": 0} if on_gpu else None,
        )
        with jax.default_matmul_precision("highest"):
            return run(*exact, keys)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(wanted)
        ours = jax.jit(program(module))(arrays, cotangents, keys)

    def error(actual, exact, least=1.0):
        actual, exact = (np.asarray(x, np.float64) for x in (actual, exact))
        return np.abs(actual - exact).max() / max(least, np.abs(exact).max())

    def errors(actual, exact, **options):
        of_leaf = functools.partial(error, **options)
        return jax.tree.leaves(jax.tree.map(of_leaf, actual, exact))

    (out, rows, gradients), exact = ours, theirs.result()
    # statistics such as the weight of the next token are far below 1 in long rows
    of_rows = errors(rows, exact[1], least=SMALL_STATISTIC)
    of_results = errors((out, gradients), (exact[0], exact[2]))
    return float(np.max(of_rows + of_results))


def timed_programs(module, dtype) -> tuple[list, list]:
    """Return compiled programs of a kernel and of blockwise, and their arguments.

    They return the output and its gradients.
    """
    blockwise = importlib.import_module("headcount.attention.kernels.blockwise")
    B, T, N, H = LONG
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(B, T, N, H)) for _ in range(4)]
    arrays = [jax.device_put(x.astype(jnp.dtype(dtype))) for x in arrays]
    return [long_program(x.attend, arrays) for x in (module, blockwise)], arrays


def long_program(attend, arrays: list):
    """Compile an implementation's function: the output of LONG, and its gradients."""
    structure = NOTHING | {"scale": LONG[-1] ** -0.5, "is_causal": True}

    def results(query, key, value, cotangent):
        def output(*arrays):
            return attend(*arrays, None, None, **structure)[0]

        out, pullback = jax.vjp(output, query, key, value)
        return out, *pullback(cotangent)

    return jax.jit(results).lower(*arrays).compile()


def cudnn_ratio(programs: list, arrays: list) -> float | None:
    """Return the first program's time as a ratio to cuDNN's; None if it has no kernel.

    cuDNN may fail on hardware or with versions that `jax_nn.cudnn_fits` doesn't know.
    """
    if not jax_nn.cudnn_fits(arrays[0], arrays[2], None, None):
        return None
    try:
        attend = functools.partial(jax_nn.attend, backend="cudnn")
        return time_ratio([programs[0], long_program(attend, arrays)], arrays)
    except Exception as failure:  # whatever a compiler or driver may raise
        _log.warning("cuDNN was not timed: %s", str(failure).partition("\n")[0][:200])
        return None


def long_error(programs: list, arrays: list) -> float:
    """Return the largest difference of the programs' results, relative to its part."""

    def error(actual, exact):
        actual, exact = (
            np.stack(np.split(np.asarray(x, np.float32), PARTS, axis=1))
            for x in (actual, exact)
        )
        axes = tuple(range(1, actual.ndim))
        return (np.abs(actual - exact).max(axes) / np.abs(exact).max(axes)).max()

    ours, theirs = (run(*arrays) for run in programs)
    return float(np.max(jax.tree.leaves(jax.tree.map(error, ours, theirs))))


def time_ratio(programs: list, arrays: list) -> float:
    """Return the first program's time as a ratio to the second's."""
    for run in programs:
        jax.block_until_ready(run(*arrays))
    seconds = [[], []]
    for _ in range(5):
        for run, times in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            times.append(time.perf_counter() - start)
    return min(seconds[0]) / min(seconds[1])


def _key(implementation: str, dtype: str) -> tuple:
    """Return all that a verdict depends on."""
    device = jax.devices()[0]
    versions = jax.__version__, jaxlib.__version__, device.client.platform_version
    return implementation, dtype, device.device_kind, *versions, source_hash()


@contextlib.contextmanager
def _locked(key: tuple):
    """Wait until no other process verifies the kernel; not if there is no cache."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):
            path = cache_path(key).with_suffix(".lock")
            make_private(path.parent)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _read(key: tuple) -> Verdict | None:
    try:
        path = cache_path(key)
        result = Verdict(**json.loads(path.read_text()))
        is_recent = time.time() - path.stat().st_mtime < DAY
        return result if result.is_final() or is_recent else None
    except (OSError, RuntimeError, ValueError, TypeError):
        return None  # missing, damaged, or there is no home: verify again


def _write(key: tuple, result: Verdict) -> None:
    try:
        path = cache_path(key)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(dataclasses.asdict(result)))
        part.replace(path)
    except (OSError, RuntimeError):  # read-only or no home: the next process verifies
        pass
