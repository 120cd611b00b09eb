"""Several processes, without starting any; tests/faults/test_several.py starts them."""

import socket
import zlib

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from headcount.data.batches import PackedBatches
from headcount.data.examples import Ragged
from headcount.runtime import cluster, distributed, sharding
from headcount.runtime.workdir import environment
from headcount.training.checkpoint import is_sound, place


@pytest.mark.parametrize(
    "flags, parts",
    [
        ((None, 4, None), ["--num_processes", "needs --coordinator=HOST:PORT"]),
        ((None, None, 1), ["--process_id", "needs --coordinator=HOST:PORT"]),
        (("auto", 4, 1), ["--num_processes and --process_id", "HOST:PORT"]),
        (("somewhere", 2, 0), ["must be HOST:PORT", "'somewhere'"]),
        (("somewhere:http", 2, 0), ["must be HOST:PORT", "'somewhere:http'"]),
        (("somewhere:70000", 2, 0), ["must be HOST:PORT"]),
        (("somewhere:80", 2, None), ["--process_id"]),
        (("somewhere:80", None, 0), ["--num_processes"]),
        (("somewhere:80", 2, 2), ["from 0 to below --num_processes=2, got 2"]),
        (("somewhere:80", 2, -1), ["got -1"]),
        (("somewhere:80", 0, 0), ["--num_processes=0"]),
    ],
)
def test_flags_that_do_not_go_together_are_named(flags, parts):
    with pytest.raises(ValueError) as raised:
        distributed.check_flags(*flags)
    for part in parts:
        assert part in str(raised.value)


def test_flags_that_go_together():
    for given in ((None, None, None), ("auto", None, None), ("[::1]:8476", 2, 1)):
        distributed.check_flags(*given)


@pytest.mark.parametrize(
    "given, environment, name",
    [
        (["--process_id=3"], {"SLURM_PROCID": "7"}, "3"),
        ([], {"SLURM_PROCID": "7"}, "7"),
        ([], {"OMPI_COMM_WORLD_RANK": "2"}, "2"),
        ([], {}, "only"),
    ],
)
def test_processes_of_a_host_have_names_of_their_own(
    monkeypatch, given, environment, name
):
    """Else the tasks that Slurm starts on a host would wait for each other."""
    for rank in cluster.RANKS:
        monkeypatch.delenv(rank, raising=False)
    for rank, value in environment.items():
        monkeypatch.setenv(rank, value)
    with flagsaver.flagsaver():
        flags.FLAGS(["sweep.py", *given])
        assert cluster.process() == name


def test_scripts_of_a_pod_that_lists_its_hosts_are_told_to_connect(monkeypatch):
    for hosts, given, wanted in (
        ("a,b", [], ["--coordinator=auto"]),
        ("a,b", ["--coordinator=a:1"], ["--coordinator=a:1"]),
        ("a", [], []),
    ):
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
        with flagsaver.flagsaver():
            flags.FLAGS(["sweep.py", *given])
            assert cluster.arguments() == wanted


def test_a_coordinator_that_does_not_answer_is_named():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))  # and does not listen
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"No coordinator answers at {address}"):
            distributed.connect(address, 2, 1, seconds=0)


def test_alone_what_is_shared_is_ones_own():
    assert distributed.gather({"a": 1}) == [{"a": 1}] and distributed.is_first()
    with pytest.raises(OSError, match="no room"), distributed.fail_together():
        raise OSError("no room")


@pytest.mark.parametrize(
    "first, named",
    [
        ({"jax": "0.1"}, r"jax \(in process 0 '0.1', here '"),
        ({"commit": "c0ffee"}, r"commit \(in process 0 'c0ffee', here 'decade'\)"),
        ({"commit": None}, None),
    ],
)
def test_processes_of_other_software_are_refused(tmp_path, monkeypatch, first, named):
    """Their programs differ, and would wait for each other or add up other numbers."""
    here = environment() | {"commit": "decade"}
    monkeypatch.setattr(distributed, "environment", lambda: here)

    def gather(value):
        if value == here["commit"]:
            return [first.get("commit", value), value]
        is_software = isinstance(value, dict) and "jax" in value
        return [value | first if is_software else value, value]

    monkeypatch.setattr(distributed, "gather", gather)
    if named is None:
        distributed.check_same_run(tmp_path, {}, [], None)
        return
    with pytest.raises(ValueError, match=f"software differs .* 0: {named}"):
        distributed.check_same_run(tmp_path, {}, [], None)


