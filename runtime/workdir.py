"""A run's folder: whose it is, and what is recorded there."""

import contextlib
import fcntl
import json
import math
import platform
import subprocess
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path

MAY_CHANGE = (
    "train.num_steps",
    "train.log_every_steps",
    "data.directory",
    "mesh.trial",
    "mesh.data",
    "mesh.model",
    "mesh.shard",
)
HAS_KERNELS = "yes", "no CPU"  # what run.json says where attention lacks none
# Of run.json: what bits depend on.
BITS = ("attention", "dtype", "versions", "mesh", "processes", "cores")
CODE = ("*.py", "*.cc", "*.h")
# What eval.py reads: a file without it is damaged, or of another program.
LIKE = {
    "config.json": {
        "data": {"name": "", "source": "", "target": "", "batch_tokens": 0},
        "model": {"width": 0, "num_encoder_layers": 0, "num_decoder_layers": 0},
        "train": {},
    },
    "trials.json": [{"seed": 0}],
    "run.json": {},
}


@contextlib.contextmanager
def claim(
    workdir: Path, config: dict, trials: list[dict], defaults: dict | None = None
):
    """Keep the workdir for this process, if these may train there; record nothing.

    A run of before a key existed is taken to have its value in `defaults`, a config.

    Raises:
        ValueError: it holds another run, or what is none of ours, or another process
            is at it.
    """
    recorded(workdir)  # before a lock is left in a folder that is none of ours
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process is training in {workdir}; wait for it, or choose "
                f"another --workdir."
            ) from None
        differences = changes(workdir, config, trials, defaults)
        if differences and has_begun(workdir):
            raise ValueError(
                f"{workdir} holds a run of another config: {summary(differences)}; "
                f"choose another --workdir, or the settings of that run."
            )
        yield


def has_begun(workdir: Path) -> bool:
    """Whether anything was trained there; what is not begun may become another run."""
    return (workdir / "metrics.jsonl").exists() or any(
        path.name.isdigit() for path in workdir.glob("checkpoints/*")
    )


def recorded(workdir: Path) -> dict:
    """The config and the trials that are recorded in a workdir, by their files."""
    paths = workdir / "config.json", workdir / "trials.json"
    return {path.name: read_json(path) for path in paths if path.exists()}


def record(workdir: Path, config: dict, trials: list[dict], facts: dict) -> str:
    """Record what is trained there, for the next start and for eval.py.

    Returns in words what of that on which bits depend has changed since the last start.

    Args:
        facts: of run.json, which also keeps the time of the first start.
    """
    path = workdir / "run.json"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    changed = ""
    if has_begun(workdir):  # None: of a run of before that was recorded
        before = read_json(path) if path.exists() else {}
        started = before.get("started")
        both = [name for name in BITS if name in before and name in facts]
        there, now = ({name: of[name] for name in both} for of in (before, facts))
        changed = summary(differing(there, now, may_change=()))
    write_json(workdir / "config.json", config)
    write_json(workdir / "trials.json", trials)
    write_json(path, {"started": started, **facts})
    return changed


def changes(
    workdir: Path, config: dict, trials: list[dict], defaults: dict | None = None
) -> list[str]:
    """What differs from what is recorded in the workdir, but for what may."""
    now = {"config.json": config, "trials.json": trials}
    there = recorded(workdir)
    if "config.json" in there:
        there["config.json"] = completed(there["config.json"], defaults or {})
    return [phrase for name in there for phrase in differing(there[name], now[name])]


def completed(there: dict, defaults: dict) -> dict:
    """A config that was recorded before some keys existed, with their defaults."""
    return defaults | {
        key: completed(value, defaults[key])
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
        else value
        for key, value in there.items()
    }


def differing(there, now, path: str = "", may_change=MAY_CHANGE) -> list[str]:
    """What differs between two trees of JSON, but for what may: a phrase a place."""
    if isinstance(there, list) and isinstance(now, list):
        there, now = (
            {f"trials[{i}]": x for i, x in enumerate(t)} for t in (there, now)
        )
    if isinstance(there, dict) and isinstance(now, dict):
        return [
            phrase
            for key in there | now
            for phrase in differing(
                there.get(key, "unset"),
                now.get(key, "unset"),
                f"{path}.{key}" if path else key,
                may_change,
            )
        ]
    if there == now or path in may_change:
        return []
    return [f"{path} (there {there!r}, now {now!r})"]


