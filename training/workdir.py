"""A run's folder: whose it is, and what is recorded there."""

import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
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


@contextlib.contextmanager
def claim(workdir: Path, config: dict, trials: list[dict]):
    """Make the workdir this config's and these trials', and this process's alone.

    Raises:
        ValueError: it holds another run, or another process is at it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process is training in {workdir}; wait for it, or choose "
                f"another --workdir."
            ) from None
        files = {"config.json": config, "trials.json": trials}
        differences = [
            difference
            for name, value in files.items()
            if (workdir / name).exists()
            for difference in differing(read_json(workdir / name), value)
        ]
        if differences and (workdir / "metrics.jsonl").exists():
            raise ValueError(
                f"{workdir} holds a run of another config: {summary(differences)}; "
                f"choose another --workdir, or the settings of that run."
            )
        if differences:  # a start that failed; its vocabulary is of the other config
            shutil.rmtree(workdir / "tokenizer", ignore_errors=True)
        for name, value in files.items():
            write_json(workdir / name, value)
        yield


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
    """What a file of the workdir holds.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); restore it, or train anew in another "
            f"--workdir."
        ) from None


def write_json(path: Path, value) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def environment() -> dict:
    """What a result depends on besides the config: versions, device, commit."""
    from importlib.metadata import version

    import jax

    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "sentencepiece")
    return {
        "commit": git.stdout.strip() or None,
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in packages},
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.local_devices()],
    }


def check_data(workdir: Path, data: dict) -> None:
    """Raise a ValueError where the run in the workdir was trained on other pairs."""
    path = workdir / "run.json"
    if not path.exists() or not (workdir / "metrics.jsonl").exists():
        return
    before = read_json(path).get("data")
    if before is None:
        raise ValueError(
            f"{path} does not tell what the run was trained on; restore it, or choose "
            f"another --workdir."
        )
    if before != data:
        raise ValueError(
            f"The training data are not those that {workdir} began with: "
            f"{before['pairs']} pairs there, {data['pairs']} now"
            f"{', of other words' * (before['pairs'] == data['pairs'])}; restore them, "
            f"or choose another --workdir."
        )
