"""A kernel is picked only if it agrees with the reference on the device here."""

import contextlib
import dataclasses
import functools
import logging
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from headcount.attention import reference, verification
from headcount.attention.kernels import blockwise, gpu_blocks, jax_nn, tpu
from tests.marks import slow_but

PROBLEMS = verification.PROBLEMS
GATES = PROBLEMS["causal, grouped, V != H, gates"]
SIZES = {"sizes": (33, 33, 4, 2, 16, 16)}
ONE = {"causal": SIZES | {"is_causal": True}}
ACCEPTED = verification.Verdict("gpu", "bfloat16", "cpu", 0.0, 0.5, None)
long_error, timed_programs = verification.long_error, verification.timed_programs


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """One small problem, a cache of its own, and no verdicts in memory."""
    monkeypatch.setattr(verification, "PROBLEMS", ONE)
    monkeypatch.setattr(verification, "timed_programs", lambda *_: ([], []))
    monkeypatch.setattr(verification, "long_error", lambda *_: 0.0)
    monkeypatch.setattr(verification, "time_ratio", lambda *_: 0.5)
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def module(attend):
    """Return a kernel's module, which supports masks."""
    return types.SimpleNamespace(attend=attend, unsupported=lambda *_: None)


def kernel(change):
    """Return blockwise with a change of its output."""

    def attend(*args, **kwargs):
        out, *rest = blockwise.attend(*args, **kwargs)
        return change(out), *rest

    return module(attend)


def reason(wrong, **problems):
    """Return why a kernel is rejected that is wrong in one of the problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "PROBLEMS", problems)
        return verification.verify("mine", "float32", wrong).reason


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


def test_a_rejected_kernel_is_logged_once(caplog, monkeypatch):
    """As a warning, which Python shows although the caller has set up no logging."""
    wrong = dataclasses.replace(ACCEPTED, reason="differs")
    monkeypatch.setattr(verification, "verify", lambda *_: wrong)
    verification.log_unused.cache_clear()
    for _ in range(2):
        assert not verification.is_accepted("gpu", "bfloat16")
        verification._verdicts.clear()  # then it is read from the cache
    told = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert ["Verifying" in line for line in told] == [True, False]
    assert "gpu (bfloat16) is not used: differs" in told[1]


def test_wrong_kernel_for_closed_gates_is_rejected(monkeypatch):
    """Right but for a head whose output nobody uses, which gets NaN."""
    wrong = kernel(scaled_by_head)
    assert verification.verify("mine", "float32", wrong).reason is None
    monkeypatch.setattr(verification, "PROBLEMS", ONE | {"gates": GATES})
    assert "'gates'" in verification.verify("mine", "float32", wrong).reason


@pytest.mark.parametrize("wrong", ["plain", "counting"])
def test_kernel_that_is_wrong_with_or_without_statistics_is_rejected(wrong):
    """With statistics, kernels run other functions, or the same with other tiles."""

    def attend(*args, statistics, **kwargs):
        out, *rest = blockwise.attend(*args, statistics=statistics, **kwargs)
        return out * (1.05 if statistics == (wrong == "counting") else 1), *rest

    problems = {"plain": SIZES, "counting": SIZES | {"statistics": True}}
    assert f"{wrong!r}" in reason(module(attend), **problems)
    counting = [problem.get("statistics", False) for problem in PROBLEMS.values()]
    assert set(counting) == {True, False}


@pytest.mark.parametrize(
    "name", slow_but(["following"], ["following", "previous", "current"])
)
def test_statistics_that_are_wrong_where_they_are_small_are_rejected(name):
    """In long rows the weight of the next token is far below 1."""

    def attend(*args, **kwargs):
        *rest, rows = reference.attend(*args, **kwargs)
        return *rest, rows._replace(**{name: 0.9 * getattr(rows, name)})

    problem = {"sizes": (300, 300, 2, 1, 16, 16), "statistics": True}
    options = {"module": module(attend), "dtype": "bfloat16"}
    assert verification.problem_error(**options, **problem) > 0.03
    wrong = reason(module(attend), long=problem)
    assert "'long'" in wrong


def test_wrong_gradient_through_the_log_sum_exp_is_rejected():
    def attend(*args, **kwargs):
        out, lse, *rest = blockwise.attend(*args, **kwargs)
        return out, jax.lax.stop_gradient(lse), *rest

    assert "'causal'" in reason(module(attend), **ONE)


def test_kernel_that_ignores_the_mask_is_rejected_unless_it_says_so():
    def attend(query, key, value, bias, mask, **structure):
        return blockwise.attend(query, key, value, bias, None, **structure)

    wrong, masked = module(attend), SIZES | {"mask": True}
    assert "'masked'" in reason(wrong, masked=masked)
    wrong.unsupported = lambda query, value, bias, mask: "mask" if mask.any() else None
    assert reason(wrong, masked=masked) is None
    assert any("mask" in problem for problem in PROBLEMS.values())


@jax.custom_batching.custom_vmap
def of_first_trial(keys):
    return keys


@of_first_trial.def_vmap
def _(axis_size, in_batched, keys):
    return jnp.broadcast_to(keys[:1], keys.shape), True


def test_kernel_that_mixes_up_trials_is_rejected():
    def attend(*args, dropout_keys, **kwargs):
        return blockwise.attend(
            *args, dropout_keys=of_first_trial(dropout_keys), **kwargs
        )

    alone = SIZES | {"dropout_rate": 0.2}
    assert reason(module(attend), alone=alone) is None
    assert "'group'" in reason(module(attend), group=alone | {"num_trials": 2})
    assert any("num_trials" in problem for problem in PROBLEMS.values())


@pytest.mark.slow
def test_kernel_that_is_wrong_in_long_rows_only_is_rejected(monkeypatch):
    """Where later blocks are lost. They are small beside the first queries' results."""
    monkeypatch.setattr(verification, "LONG", (1, 512, 2, 16))
    monkeypatch.setattr(verification, "timed_programs", timed_programs)
    monkeypatch.setattr(verification, "long_error", long_error)

    def wrong(last):
        def change(out):
            return out.at[:, 480:].multiply(last)

        return kernel(lambda out: change(out) if out.shape[1] > 480 else out)

    assert verification.verify("mine", "float32", wrong(1.0)).reason is None
    found = verification.verify("mine", "float32", wrong(0.9))
    assert "long" in found.reason and found.error > verification.LONG_TOLERANCE
    assert found.relative_time is None and found.is_final()


