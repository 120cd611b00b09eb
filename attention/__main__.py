"""Print which implementation of attention runs on the device here, and why.

python -m headcount.attention
"""

import jax

from headcount.attention.api import KERNELS, resolve_implementation
from headcount.attention.kernels import cpu_build
from headcount.attention.verification import verdict

COLUMNS = "{:12}  {:9}  {:>9}  {:>9}  {}"


def main() -> None:
    """Print a row per dtype: the choice, and the verdict on this platform's kernel."""
    platform, device = jax.default_backend(), jax.devices()[0].device_kind
    print(f"{device} ({platform}), jax {jax.__version__}")
    if platform == "cpu":
        reason = cpu_build.unavailable()
        print(f"cpu kernel: {'compiled' if reason is None else reason}")
        return
    print(COLUMNS.format("kernel", "dtype", "error", "time", "verdict"))
    for dtype in ("float32", "bfloat16", "float16"):
        x = jax.ShapeDtypeStruct((1, 128, 8, 64), dtype)
        chosen = resolve_implementation(x, x, x)
        module = __import__(f"{KERNELS}.{platform}", fromlist=["unsupported"])
        reason = module.unsupported(x, x, None, None) or module.unsupported_device()
        if reason is not None:
            print(COLUMNS.format(platform, dtype, "", "", reason))
            continue
        found = verdict(platform, dtype)
        if found is None:
            print(COLUMNS.format(platform, dtype, "", "", "not verified"))
            continue
        error = "" if found.error is None else f"{found.error:.1e}"
        ratio = "" if found.relative_time is None else f"{found.relative_time:.2f}"
        text = found.reason or "accepted"
        print(COLUMNS.format(platform, dtype, error, ratio, f"{text}: {chosen} runs"))


if __name__ == "__main__":
    main()