def summary(phrases: list[str], most: int = 5) -> str:
    """The first few, and how many there are more."""
    rest = len(phrases) - most
    return ", ".join(phrases[:most]) + (f" and {rest} more" if rest > 0 else "")


def read_json(path: Path):
    """What a file of JSON holds, which is checked where `LIKE` has its name.

    Raises:
        ValueError: it is damaged, or not ours.
    """
    try:
        value = parsed(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); restore it, or train anew in another "
            f"--workdir."
        ) from None
    if path.name in LIKE and not is_like(value, LIKE[path.name]):
        raise ValueError(
            f"{path} is not what train.py writes there; restore it, or choose another "
            f"--workdir."
        )
    return value


def parsed(text: str):
    """What a text of JSON holds.

    Raises:
        ValueError: it is no JSON, or can't be read as one tree: nested too deeply, or
            with a key that an object has twice.
    """

    def once(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"an object has the key {twice} twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_like(value, like) -> bool:
    """Whether a tree of JSON has the keys and the types of another; None: or words."""
    if like is None:
        return value is None or isinstance(value, str)
    if not isinstance(value, type(like)):
        return False
    if isinstance(like, dict):
        return all(key in value and is_like(value[key], like[key]) for key in like)
    if isinstance(like, list):
        return bool(value) and all(is_like(each, like[0]) for each in value)
    return True


def write_json(path: Path, value) -> None:
    """Write a file whole or not at all; a number that is not finite is null in it."""
    part = path.with_name(path.name + ".part")
    text = json.dumps(_finite(value), indent=1, allow_nan=False)
    part.write_text(text + "\n")
    part.replace(path)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict:
    """What a result depends on besides the config: versions, device, commit."""
    from importlib.metadata import version

    import jax

    from headcount.attention.platform import cores

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "sentencepiece")
    return {
        "commit": commit(),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in packages},
        "native_attention": _native_attention(),
        "processes": jax.process_count(),
        "cores": cores() if jax.default_backend() == "cpu" else None,
        "devices": [
            f"{d.platform}: {processor() if d.platform == 'cpu' else d.device_kind}"
            for d in jax.local_devices()
        ],
    }


def commit() -> str | None:
    """Of this code; with a checksum of what is changed in it; None: not known."""

    def git(*arguments):
        there = Path(__file__).parents[1]
        return subprocess.run(
            ["git", *arguments], cwd=there, capture_output=True
        ).stdout

    with contextlib.suppress(OSError):  # a container of a cluster may lack git
        found = git("describe", "--always", "--dirty", "--abbrev=12").decode().strip()
        if found.endswith("-dirty"):
            plain = "--no-ext-diff", "--no-color", "--full-index"  # whoever's git it is
            changed = git("diff", *plain, "HEAD", "--", *CODE)
            found += f"-{zlib.crc32(changed):08x}"
        return found or None


def _native_attention() -> str:
    """Whether a CPU has the kernels that attention picks there, or why not."""
    import jax

    from headcount.attention.native_build import why_not

    yes, no_cpu = HAS_KERNELS
    return (why_not() or yes) if jax.default_backend() == "cpu" else no_cpu


def processor() -> str:
    """The name of this machine's processor, which JAX calls "cpu"."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"


def check_data(workdir: Path, data: dict) -> None:
    """Raise a ValueError where the run in the workdir had other pairs, or another dev.

    Runs of before there was a checksum of dev have none.
    """
    path = workdir / "run.json"
    if not path.exists() or not has_begun(workdir):
        return
    before = read_json(path).get("data")
    if not is_like(before, {"pairs": 0, "crc32": 0}):
        raise ValueError(
            f"{path} does not tell what the run was trained on; restore it, or choose "
            f"another --workdir."
        )
    if any(before[key] != data[key] for key in ("pairs", "crc32")):
        raise ValueError(
            f"The training data are not those that {workdir} began with: "
            f"{before['pairs']} pairs there, {data['pairs']} now"
            f"{', of other words' * (before['pairs'] == data['pairs'])}; restore them, "
            f"or choose another --workdir."
        )
    if before.get("dev_crc32", data["dev_crc32"]) != data["dev_crc32"]:
        raise ValueError(
            f"The dev set is not that which {workdir} began with, so its scores would "
            f"not compare; restore it, or choose another --workdir."
        )