def test_a_kernel_that_takes_no_large_heads_skips_their_problem(monkeypatch):
    monkeypatch.setattr(verification, "PROBLEMS", PROBLEMS)
    seen = []

    def problem_error(module, dtype, *, sizes, **_):
        seen.append(max(sizes[-2:]))
        return 0.0

    monkeypatch.setattr(verification, "problem_error", problem_error)
    for largest in (128, 256):
        seen.clear()
        mine = types.SimpleNamespace(LARGEST=largest)
        found = verification.verify("mine", "float32", mine)
        assert max(seen) == largest and found.seconds > 0


def test_one_problem_has_several_blocks_in_every_kernel():
    """Also of a computing warpgroup's keys, and with the statistics' tiles."""
    forward = [tpu.FORWARD_TILES, tpu.BACKWARD_TILES]
    forward += [x[:2] for sizes in gpu_blocks.TILES.values() for x in sizes.values()]
    T, S, *_ = PROBLEMS["segments"]["sizes"]
    for queries, keys in forward:
        assert queries < T and keys < S


def test_kernel_that_fails_or_is_slow_is_rejected(monkeypatch):
    def attend(*args, **kwargs):
        raise RuntimeError("no such instruction")

    broken = module(attend)
    assert (
        "no such instruction" in verification.verify("mine", "float32", broken).reason
    )

    def wordless(*args, **kwargs):
        raise AssertionError

    found = verification.verify("mine", "float32", module(wordless))
    assert found.reason == "AssertionError: "
    monkeypatch.setattr(verification, "time_ratio", lambda *_: 1.5)
    found = verification.verify("mine", "float32", kernel(lambda out: out))
    assert "1.50" in found.reason


def test_verdict_is_cached_and_needs_permission(monkeypatch):
    ran = []

    def verify(implementation, dtype):
        ran.append((implementation, dtype))
        return ACCEPTED

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


@pytest.mark.parametrize(
    "changes, recent, old",
    [
        ({"error": 0.5, "relative_time": None, "reason": "differs"}, 1, 1),
        ({"relative_time": 1.1, "reason": "slow"}, 1, 2),
        ({"error": None, "relative_time": None, "reason": "fails"}, 2, 3),
    ],
)
def test_a_slow_kernel_is_verified_again_after_a_day_and_a_failing_one_at_once(
    monkeypatch, changes, recent, old
):
    """The numbers are of verifications, by the second and the third process."""
    ran = []

    def verify(*_):
        ran.append(1)
        return dataclasses.replace(ACCEPTED, **changes)

    monkeypatch.setattr(verification, "verify", verify)
    for age, wanted in ((0, 1), (0, recent), (verification.DAY + 1, old)):
        monkeypatch.setattr(verification, "_verdicts", {})  # another process
        now = time.time() + age
        monkeypatch.setattr(verification.time, "time", lambda now=now: now)
        assert not verification.is_accepted("gpu", "bfloat16")
        assert len(ran) == wanted


