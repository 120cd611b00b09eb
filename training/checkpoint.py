"""Checkpoints: written by Orbax in the background, verified when they are read.

A checkpoint holds named items (the parameters, the optimizer state, ...), each a flat
dict from a leaf's path to its array, and a checksum of every array. In a multi-process
run, each process writes the shards on its own devices and reads the whole checkpoint.
"""

import contextlib
import json
import logging
import shutil
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from headcount.runtime import distributed
from headcount.runtime.logging import first_line, say

CHECKSUMS = "checksums"


def is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Return whether to keep a record of absl's log, which also has Orbax's records.

    They are redundant: this module raises or logs Orbax's warnings and errors itself.
    """
    return "orbax" not in record.pathname


class SaveError(OSError):
    """A checkpoint could not be written; earlier checkpoints are intact."""


class Damaged(ValueError):
    """A checkpoint can't be read, or its content does not match its checksums."""


def flatten(tree) -> dict[str, np.ndarray | jax.Array]:
    """Flatten a tree to a dict from path name to leaf.

    Fully addressable leaves are copied to the host; others stay on their devices.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for _, leaf in leaves:
        if isinstance(leaf, jax.Array) and is_here(leaf):
            leaf.copy_to_host_async()
    return {
        path_name(path): np.asarray(leaf) if is_here(leaf) else leaf
        for path, leaf in leaves
    }


def is_here(leaf) -> bool:
    """Return whether every shard of an array is on a device of this process."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def path_name(path) -> str:
    """Return a leaf's path in a tree, as in `params.encoder.0.mlp.up.kernel.value`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def unflatten(arrays: dict[str, np.ndarray], abstract):
    """Arrange arrays into a tree like `abstract`.

    Raises:
        ValueError: a leaf is missing or has another shape.
    """

    def leaf(path, expected):
        name = path_name(path)
        if name not in arrays:
            raise ValueError(f"The checkpoint has no {name}: it is of another model.")
        if arrays[name].shape != expected.shape:
            raise ValueError(
                f"The checkpoint's {name} has shape {arrays[name].shape}, "
                f"the config's {expected.shape}: it is of another model."
            )
        return arrays[name]

    return jax.tree_util.tree_map_with_path(leaf, abstract)


class KeepLatestDue(NamedTuple):
    """Keep the newest checkpoint and the last scheduled ones, `keep` in total.

    A checkpoint that a signal caused between two scheduled ones is deleted after the
    next save: the average of the last checkpoints must not depend on where a run was
    interrupted.
    """

    keep: int | None  # None: all
    every: int  # steps

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Return whether to keep each checkpoint, in ascending order (Orbax's API)."""
        del context
        *steps, newest = (checkpoint.step for checkpoint in checkpoints)
        due = [step for step in steps if step and step % self.every == 0]
        if self.keep is not None:
            due = due[max(len(due) + 1 - self.keep, 0) :]
        return [checkpoint.step in (*due, newest) for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of a workdir.

    Args:
        workdir: the run's folder.
        keep: number of checkpoints to keep; None opens them read-only.
        every: steps between scheduled checkpoints; see `KeepLatestDue` for others.

    Raises:
        ValueError: the path of the checkpoint folder is a file.
    """

    def __init__(self, workdir: Path, keep: int | None = None, every: int = 1):
        sys.unraisablehook = ignore_closed_event_loops(sys.unraisablehook)
        logging.getLogger("absl").addFilter(is_not_from_orbax)
        for name in ("asyncio", "concurrent.futures"):
            # else a failed save may print a traceback before `wait` raises its error
            logging.getLogger(name).disabled = True
        self.directory = (workdir / "checkpoints").absolute()
        self.damaged = self.directory.parent / "damaged"
        if self.directory.is_file():  # Orbax would only notice at the first save
            raise ValueError(
                f"{self.directory} is a file where the folder of the checkpoints must "
                f"be; move it away, or choose another --workdir."
            )
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=KeepLatestDue(keep, every),
                cleanup_tmp_directories=keep is not None,
                read_only=keep is None,
                create=keep is not None,
            ),
        )
        process = jax.process_index()  # processes read without waiting for each other
        self.reader = ocp.PyTreeCheckpointHandler(
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=process, active_processes={process}
            )
        )

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, ascending."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, **items) -> None:
        """Write items in the background, unless the step already has a checkpoint.

        Raises:
            SaveError: this save, or the previous background save, failed.
        """
        if step in self.steps():
            return
        flat = {name: flatten(tree) for name, tree in items.items()}
        args = {name: ocp.args.StandardSave(arrays) for name, arrays in flat.items()}
        sums = {name: checksums(arrays) for name, arrays in flat.items()}
        for process_sums in distributed.gather(sums):
            for name, item_sums in process_sums.items():
                sums[name] |= item_sums
        args[CHECKSUMS] = ocp.args.JsonSave(sums)
        try:
            self.manager.save(step, args=ocp.args.Composite(**args))
        except Exception as error:
            raise self.save_error(error) from error

    def wait(self) -> None:
        """Wait for the background save to finish.

        Raises:
            SaveError: the save failed.
        """
        try:
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        except Exception as error:
            raise self.save_error(error) from error

    def save_error(self, error: Exception) -> SaveError:
        """Return an error that names the last intact checkpoint."""
        free = shutil.disk_usage(self.directory).free
        last = max(
            (int(p.name) for p in self.directory.iterdir() if p.name.isdigit()),
            default=None,
        )
        intact = "none was written before" if last is None else f"step {last} is intact"
        return SaveError(
            f"A checkpoint could not be written to {self.directory} "
            f"({free / 2**20:.0f} MiB free there): {first_line(error)}; {intact}. "
            f"Free some space if it is needed, and rerun the same command."
        )

    def read(self, step: int, item: str, abstract):
        """Read one item of one checkpoint to the host.

        Raises:
            Damaged: the item can't be read, or a checksum is wrong.
            ValueError: the item belongs to another model.
        """
        folder = self.directory / str(step)
        try:
            sums = json.loads((folder / CHECKSUMS / "metadata").read_text())[item]
            parts = {}  # array name -> {slice: checksum}
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
        except Exception as error:  # TensorStore raises many types
            raise Damaged(f"it can't be read: {first_line(error)}") from error
        if bad or len(parts) < len(arrays):
            raise Damaged(f"{''.join(bad[:1]) or item} has a wrong checksum")
        return unflatten(arrays, abstract)

    def steps_of_all(self) -> list[int]:
        """Return the steps whose checkpoint every process sees, ascending.

        Processes may see different steps if the run is still training and saving.
        """
        steps = distributed.gather(self.steps())
        return sorted(set(steps[0]).intersection(*steps))

    def read_all(self, step: int, **abstract) -> tuple[dict, str | None]:
        """Read items of a checkpoint in every process.

        This is a collective operation: every process must call it.

        Returns:
            The items, and the reason why some process could not read them, or None.
        """
        damage, items = None, {}
        with distributed.fail_together():
            try:
                for item, like in abstract.items():
                    items[item] = self.read(step, item, like)
            except Damaged as error:
                damage = str(error)
        damages = [x for x in distributed.gather(damage) if x is not None]
        return items, next(iter(damages), None)

    def restore_last(self, **abstract) -> tuple[int, dict] | None:
        """Read the newest intact checkpoint; return its step and items, or None.

        Newer, damaged checkpoints are logged and moved to WORKDIR/damaged.

        Raises:
            ValueError: all checkpoints are damaged. Training must not silently start
                over. The files stay where they are, because another program may have
                written them.
        """
        damaged = []
        for step in reversed(self.steps_of_all()):
            items, damage = self.read_all(step, **abstract)
            if damage is None:
                for damaged_step in damaged:
                    self.set_aside(damaged_step)
                return step, items
            damaged.append(step)
            say(
                f"The checkpoint of step {step} is damaged ({damage}); trying the one "
                f"before it."
            )
        with distributed.fail_together():
            if damaged or self.damaged.exists():
                folder = self.directory if damaged else self.damaged
                raise ValueError(
                    f"{self.directory} holds no intact checkpoint to resume from; "
                    f"those in {folder} are damaged. Restore one, or choose another "
                    f"--workdir."
                )
        return None

    def set_aside(self, step: int) -> None:
        """Move a damaged checkpoint to WORKDIR/damaged."""
        target = self.damaged / str(step)
        with distributed.fail_together():
            if distributed.is_first():
                target.parent.mkdir(exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                # not rename: the folder may be a symlink to another file system
                shutil.move(self.directory / str(step), target)
        self.manager.reload()

    def close(self) -> None:
        """Wait for the last save, whether it succeeds or not, and stop Orbax's threads.

        In a multi-process run, do nothing after an error: closing would block until
        the other processes close, too.
        """
        if sys.exc_info()[0] is not None and jax.distributed.is_initialized():
            return
        with contextlib.suppress(Exception):  # `wait` reports it
            self.manager.close()


def ignore_closed_event_loops(hook):
    """Wrap `sys.unraisablehook` to ignore errors about closed event loops.

    After a failed save, each of TensorStore's unfinished writes raises one in a
    destructor. `wait` raises the error that matters.
    """

    def filtered(stray):
        if "Event loop is closed" not in str(stray.exc_value):
            hook(stray)

    return filtered


def checksums(arrays: dict[str, np.ndarray | jax.Array]) -> dict[str, int]:
    """Return the CRC-32 of every array's bytes.

    For an array sharded over several processes, return one checksum per shard of which
    this process holds the first replica.
    """
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
    """Format the index of a shard, such as `[0:2,4:8]`; empty for a whole array."""
    ends = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    if all(end == (0, n) for end, n in zip(ends, shape, strict=True)):
        return ""
    return f"[{','.join(f'{start}:{stop}' for start, stop in ends)}]"


def is_sound(array: np.ndarray, parts: dict[str, int]) -> bool:
    """Return whether checksums by `place` are correct and cover the whole array."""
    covered = 0
    for ends, checksum in parts.items():
        index = [slice(*map(int, end.split(":"))) for end in ends.split(",") if end]
        part = array[tuple(index)]
        if crc32(part) != checksum:
            return False
        covered += part.size
    return covered == array.size


def crc32(array) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).data)
