"""A run's folder (workdir): the run that it holds, its status, and its JSON files."""

import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

from headcount.runtime.files import locked, remove_parts, write
from headcount.runtime.schema import Number, matches, violation

FORMAT_VERSION = 1  # of the files in a workdir; increase it when their meaning changes
STATUSES = ("running", "stopped", "finished", "diverged", "failed")
SAVED = ("stopped", "finished", "diverged")  # a run with such a status has a checkpoint
# Config keys that a resumed run may change, because they don't affect what is learned.
# Exception: `train.num_steps` does if the learning rate decays until then; train.py
# logs a warning.
MAY_CHANGE = (
    "train.num_steps",
    "train.log_every_steps",
    "train.eval_train",
    "train.log_heads",
    "train.tracker",
    "data.directory",
    "mesh.trial",
    "mesh.data",
    "mesh.model",
    "mesh.shard",
)
# Entries of run.json that affect whether results are bit-identical.
AFFECTS_BITS = ("attention", "dtype", "versions", "mesh", "processes", "cores")
AFFECTS_BITS += ("devices", "xla_flags")
SOURCES = ("*.py", "*.cc", "*.h")
# Schemas of our own JSON files, by name; see `runtime.schema`. `configs.validation` and
# `training.trials` check the values of configs and of trials.
SCHEMAS = {
    "config.json": {
        "task": {"name": str},
        "data": {"name": str},
        "model": {"width": Number(1)},
        "train": {"num_steps": Number(1)},
    },
    "trials.json": [{"seed": Number(0)}],
    "run.json": {"format_version": int, "status": frozenset(STATUSES)},
}
DATA = dict.fromkeys(("examples", "crc32", "dev_crc32"), Number(0))  # in run.json


@contextlib.contextmanager
def claim(workdir: Path, config: dict, trials: list[dict]) -> Iterator[None]:
    """Lock the workdir for training a config with trials; write only the lock file.

    If the block fails before it has recorded a run, the lock file is removed. The next
    start replaces any other files that the block wrote.

    Raises:
        ValueError: the folder holds another run or incomplete files, or another process
            is training in it.
    """
    # fail before creating a lock file in a folder that may not be ours
    if (workdir / "sweep.json").exists():
        raise ValueError(f"{workdir} holds a sweep; choose another --workdir.")
    if len(recorded(workdir)) < 2 and has_started(workdir):
        raise ValueError(
            f"{workdir} has checkpoints or metrics, but lacks config.json or "
            f"trials.json; restore them, or choose another --workdir."
        )
    if status_of(workdir) in SAVED and not has_checkpoint(workdir):
        raise ValueError(
            f"{workdir / 'checkpoints'} holds no checkpoint, but run.json says that "
            f"the run is {status_of(workdir)}; restore the checkpoints, or choose "
            f"another --workdir."
        )
    is_new = not workdir.exists()
    workdir.mkdir(parents=True, exist_ok=True)
    with locked(workdir / ".lock", wait=False) as lock:
        if lock is None:
            raise ValueError(
                f"Another process is training in {workdir}; wait for it, or choose "
                f"another --workdir."
            )
        remove_parts(workdir)
        now = {"config.json": config, "trials.json": trials}
        there = recorded(workdir)
        changed = [
            phrase
            for name in there
            for phrase in differences(
                there[name], now[name], "trials" if name == "trials.json" else ""
            )
        ]
        if changed and has_started(workdir):
            raise ValueError(
                f"{workdir} holds a run with another config: {summarize(changed)}. "
                f"Choose another --workdir, or use the settings of that run."
            )
        try:
            yield
        except BaseException:
            if not (workdir / "run.json").exists():
                (workdir / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the folder is not empty
                    if is_new:
                        workdir.rmdir()
            raise


def has_started(workdir: Path) -> bool:
    """Return whether anything was trained; if not, another run may use the folder."""
    metrics = workdir / "metrics.jsonl"  # an empty one is created before the first step
    return (metrics.exists() and metrics.stat().st_size > 0) or has_checkpoint(workdir)


def has_checkpoint(workdir: Path) -> bool:
    """Return whether the folder of the checkpoints has any."""
    return any(path.name.isdigit() for path in workdir.glob("checkpoints/*"))


def recorded(workdir: Path) -> dict:
    """Return the recorded config and trials of a workdir, by file name."""
    if (workdir / "run.json").exists():
        read_json(workdir / "run.json")  # checks the format version
    paths = workdir / "config.json", workdir / "trials.json"
    return {path.name: read_json(path) for path in paths if path.exists()}


def record(workdir: Path, config: dict, trials: list[dict], facts: dict) -> str:
    """Record config, trials and facts about a run, with status "running".

    Returns:
        A description of the changes since the last start that affect whether results
        are bit-identical; "" if there are none.
    """
    path = workdir / "run.json"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    changed = ""
    if has_started(workdir) and path.exists():
        before = read_json(path)
        started = before.get("started")
        keys = [key for key in AFFECTS_BITS if key in before]
        there, now = ({key: of.get(key) for key in keys} for of in (before, facts))
        changed = summarize(differences(there, now, may_change=()))
    write_json(workdir / "config.json", config)
    write_json(workdir / "trials.json", trials)
    head = {"format_version": FORMAT_VERSION, "status": "running", "started": started}
    write_json(path, head | facts)
    return changed


def status_of(workdir: Path) -> str | None:
    """Return the status of a run; None if the folder has none."""
    path = workdir / "run.json"
    return read_json(path)["status"] if path.exists() else None


def set_status(workdir: Path, status: str) -> None:
    """Record how a run ended; see `STATUSES`."""
    path = workdir / "run.json"
    write_json(path, read_json(path) | {"status": status})


def differences(
    there, now, path: str = "", may_change=MAY_CHANGE, names=("there", "now")
) -> list[str]:
    """List the differences of two JSON trees as phrases.

    Args:
        there, now: the trees.
        path: their place in a larger tree.
        may_change: paths to ignore.
        names: what the phrases call the two trees.
    """
    are_lists = isinstance(there, list) and isinstance(now, list)
    if are_lists:
        there, now = ({f"[{i}]": x for i, x in enumerate(t)} for t in (there, now))
    if isinstance(there, dict) and isinstance(now, dict):
        prefix = f"{path}." if path and not are_lists else path
        return [
            phrase
            for key in there | now
            for phrase in differences(
                there.get(key, "unset"),
                now.get(key, "unset"),
                prefix + key,
                may_change,
                names,
            )
        ]
    if there == now or path in may_change:
        return []
    return [f"{path} ({names[0]} {there!r}, {names[1]} {now!r})"]


def summarize(phrases: list[str]) -> str:
    """Join the first five phrases, and mention how many more there are."""
    rest = len(phrases) - 5
    return ", ".join(phrases[:5]) + (f" and {rest} more" if rest > 0 else "")


def read_json(path: Path):
    """Read a JSON file, and check it if `SCHEMAS` has its name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, does not match the schema, or has another
            format version.
    """
    try:
        value = parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); restore it, or train again in another "
            f"--workdir."
        ) from None
    wrong = violation(value, SCHEMAS.get(path.name, object))
    if wrong:
        raise ValueError(
            f"{path} is not a file that train.py writes; restore it, or choose another "
            f"--workdir: {wrong}."
        )
    made = value.get("format_version") if isinstance(value, dict) else None
    if made not in (None, FORMAT_VERSION):
        raise ValueError(
            f"{path} has format_version {made}, and this version of Headcount reads "
            f"{FORMAT_VERSION}; use the commit that wrote it, or choose another "
            f"--workdir."
        )
    return value