@pytest.mark.parametrize(
    "reasons, fails",
    [
        ([None, None], False),
        (["no C++ compiler", "no C++ compiler 'none'"], False),  # whatever the reason
        ([None, "no C++ compiler"], True),
        (["no C++ compiler", None], True),
    ],
)
def test_processes_of_which_some_have_the_cpu_kernels_fail(
    tmp_path, monkeypatch, reasons, fails
):
    same = ["a"] * 2, [{"commit": "a"}] * 2, [None] * 2
    calls = iter([*same, reasons])
    monkeypatch.setattr(
        distributed, "environment", lambda: {"versions": {}, "commit": "a"}
    )

    def gather(value):
        return next(calls, [value] * 2)

    monkeypatch.setattr(distributed, "gather", gather)
    own = reasons[1]
    if not fails:
        distributed.check_same_run(tmp_path, {}, [], own)
        return
    which = reasons.index("no C++ compiler")
    with pytest.raises(ValueError, match=rf"Process {which} .*CXX=none"):
        distributed.check_same_run(tmp_path, {}, [], own)


class Device:
    """Stands for one in a mesh."""

    def __init__(self, index, process_index):
        self.id, self.process_index = index, process_index


@pytest.mark.parametrize(
    "shape, processes, wanted",
    [
        ((4, 1, 1), 2, [((0, 4), (0, 12)), ((4, 8), (0, 12))]),
        ((1, 4, 1), 2, [((0, 8), (0, 6)), ((0, 8), (6, 12))]),
        ((2, 2, 2), 4, [((0, 4), (0, 6)), ((0, 4), (6, 12)), ((4, 8), (0, 6))]),
        ((1, 1, 4), 2, [((0, 8), (0, 12)), ((0, 8), (0, 12))]),
        ((2, 3, 1), 2, [((0, 4), (0, 12)), ((4, 8), (0, 12))]),
        ((4, 3, 1), 6, [((0, 2), (0, 8)), ((0, 4), (0, 12))]),  # no box: around it
    ],
)
def test_a_process_makes_the_rows_that_its_devices_need(shape, processes, wanted):
    count = int(np.prod(shape))
    each = count // processes
    devices = [Device(i, i // each) for i in range(count)]
    axes = dict(zip(sharding.AXES, shape, strict=True))
    mesh = sharding.make_mesh(axes, 8, 12, devices)
    for here, ends in enumerate(wanted):
        part = sharding.part_here(mesh, 8, 12, here)
        assert part == (*(slice(*each) for each in ends), (8, 12))


@pytest.mark.parametrize("trials, rows", [((0, 1), (0, 2)), ((1, 3), (1, 4))])
def test_a_part_of_a_batch_is_cut_out_of_the_whole(trials, rows):
    random = np.random.default_rng(0)
    texts = [
        random.integers(4, 50, random.integers(3, 20)).tolist() for _ in range(500)
    ]
    batches = PackedBatches(
        {"source": Ragged.of(texts), "target": Ragged.of(texts)},
        batch_tokens=1024,
        max_length=32,
        seeds=[1, 2, 3],
    )
    trials, rows = slice(*trials), slice(*rows)
    for step in (0, 7):
        R, B = 3, batches.spec["target"].shape[0]
        whole = batches.part(step, slice(R), slice(B))
        part = batches.part(step, trials, rows)
        for name, array in whole.items():
            np.testing.assert_array_equal(part[name], array[trials, rows])


def test_a_checksum_tells_which_part_it_is_of():
    array = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    assert place((slice(None), slice(0, 6)), array.shape) == ""
    assert place((slice(2, 4), slice(None)), array.shape) == "[2:4,0:6]"
    sums = {
        "0:2,0:6": zlib.crc32(array[:2].tobytes()),
        "2:4,0:6": zlib.crc32(array[2:].tobytes()),
    }
    assert is_sound(array, sums) and is_sound(array, {"": zlib.crc32(array.tobytes())})
    assert not is_sound(array, {"0:2,0:6": sums["0:2,0:6"]}), "half of it"
    assert not is_sound(array + 1, sums)
