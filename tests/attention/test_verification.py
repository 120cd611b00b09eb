"""A kernel is picked only if it agrees with the reference on the device here."""

import types

import jax
import jax.numpy as jnp
import pytest

from headcount.attention import reference, verification
from headcount.attention.kernels import blockwise

GATES = verification.PROBLEMS["grouped, V != H, gates"]
ONE = {"causal": {"sizes": (33, 33, 4, 2, 16, 16), "is_causal": True}}


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """One small problem, a cache of its own, and no verdicts in memory."""
    monkeypatch.setattr(verification, "PROBLEMS", ONE)
    monkeypatch.setattr(verification, "timed_programs", lambda *_: ([], []))
    monkeypatch.setattr(verification, "time_ratio", lambda *_: 0.5)
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def kernel(change):
    """Return blockwise with a change of its output."""

    def attend(*args, **kwargs):
        out, *rest = blockwise.attend(*args, **kwargs)
        return change(out), *rest

    return types.SimpleNamespace(attend=attend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_kernel_is_accepted(dtype):
    found = verification.verify("mine", dtype, kernel(lambda out: out))
    assert found.reason is None
    assert found.error < verification.TOLERANCES[dtype]


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out * 1.05,  # its gradients are wrong, too
        lambda out: out.at[:, -1].set(0),
        lambda out: out * jnp.nan,
        lambda out: out[:, ::-1],
    ],
)
def test_wrong_kernel_is_rejected(change):
    found = verification.verify("mine", "float32", kernel(change))
    assert "'causal'" in found.reason


@jax.custom_vjp
def scaled_by_head(out):
    """The output, whose gradient is scaled to fit a head's 16 bits, and back."""
    return out


def scaled_gradient(_, gradient):
    largest = jnp.abs(gradient).max((1, 3), keepdims=True)
    return ((gradient / largest) * largest,)


scaled_by_head.defvjp(lambda out: (out, None), scaled_gradient)


def test_wrong_kernel_for_closed_gates_is_rejected(monkeypatch):
    """Right but for a head whose output nobody uses, which gets NaN."""
    wrong = kernel(scaled_by_head)
    assert verification.verify("mine", "float32", wrong).reason is None
    monkeypatch.setattr(verification, "PROBLEMS", ONE | {"gates": GATES})
    assert "'gates'" in verification.verify("mine", "float32", wrong).reason


def test_kernel_that_fails_or_is_slow_is_rejected(monkeypatch):
    def attend(*args, **kwargs):
        raise RuntimeError("no such instruction")

    broken = types.SimpleNamespace(attend=attend)
    assert (
        "no such instruction" in verification.verify("mine", "float32", broken).reason
    )
    monkeypatch.setattr(verification, "time_ratio", lambda *_: 1.5)
    found = verification.verify("mine", "float32", kernel(lambda out: out))
    assert "1.50" in found.reason


def test_verdict_is_cached_and_needs_permission(monkeypatch):
    ran = []

    def verify(implementation, dtype):
        ran.append((implementation, dtype))
        return verification.Verdict(implementation, dtype, "cpu", 0.0, 0.5, None)

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setenv("HEADCOUNT_VERIFY", "0")
    assert verification.verdict("gpu", "bfloat16") is None
    assert not verification.is_accepted("gpu", "bfloat16")
    monkeypatch.delenv("HEADCOUNT_VERIFY")
    assert verification.is_accepted("gpu", "bfloat16")
    assert [each.implementation for each in verification.verdicts()] == ["gpu"]
    monkeypatch.setattr(verification, "_verdicts", {})  # another process
    monkeypatch.setenv("HEADCOUNT_VERIFY", "0")
    assert verification.is_accepted("gpu", "bfloat16")
    assert ran == [("gpu", "bfloat16")]
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "source_hash", lambda: "changed")
    assert verification.verdict("gpu", "bfloat16") is None


def test_what_may_pass_is_not_remembered_by_the_next_process(monkeypatch):
    """Another process may hold the memory now; an error without a message is one."""
    errors = [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), AssertionError()]
    reasons = []
    for error in errors:

        def failing(*_, error=error, **__):
            raise error

        monkeypatch.setattr(verification, "problem_error", failing)
        monkeypatch.setattr(verification, "_verdicts", {})
        reasons.append(verification.verdict("gpu", "float32").reason)
        assert not verification.is_accepted("gpu", "float32")
        monkeypatch.setattr(verification, "_verdicts", {})
        monkeypatch.setenv("HEADCOUNT_VERIFY", "0")
        kept = verification.verdict("gpu", "float32")
        assert (kept is None) == (error is errors[0])
        monkeypatch.delenv("HEADCOUNT_VERIFY")
    assert reasons == [f"RuntimeError: {errors[0]}", "AssertionError: "]


def test_reference_agrees_with_itself_in_every_problem(monkeypatch):
    monkeypatch.undo()
    for problem in verification.PROBLEMS.values():
        assert verification.problem_error(reference, "float32", **problem) < 1e-6
