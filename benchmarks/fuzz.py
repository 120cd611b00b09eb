"""Compare every implementation of attention with float64 NumPy on random problems.

    python -m benchmarks.fuzz --minutes 5 [--seed 0] [--only 17]

The problems have shapes from empty to a few blocks, combinations of all features, and
numbers from denormal to 1e30. Outputs, log-sum-exps, largest logits and gradients are
compared. A problem depends only on its seed, which is printed if it fails; --only runs
just that problem. The exit code is 1 if a problem failed.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from headcount.attention import dot_product_attention, masks
from headcount.attention.kernels import cpu_build

NAMES = ["reference", "blockwise"] + ["cpu"] * (cpu_build.unavailable() is None)
EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
LARGEST = 1e37  # bound on intermediate sums; float32 overflows at 3.4e38


def main() -> None:
    """Run problems until the time is up; print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument("--only", type=int, help="run the problem of this seed alone")
    args = parser.parse_args()
    seeds, end = [args.only], None
    if args.only is None:
        seeds, end = range(args.seed, 10**9), time.monotonic() + 60 * args.minutes
    failed = count = 0
    for seed in seeds:
        if end is not None and time.monotonic() > end:
            break
        count += 1
        for name in NAMES:
            for reason in differences(name, seed):
                failed += 1
                print(f"seed {seed}, {name}: {reason}", flush=True)
    print(f"{count} problems from seed {seeds[0]} on, {failed} differences")
    raise SystemExit(failed > 0)


