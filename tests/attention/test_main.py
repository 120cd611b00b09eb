"""`python -m headcount.attention`: which implementation runs here, and why."""

import jax
import jax.numpy as jnp
import pytest

from headcount.attention import IMPLEMENTATIONS, __main__, verification
from headcount.attention.api import resolve_implementation


def printed(capsys, **options):
    """Rows by dtype and implementation."""
    __main__.main(**options)
    _, error, time, _, *lines = capsys.readouterr().out.splitlines()
    assert error.startswith("error") and "relative to" in error
    assert time.startswith("time") and "relative to blockwise" in time
    return {tuple(line.split()[:2]): line for line in lines}


def test_every_implementation_has_a_row_and_one_is_picked(capsys):
    rows = printed(capsys)
    names = [name for name in IMPLEMENTATIONS if not name.endswith("interpret")]
    assert list(rows) == [(d, n) for d in __main__.DTYPES for n in names]
    for dtype in __main__.DTYPES:
        x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.dtype(dtype))
        picked = [n for n in names if "  picked  " in rows[dtype, n]]
        assert picked == [resolve_implementation(x, x, x)]
    assert "needs a TPU, the platform is 'cpu'" in rows["float32", "tpu"]
    assert "needs a GPU" in rows["bfloat16", "gpu"]


def test_again_takes_a_verdict_again(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verification, "_verdicts", {})
    kernel = __main__.importlib.import_module("headcount.attention.kernels.tpu")
    monkeypatch.setattr(kernel, "unsupported_device", lambda: None)
    shown = []
    for error, options in ((1e-6, {}), (2e-6, {}), (3e-6, {"again": True})):
        found = verification.Verdict("tpu", "float32", "TPU", error, 0.5, None)
        monkeypatch.setattr(verification, "verify", lambda *_, found=found: found)
        shown.append(printed(capsys, **options)["float32", "tpu"])
        monkeypatch.setattr(verification, "_verdicts", {})  # another process
    assert [row.split()[2] for row in shown] == ["1.0e-06", "1.0e-06", "3.0e-06"]


@pytest.mark.parametrize("reason", [None, "differs from reference by 0.5"])
def test_verdict_of_a_kernel_is_shown(capsys, monkeypatch, reason):
    found = verification.Verdict("tpu", "float32", "TPU v5e", 3e-6, 0.41, reason, 12.2)
    monkeypatch.setattr(verification, "verdict", lambda name, dtype: found)
    kernel = __main__.importlib.import_module("headcount.attention.kernels.tpu")
    monkeypatch.setattr(kernel, "unsupported_device", lambda: None)
    row = printed(capsys)["float32", "tpu"]
    assert "3.0e-06" in row and "0.41" in row
    assert (reason or "verified on TPU v5e in 12 s") in row