@pytest.mark.parametrize("part", ["jax", "jaxlib", "driver"])
def test_verdict_is_taken_again_with_other_software(monkeypatch, part):
    monkeypatch.setattr(verification, "verify", lambda *_: ACCEPTED)
    assert verification.is_accepted("gpu", "bfloat16")
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setenv("HEADCOUNT_VERIFY", "0")
    assert verification.is_accepted("gpu", "bfloat16")
    monkeypatch.setattr(verification, "_verdicts", {})
    if part == "driver":
        client = types.SimpleNamespace(platform_version="another")
        kind = jax.devices()[0].device_kind
        device = types.SimpleNamespace(client=client, device_kind=kind)
        monkeypatch.setattr(jax, "devices", lambda: [device])
    else:
        monkeypatch.setattr(getattr(verification, part), "__version__", "another")
    assert verification.verdict("gpu", "bfloat16") is None


def test_relative_cache_folder_is_not_used(monkeypatch, tmp_path):
    """The owner of the working directory could plant a verdict there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr(verification, "verify", lambda *_: ACCEPTED)
    assert verification.is_accepted("gpu", "bfloat16")
    assert not list(tmp_path.iterdir())


def test_verification_is_logged_and_done_once_by_processes_of_one_device(
    monkeypatch, caplog
):
    """Processes are threads here, without the lock of threads and shared memory."""

    def verify(*_):
        time.sleep(0.2)
        return ACCEPTED

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(verification, "_lock", contextlib.nullcontext())
    monkeypatch.setattr(verification, "_verdicts", Forgetful())
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(2) as pool:
        take = functools.partial(verification.verdict, "gpu", "bfloat16")
        found = [each.result() for each in [pool.submit(take), pool.submit(take)]]
    assert found == [ACCEPTED, ACCEPTED]
    (line,) = (
        r.getMessage() for r in caplog.records if r.name.endswith("verification")
    )
    assert "gpu" in line and "bfloat16" in line


class Forgetful(dict):
    def __contains__(self, _):
        return False


def test_another_process_decides(monkeypatch):
    monkeypatch.setenv("HEADCOUNT_VERIFY", "0")
    verification.adopt([ACCEPTED])
    assert verification.is_accepted("gpu", "bfloat16")
    assert not verification.is_accepted("gpu", "float16")


@pytest.mark.parametrize("runs", [True, False])
def test_a_gpu_kernel_is_timed_beside_cudnn_where_that_runs(monkeypatch, runs):
    """cuDNN is blockwise here; where it fails, the kernel is picked without it."""
    monkeypatch.setattr(verification, "LONG", (1, 64, 2, 16))
    monkeypatch.setattr(verification, "timed_programs", timed_programs)
    monkeypatch.setattr(jax_nn, "cudnn_fits", lambda *_: True)

    def attend(*arrays, backend, **options):
        assert backend == "cudnn"
        return blockwise.attend(*arrays, **options)

    if runs:
        monkeypatch.setattr(jax_nn, "attend", attend)
    right = kernel(lambda out: out)
    found = verification.verify("gpu", "float32", right)
    assert (found.reason, found.relative_time) == (None, 0.5)
    assert found.relative_to_cudnn == (0.5 if runs else None)
    assert verification.verify("tpu", "float32", right).relative_to_cudnn is None


def failing(*_, **__):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


@pytest.mark.parametrize(
    "name, change, kept",
    [
        ("problem_error", lambda *_, **__: 0.5, True),
        ("problem_error", failing, False),
        ("long_error", failing, False),
        ("time_ratio", failing, False),
        ("time_ratio", lambda *_: 1.5, True),
    ],
)
def test_only_what_lasts_is_remembered_by_the_next_process(
    monkeypatch, name, change, kept
):
    """Another process may have the memory now."""
    monkeypatch.setattr(verification, name, change)
    found = verification.verdict("blockwise", "float32")
    assert found.reason is not None
    assert verification.verdict("blockwise", "float32") is found
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setenv("HEADCOUNT_VERIFY", "0")
    assert verification.verdict("blockwise", "float32") == (found if kept else None)
    verification.forget("blockwise", "float32")
    assert verification.verdict("blockwise", "float32") is None


@pytest.mark.slow
def test_reference_agrees_with_itself_in_every_problem(monkeypatch):
    monkeypatch.undo()
    exact = module(reference.attend)
    for problem in verification.PROBLEMS.values():
        assert verification.problem_error(exact, "float32", **problem) < 1e-6