def problem(seed: int) -> tuple[list, dict]:
    """Return a problem's query, key, value and cotangent, and its other arguments."""
    rng = np.random.default_rng(seed)
    B, K, G = (int(rng.integers(1, 4)) for _ in range(3))
    T, S = (int(rng.choice([0, 1, rng.integers(2, 20), 130])) for _ in range(2))
    T, S = max(T, int(rng.random() < 0.9)), max(S, int(rng.random() < 0.9))
    H, V = (int(rng.choice([1, 2, 4, 7, 16, 33])) for _ in range(2))
    N = K * G
    # scale of the logits: tiny, usual, or so large that one key gets all the weight
    size = rng.choice([1e-30, 1.0, 1.0, 1.0, 1e4, 1e30])
    share = rng.choice([1.0, 1e-8, 1e8])  # how query and key split that scale
    of_value = rng.choice([1e-42, 1.0, 1.0, 1e30])
    factors = np.sqrt(size) * share, np.sqrt(size) / share, of_value, 1.0
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V), (B, T, N, V)
    arrays = [
        (rng.normal(size=shape) * factor).astype(np.float32)
        for shape, factor in zip(shapes, factors, strict=True)
    ]
    given = {"is_causal": bool(rng.random() < 0.4)}

    def chosen(share=0.3):
        return rng.random() < share

    if chosen():
        given["local_window_size"] = tuple(int(x) for x in rng.integers(0, 30, 2))
    if chosen():
        given["query_seq_lengths"] = rng.integers(0, T + 1, B)
    if chosen():
        given["key_value_seq_lengths"] = rng.integers(0, S + 1, B)
    if chosen():
        given["query_segment_ids"] = rng.integers(0, 3, (B, T))
        given["key_value_segment_ids"] = rng.integers(0, 3, (B, S))
    if chosen():
        given["mask"] = rng.random((B, 1, T, S)) < 0.7
    if chosen():
        bias = rng.normal(size=(1, N, T, S)).astype(np.float32)
        given["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias)
    if chosen():
        given["alibi_slopes"] = rng.random(N).astype(np.float32)
    if chosen():
        given["dropout_rate"] = float(rng.choice([0.1, 0.5, 0.99]))
        given["dropout_seed"] = int(rng.integers(2**32))
    return arrays, given


def wanted(arrays: list, given: dict) -> tuple[dict, np.ndarray]:
    """Return the float64 results by name, and error bounds of the float32 logits."""
    query, key, value, cotangent = (x.astype(np.float64) for x in arrays)
    B, T, N, H = query.shape
    S, G = key.shape[1], N // key.shape[2]
    key, value = (np.repeat(x, G, axis=2) for x in (key, value))
    scale = H**-0.5
    logits = scale * np.einsum("BTNH,BSNH->BNTS", query, key)
    off = scale * np.einsum("BTNH,BSNH->BNTS", np.abs(query), np.abs(key))
    logits = logits + given.get("bias", 0.0)
    row, column = np.arange(T)[:, None], np.arange(S)
    if "alibi_slopes" in given:
        slopes = np.float64(given["alibi_slopes"])[:, None, None]
        logits = logits - slopes * np.abs(column - row)
    allowed = np.ones((B, 1, T, S), bool) & (logits > -np.inf)
    if given["is_causal"]:
        allowed &= column <= row
    if "local_window_size" in given:
        left, right = given["local_window_size"]
        allowed &= (column >= row - left) & (column <= row + right)
    if "query_seq_lengths" in given:
        allowed &= row < given["query_seq_lengths"][:, None, None, None]
    if "key_value_seq_lengths" in given:
        allowed &= column < given["key_value_seq_lengths"][:, None, None, None]
    if "query_segment_ids" in given:
        ids = given["query_segment_ids"][:, None, :, None]
        allowed &= (ids == given["key_value_segment_ids"][:, None, None]) & (ids != 0)
    allowed &= given.get("mask", True)
    logits = np.where(allowed, logits, -np.inf)
    seen = allowed.any(-1)
    largest = np.where(seen, logits.max(-1, initial=-np.inf), 0)
    exponentials = np.exp(logits - largest[..., None])
    total = np.where(seen, exponentials.sum(-1), 1)
    weights = exponentials / total[..., None]
    lse = np.where(seen, largest + np.log(total), masks.EMPTY)
    factor = np.ones(weights.shape)
    if "dropout_rate" in given:
        rate = given["dropout_rate"]
        factor = kept(given["dropout_seed"], *weights.shape, rate) / (1 - rate)
    out = np.einsum("BNTS,BSNV->BTNV", weights * factor, value)
    by_weight = factor * np.einsum("BTNV,BSNV->BNTS", cotangent, value)
    mean = (weights * by_weight).sum(-1, keepdims=True)
    by_logit = weights * (by_weight - mean)

    def of_groups(x):
        return x.reshape(*x.shape[:2], N // G, G, x.shape[-1]).sum(3)

    results = {
        "out": out,
        "lse": lse.transpose(0, 2, 1),
        "gradient of query": scale * np.einsum("BNTS,BSNH->BTNH", by_logit, key),
        "gradient of key": of_groups(
            scale * np.einsum("BNTS,BTNH->BSNH", by_logit, query)
        ),
        "gradient of value": of_groups(
            np.einsum("BNTS,BTNV->BSNV", weights * factor, cotangent)
        ),
        "max_logit": np.where(
            seen.any(-1), np.where(seen, largest, -np.inf).max(-1, initial=-np.inf), 0
        ),
    }
    return results, EPS * np.where(allowed, off + np.abs(logits), 0)


def kept(seed: int, B: int, N: int, T: int, S: int, rate: float) -> np.ndarray:
    """Return which weights dropout keeps: `attention.dropout`'s hash in NumPy."""

    def stirred(x):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        return (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)

    def mixed(x):
        x = stirred(x)
        return x ^ (x >> np.uint32(16))

    key = mixed(np.full((1, 1, 1, 1), seed, np.uint32))
    for index in np.ogrid[:B, :N, :T]:
        key = mixed(key + index.astype(np.uint32)[..., None])
    column = np.arange(S, dtype=np.uint32) * np.uint32(0x9E3779B9)
    return stirred(key ^ column) >> np.uint32(8) >= np.uint32(round(rate * 2**24))


def differences(name: str, seed: int) -> list[str]:
    """Describe the errors of an implementation in a problem."""
    arrays, given = problem(seed)
    exact, off = wanted(arrays, given)
    arguments = {
        key: x if isinstance(x, bool | int | float | tuple) else jnp.asarray(x)
        for key, x in given.items()
    }

    @jax.jit
    def run(query, key, value, cotangent):
        def attend(*arrays):
            out, *rest = dot_product_attention(
                *arrays,
                **arguments,
                implementation=name,
                return_residual=True,
                return_statistics=True,
            )
            return out, rest

        out, pullback, (lse, seen) = jax.vjp(attend, query, key, value, has_aux=True)
        gradients = pullback(cotangent)
        names = ("gradient of query", "gradient of key", "gradient of value")
        results = dict(zip(names, gradients, strict=True))
        return results | {"out": out, "lse": lse, "max_logit": seen.max_logit}

    results, reasons = run(*arrays), []
    # Weights may be off by a factor of e to this power, and results by about as much.
    error = 1e-5 + 8 * off.max(initial=0.0)
    sizes = [float(np.abs(x).max(initial=0.0)) for x in arrays]
    rows = arrays[0].shape[1] * arrays[0].shape[2]  # at most so many share a key
    for key, want in exact.items():
        got = np.asarray(results[key], np.float64)
        of_row = key in ("lse", "max_logit")
        if got.shape != want.shape:
            reasons.append(f"{key} has the shape {got.shape}, not {want.shape}")
        elif rows * term(key, sizes, arrays, given) > LARGEST:
            continue  # an intermediate sum may overflow
        elif not np.isfinite(got).all():
            reasons.append(f"{key} is not finite")
        elif error < 0.1 or of_row:
            empty = of_row & (want <= masks.EMPTY / 2)
            if of_row and (empty != (got <= masks.EMPTY / 2)).any():
                reasons.append(f"{key}: other rows see nothing")
            size = np.abs(np.where(empty, 0, want)).max(initial=1e-30)
            if of_row:
                size = max(size, 1.0)
            elif "gradient" in key:  # the terms may cancel
                size = max(size, term(key, sizes, arrays, given))
            # Denormal numbers may be flushed to 0.
            tiny = ([*sizes[:i], TINY, *sizes[i + 1 :]] for i in range(4))
            lost = rows * max(term(key, changed, arrays, given) for changed in tiny)
            worst = np.abs(np.where(empty, 0, got - want)).max(initial=0.0)
            if worst > error * size + lost:
                reasons.append(f"{key} is off by {worst:.1e} of {size:.1e}")
    return reasons


def term(key: str, sizes: list[float], arrays: list, given: dict) -> float:
    """Return a bound on the terms that are summed to a result.

    Args:
        sizes: the largest absolute values of query, key, value and cotangent.
    """
    query, key_size, value, cotangent = sizes
    factor = 1 / (1 - given.get("dropout_rate", 0.0))
    by_weight = cotangent * value * arrays[2].shape[-1] * factor
    return {
        "out": value * factor,
        "gradient of query": by_weight * key_size,
        "gradient of key": by_weight * query,
        "gradient of value": cotangent * factor,
    }.get(key, 0.0)


if __name__ == "__main__":
    main()
