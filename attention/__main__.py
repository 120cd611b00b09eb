"""Print which attention implementation runs on this device, and why.

python -m headcount.attention [--again]

--again: verify kernels again, whatever verdicts are cached.
"""

import argparse
import importlib
import logging
import os

import jax

from headcount.attention import verification
from headcount.attention.api import IMPLEMENTATIONS, KERNELS, resolve_implementation
from headcount.attention.kernels import cpu_build
from headcount.attention.kernels.cpu import DTYPES as CPU_DTYPES

COLUMNS = "{:9}  {:14}  {:6}  {:>9}  {:>9}  {}"
LEGEND = (
    "error: the largest, relative to the largest number of the reference's result\n"
    "time: forward and backward, relative to blockwise's; below 1 is faster"
)
DTYPES = ("float32", "bfloat16", "float16")
VERIFIED = "gpu", "tpu"
WITHOUT_VERDICT = {
    "reference": "the definition; holds a T x S map",
    "blockwise": "XLA, any device",
    "xla": "jax.nn; holds a T x S map",
}


def main(again: bool = False) -> None:
    """Print one row per dtype and implementation: whether it is picked, and why.

    Args:
        again: whether to verify kernels again.
    """
    platform, device = jax.default_backend(), jax.devices()[0].device_kind
    print(f"{device} ({platform}), jax {jax.__version__}")
    print(LEGEND)
    print(COLUMNS.format("dtype", "implementation", "picked", "error", "time", "why"))
    for dtype in DTYPES:
        for name in VERIFIED if again else ():
            verification.forget(name, dtype)
        x = jax.ShapeDtypeStruct((1, 128, 8, 64), dtype)
        chosen = resolve_implementation(x, x, x, is_plain=True)
        for name, (_, options) in IMPLEMENTATIONS.items():
            if "interpret" not in options:
                picked = "picked" if name == chosen else ""
                print(COLUMNS.format(dtype, name, picked, *why(name, dtype)))


def why(name: str, dtype: str) -> tuple[str, str, str]:
    """Return an implementation's largest error, relative time and verdict as text.

    The error is relative to the reference, the time is relative to blockwise.
    """
    if name in WITHOUT_VERDICT:
        return "", "", WITHOUT_VERDICT[name]
    platform = jax.default_backend()
    if name == "cudnn":
        has_it = platform == "gpu"
        return "", "", "jax.nn" if has_it else "needs an NVIDIA GPU"
    if name == "cpu":
        if platform != "cpu":
            return "", "", f"needs a CPU, the platform is {platform!r}"
        reason = None if dtype in CPU_DTYPES else f"takes no {dtype}"
        return "", "", reason or cpu_build.unavailable() or "compiled for this machine"
    kernel = importlib.import_module(f"{KERNELS}.{name}")
    x = jax.ShapeDtypeStruct((1, 128, 8, 64), jax.numpy.dtype(dtype))
    reason = kernel.unsupported_device() or kernel.unsupported(x, x, None, None)
    if reason is not None:
        return "", "", reason
    verdict = verification.verdict(name, dtype)
    if verdict is None:
        return "", "", "not verified"
    error = "" if verdict.error is None else f"{verdict.error:.1e}"
    ratio = "" if verdict.relative_time is None else f"{verdict.relative_time:.2f}"
    took = "" if verdict.seconds is None else f" in {verdict.seconds:.0f} s"
    text = verdict.reason or f"verified on {verdict.device}{took}"
    if verdict.relative_to_cudnn is not None:
        text += f"; {verdict.relative_to_cudnn:.2f} times cuDNN's time"
    return error, ratio, text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m headcount.attention")
    parser.add_argument("--again", action="store_true", help="verify kernels again")
    options = parser.parse_args()
    if options.again and os.environ.get("HEADCOUNT_VERIFY") == "0":
        parser.error("--again verifies kernels, which HEADCOUNT_VERIFY=0 forbids.")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("headcount").setLevel(logging.INFO)
    main(options.again)
