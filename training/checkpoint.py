"""Checkpoints: written by Orbax in the background, checked when they are read.

A checkpoint holds named items (the state, the best parameters so far), each a flat
dict from a leaf's path to its array, and a checksum of every array.
"""

import contextlib
import logging
import re
import shutil
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from training.metrics import say

CHECKSUMS = "checksums"


class SaveError(OSError):
    """A checkpoint could not be written; those before it are intact."""


class Damaged(ValueError):
    """A checkpoint is not what was written."""


def flatten(tree) -> dict[str, np.ndarray]:
    """Every leaf on the host under its readable path."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves}


def path_name(path) -> str:
    """A leaf's path in a tree, as `params.encoder.0.mlp.up.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def unflatten(arrays: dict[str, np.ndarray], abstract):
    """Put the arrays into a tree like `abstract`.

    Raises:
        ValueError: a leaf is missing or has another shape.
    """

    def leaf(path, like):
        name = path_name(path)
        if name not in arrays:
            raise ValueError(f"The checkpoint has no {name}: it is of another model.")
        if arrays[name].shape != like.shape:
            raise ValueError(
                f"The checkpoint's {name} has shape {arrays[name].shape}, "
                f"the config's {like.shape}: it is of another model."
            )
        return arrays[name]

    return jax.tree_util.tree_map_with_path(leaf, abstract)


class Checkpoints:
    """The checkpoints of a workdir, of which the last `keep` stay; None: read only."""

    def __init__(self, workdir: Path, keep: int | None = None):
        sys.unraisablehook = but_closed_loops(sys.unraisablehook)
        self.directory, self.keep = (workdir / "checkpoints").absolute(), keep
        policy = ocp.checkpoint_managers.LatestN(keep)
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                cleanup_tmp_directories=keep is not None,
                read_only=keep is None,
                create=keep is not None,
            ),
        )

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, **items) -> None:
        """Write items in the background; a step already there stays as it is.

        Raises:
            SaveError: this save, or the one before, which ran in the background.
        """
        if step in self.steps():
            return
        flat = {name: flatten(tree) for name, tree in items.items()}
        args = {name: ocp.args.StandardSave(arrays) for name, arrays in flat.items()}
        sums = {name: checksums(arrays) for name, arrays in flat.items()}
        args[CHECKSUMS] = ocp.args.JsonSave(sums)
        try:
            self.manager.save(step, args=ocp.args.Composite(**args))
        except Exception as error:
            raise self.save_error(error) from error

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            SaveError: it failed.
        """
        try:
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        except Exception as error:
            raise self.save_error(error) from error

    def save_error(self, error: Exception) -> SaveError:
        """Say what stands on disk still."""
        free = shutil.disk_usage(self.directory).free
        last = max(
            (int(p.name) for p in self.directory.iterdir() if p.name.isdigit()),
            default=None,
        )
        # Orbax looks at the clock on the wall, which may be set amid a save.
        timed_out = "timed out" in str(error)
        mend = "Run" if timed_out else "Make room and run"
        intact = "none was written before" if last is None else f"step {last} is intact"
        return SaveError(
            f"A checkpoint could not be written to {self.directory} "
            f"({free / 2**20:.0f} MiB free there): {reason(error)}; {intact}. "
            f"{mend} the same command again."
        )

    def read(self, step: int, item: str, abstract):
        """One item of one checkpoint, on the host.

        Raises:
            Damaged: it can't be read, or is not what was written.
            ValueError: it is of another model.
        """
        try:
            got = self.manager.restore(
                step,
                args=ocp.args.Composite(
                    **{
                        item: ocp.args.StandardRestore(),
                        CHECKSUMS: ocp.args.JsonRestore(),
                    }
                ),
            )
            arrays = {name: np.asarray(leaf) for name, leaf in got[item].items()}
            sums = got[CHECKSUMS][item]
        except Exception as error:
            raise Damaged(f"it can't be read: {reason(error)}") from error
        for name, checksum in checksums(arrays).items():
            if sums.get(name) != checksum:
                raise Damaged(f"{name} is not what was written")
        return unflatten(arrays, abstract)

    def restore_last(self, **abstract) -> tuple[int, dict] | None:
        """The step and the items of the newest checkpoint that is sound.

        Damaged ones are named, and moved out of the way unless we only read.
        """
        for step in reversed(self.steps()):
            try:
                return step, {
                    item: self.read(step, item, like) for item, like in abstract.items()
                }
            except Damaged as error:
                say(
                    f"The checkpoint of step {step} is damaged: {error}. "
                    "Trying the one before."
                )
                if self.keep is not None:
                    self.set_aside(step)
        return None

    def set_aside(self, step: int) -> None:
        """Move a damaged checkpoint to WORKDIR/damaged."""
        aside = self.directory.parent / "damaged" / str(step)
        aside.parent.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        (self.directory / str(step)).rename(aside)
        self.manager.reload()

    def close(self) -> None:
        """Wait for the last save, whatever comes of it, and stop Orbax's threads."""
        for name in ("asyncio", "concurrent.futures"):
            logging.getLogger(name).disabled = True  # of what `wait` reports
        with contextlib.suppress(Exception):  # `wait` reports; this only ends
            self.manager.close()


def but_closed_loops(hook):
    """A hook for stray errors, without those of TensorStore after a failed save.

    Each write still under way complains that the event loop is closed; what failed is
    in the error that `wait` raises.
    """

    def filtered(stray):
        if "Event loop is closed" not in str(stray.exc_value):
            hook(stray)

    return filtered


def checksums(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """CRC-32 of every array's bytes."""
    return {
        name: zlib.crc32(np.ascontiguousarray(array).data)
        for name, array in arrays.items()
    }


def reason(error: BaseException) -> str:
    """The part of an error that fits into a sentence: the system's own, if any."""
    text = str(error).strip() or type(error).__name__
    system = re.search(r": ([^:]+) \[os_error_code", text)
    if system:
        return system.group(1)
    return text.splitlines()[0][:300].rstrip(".")
