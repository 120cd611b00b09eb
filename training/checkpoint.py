"""Checkpoints: written by Orbax in the background, checked when they are read.

A checkpoint holds named items (the state, the best parameters so far), each a flat
dict from a leaf's path to its array, and a checksum of every array. Of several
processes each writes and sums up what lies on its devices; each reads everything.
"""

import contextlib
import json
import logging
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from headcount.runtime import distributed as hosts
from headcount.runtime.logging import say

CHECKSUMS = "checksums"


class SaveError(OSError):
    """A checkpoint could not be written; those before it are intact."""


class Damaged(ValueError):
    """A checkpoint is not what was written."""


def flatten(tree) -> dict[str, np.ndarray | jax.Array]:
    """Every leaf under its readable path; on the host, if this process has it whole."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        path_name(path): np.asarray(leaf) if is_here(leaf) else leaf
        for path, leaf in leaves
    }


def is_here(leaf) -> bool:
    """Whether it lies on devices of this process alone."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


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


class LatestDue(NamedTuple):
    """Which checkpoints stay: the newest, and the last that were due; `keep` in all.

    One that a signal left between two that were due, or before the first update, goes
    when the next is there: what the last ones average to must not depend on where a run
    was stopped.
    """

    keep: int | None  # None: all
    every: int  # steps

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """For Orbax, of every checkpoint, ascending."""
        del context
        *steps, newest = (checkpoint.step for checkpoint in checkpoints)
        due = [step for step in steps if step and step % self.every == 0]
        if self.keep is not None:
            due = due[max(len(due) + 1 - self.keep, 0) :]
        return [checkpoint.step in (*due, newest) for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of a workdir, of which the last `keep` stay; None: read only.

    They are due `every` so many steps; see `LatestDue` for those that are not.

    Raises:
        ValueError: a file is where their folder must be.
    """

    def __init__(self, workdir: Path, keep: int | None = None, every: int = 1):
        sys.unraisablehook = but_closed_loops(sys.unraisablehook)
        self.directory, self.keep = (workdir / "checkpoints").absolute(), keep
        self.aside = self.directory.parent / "damaged"
        if self.directory.is_file():  # Orbax would say so at the first save
            raise ValueError(
                f"{self.directory} is a file where the folder of the checkpoints must "
                f"be; move it away, or choose another --workdir."
            )
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=LatestDue(keep, every),
                cleanup_tmp_directories=keep is not None,
                read_only=keep is None,
                create=keep is not None,
            ),
        )
        here = jax.process_index()  # to read, no process waits for another
        self.reader = ocp.PyTreeCheckpointHandler(
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=here, active_processes={here}
            )
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
        for others in hosts.share(sums):
            for name, more in others.items():
                sums[name] |= more
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
        folder = self.directory / str(step)
        try:
            sums = json.loads((folder / CHECKSUMS / "metadata").read_text())[item]
            parts = {}  # of every array, by the place in it
            for key, checksum in sums.items():
                name, _, ends = key.partition("[")
                parts.setdefault(name, {})[ends.rstrip("]")] = checksum
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)  # on whatever devices
            arrays = self.reader.restore(
                folder / item,
                args=ocp.args.PyTreeRestore(
                    restore_args=dict.fromkeys(parts, as_numpy)
                ),
            )
            bad = [name for name in parts if not is_sound(arrays[name], parts[name])]
        except Exception as error:
            why = reason(error)
            array = re.search(r'"([^"]+)/[^"/]*" in OCDBT', why)
            what = f"{array[1]} can't be read" if array else f"it can't be read: {why}"
            raise Damaged(what) from error
        if bad or len(parts) < len(arrays):
            raise Damaged(f"{''.join(bad[:1]) or item} is not what was written")
        return unflatten(arrays, abstract)

    def steps_of_all(self) -> list[int]:
        """Steps with a checkpoint that every process sees, ascending.

        A run that is still being trained may have saved one while they looked.
        """
        seen = hosts.share(self.steps())
        return sorted(set(seen[0]).intersection(*seen))

    def read_all(self, step: int, **abstract) -> tuple[dict, str | None]:
        """Items of a checkpoint, and why it can't be used if one process can't read it.

        All processes must call it at the same place.
        """
        damage, items = None, {}
        with hosts.together():
            try:
                for item, like in abstract.items():
                    items[item] = self.read(step, item, like)
            except Damaged as error:
                damage = str(error)
        damages = [found for found in hosts.share(damage) if found is not None]
        return items, next(iter(damages), None)

    def restore_last(self, **abstract) -> tuple[int, dict] | None:
        """The step and the items of the newest checkpoint that is sound.

        Damaged ones are named, and moved out of the way unless we only read.

        Raises:
            ValueError: all are damaged; who goes on would begin anew.
        """
        for step in reversed(self.steps_of_all()):
            items, damage = self.read_all(step, **abstract)
            if damage is None:
                return step, items
            say(
                f"The checkpoint of step {step} is damaged: {damage}. "
                "Trying the one before."
            )
            if self.keep is not None:
                self.set_aside(step)
        with hosts.together():
            if self.keep is not None and self.aside.exists():
                raise ValueError(
                    f"{self.directory} holds no sound checkpoint to go on from; those "
                    f"in {self.aside} are damaged. Restore one, or choose another "
                    f"--workdir."
                )
        return None

    def set_aside(self, step: int) -> None:
        """Move a damaged checkpoint to WORKDIR/damaged."""
        aside = self.aside / str(step)
        with hosts.together():
            if hosts.is_first():
                aside.parent.mkdir(exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                # not rename: the checkpoints may be a link to another file system
                shutil.move(self.directory / str(step), aside)
        self.manager.reload()

    def close(self) -> None:
        """Wait for the last save, whatever comes of it, and stop Orbax's threads.

        After an error only where no other process would wait for what this one owes.
        """
        if sys.exc_info()[0] is not None and jax.distributed.is_initialized():
            return
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


def checksums(arrays: dict[str, np.ndarray | jax.Array]) -> dict[str, int]:
    """CRC-32 of every array's bytes; of one that lies on the devices of several
    processes, of each part that this process has the first copy of."""
    sums = {}
    for name, array in arrays.items():
        if is_here(array):
            sums[name] = crc32(array)
            continue
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                sums[name + place(shard.index, array.shape)] = crc32(shard.data)
    return sums


def place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """A part of an array, as `[0:2,4:8]`; nothing where it is the whole."""
    ends = [each.indices(n)[:2] for each, n in zip(index, shape, strict=True)]
    if all(end == (0, n) for end, n in zip(ends, shape, strict=True)):
        return ""
    return f"[{','.join(f'{start}:{stop}' for start, stop in ends)}]"


def is_sound(array: np.ndarray, parts: dict[str, int]) -> bool:
    """Whether checksums by the place, see `place`, cover an array and are right."""
    covered = 0
    for ends, checksum in parts.items():
        index = [slice(*map(int, end.split(":"))) for end in ends.split(",") if end]
        part = array[tuple(index)]
        if crc32(part) != checksum:
            return False
        covered += part.size
    return covered == array.size


def crc32(array) -> int:
    """Of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).data)


def reason(error: BaseException) -> str:
    """The part of an error that fits into a sentence: the system's own, if any."""
    text = str(error).strip() or type(error).__name__
    system = re.search(r": ([^:]+) \[os_error_code", text)
    if system:
        return system.group(1)
    return text.splitlines()[0][:300].rstrip(".")