def parse_json(text: str):
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or repeats a key.
    """

    def unique(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"an object has the key {twice} twice")
        return result

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: Path, value) -> None:
    """Write a JSON file atomically; non-finite numbers become null."""
    write(path, json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def with_digest(row: dict) -> dict:
    """Add a digest to a row of a JSON file, with which `has_digest` detects edits."""
    return row | {"digest": _digest(json.loads(json.dumps(_finite(row))))}


def has_digest(row: dict) -> bool:
    """Return whether a row is unchanged since `with_digest` returned it."""
    content = {key: value for key, value in row.items() if key != "digest"}
    return row.get("digest") == _digest(content)


def _digest(row: dict) -> str:
    text = json.dumps(row, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict:
    """Return what affects results besides the config: versions, devices, commit."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "sentencepiece")
    packages += ("numpy",)  # its generators, which shuffle examples, may change
    on_cpu = jax.default_backend() == "cpu"
    return {
        "commit": commit(),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in packages},
        "processes": jax.process_count(),
        "cores": num_cores() if on_cpu else None,
        "devices": [
            f"{d.platform}: {processor() if d.platform == 'cpu' else d.device_kind}"
            for d in jax.local_devices()
        ],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str | None:
    """Return the commit of this code, with a checksum of any uncommitted changes.

    Return None if it is unknown, as in an installed package or without git.
    """
    root = Path(__file__).parents[1]

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True).stdout

    if not (root / ".git").exists():
        return None
    with contextlib.suppress(FileNotFoundError):  # git is not installed
        name = git("describe", "--always", "--dirty", "--abbrev=12").decode().strip()
        if name.endswith("-dirty"):
            plain = "--no-ext-diff", "--no-color", "--full-index"  # override git config
            changed = git("diff", *plain, "HEAD", "--", *SOURCES)
            name += f"-{zlib.crc32(changed):08x}"
        return name or None


def processor() -> str:
    """Return the name of this machine's processor, which JAX only calls "cpu"."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"


def check_data(workdir: Path, data: dict) -> None:
    """Raise a ValueError if the run in the workdir was trained on other data.

    Args:
        data: number of training examples, and checksums of the training and dev splits,
            as in run.json.
    """
    path = workdir / "run.json"
    if not path.exists() or not has_started(workdir):
        return
    before = read_json(path).get("data")
    if not matches(before, DATA):
        raise ValueError(
            f"{path} does not say what the run was trained on; restore it, or choose "
            f"another --workdir."
        )
    for keys, what in ((("examples", "crc32"), "training"), (("dev_crc32",), "dev")):
        if any(before[key] != data[key] for key in keys):
            counts = f"{before['examples']} examples there, {data['examples']} now; "
            if before["examples"] == data["examples"]:
                counts = "as many examples as there, with other text; "
            raise ValueError(
                f"The {what} data changed since {workdir} was started: "
                f"{counts * (what == 'training')}restore them, or choose another "
                f"--workdir."
            )
