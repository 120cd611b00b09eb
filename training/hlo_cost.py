"""Memory traffic and communication of a compiled program, parsed from its HLO text."""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

ARRAY = re.compile(
    r"\b(?P<dtype>pred|[a-z]+\d+)(?:e\w+)?\[(?P<sizes>[\d,]*)\]"
    r"(?:\{(?P<order>[\d,]*):(?P<layout>[^}]*)\})?"
)
OPERATION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<shapes>\(.*?\)(?= [a-z])|\S+) "
    r"(?P<kind>[\w\-]+)\((?P<rest>.*)"
)
TILE = re.compile(r"T\((\d+),(\d+)\)")
NAME = re.compile(r"%([\w.\-]+)")
COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-permute"),
    "reduce-scatter",
)
# Collectives whose -start operation returns its operands together with its results.
WITH_OPERANDS = ("all-gather", "collective-permute")
FREE = {  # operations that read and write no memory
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("opt-barrier", "partition-id", "replica-id", "iota"),
}
BRANCHES = ("branch_computations", "true_computation", "false_computation")
PARTS = {"slice", "dynamic-slice", "gather"}  # read only a part of operand 0


class Operation(NamedTuple):
    """An HLO operation."""

    name: str
    shapes: str  # of the results
    kind: str
    operands: list[str]
    rest: str  # rest of the line, from the operands on
    is_root: bool  # whether it produces the results of its computation

    def called(self, *kinds: str) -> list[str]:
        """Return the computations named by attributes such as `body`, `condition`."""
        named = "|".join(kinds)
        lists = re.findall(rf"\b(?:{named})=({{[^}}]*}}|%[\w.\-]+)", self.rest)
        return NAME.findall(" ".join(lists))


class Program:
    """The computations of a compiled program, parsed from `compiled.as_text()`.

    Args:
        text: the program's HLO.
        rounds: iterations to assume for loops whose trip count is unknown.
    """

    def __init__(self, text: str, rounds: float = 1):
        self.rounds = rounds
        self.computations: dict[str, dict[str, Operation]] = {}
        self.entry = None
        # "" collects operations outside of any computation
        computation = self.computations.setdefault("", {})
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                name = line.removeprefix("ENTRY ").lstrip("%").split()[0]
                computation = self.computations[name] = {}
                self.entry = name if line.startswith("ENTRY") else self.entry
            elif match := OPERATION.match(line):
                operands = NAME.findall(match["rest"].split(")", 1)[0])
                computation[match["name"]] = Operation(
                    *match.group("name", "shapes", "kind"),
                    operands,
                    match["rest"],
                    match["root"] is not None,
                )
        self.entry = self.entry or ""
        self.part_of = cache(self._part_of)

    def executed(
        self, computation: str, fused: bool = False
    ) -> Iterator[tuple[Operation, str, float]]:
        """Yield the operations of a computation, including loop bodies and branches.

        All branches of a conditional are included.

        Args:
            computation: its name.
            fused: whether to include the conditions of loops and the operations inside
                fusions, too.

        Yields:
            The operation, the name of its computation, and its execution count.
        """
        for operation in self.computations[computation].values():
            kinds = ["body", *BRANCHES, *["to_apply"] * (operation.kind == "call")]
            inside = operation.called(*kinds, *["condition", "calls"] * fused)
            for name in inside:
                for within, inner_computation, times in self.executed(name, fused):
                    yield within, inner_computation, times * self._rounds(operation)
            if not inside and operation.kind not in FREE:
                yield operation, computation, 1

    def _rounds(self, operation: Operation) -> float:
        """Return a loop's trip count, from its annotation or its condition."""
        if operation.kind != "while":
            return 1
        if annotation := re.search(r"known_trip_count\D*(\d+)", operation.rest):
            return int(annotation[1])
        for name in operation.called("condition"):
            condition = self.computations[name]
            root = next(x for x in condition.values() if x.is_root)
            last = condition.get(root.operands[-1], root)
            number = last.rest.split(")")[0]
            if "direction=LT" in root.rest and last.kind == "constant":
                return int(number) if number.isdigit() else self.rounds
        return self.rounds

    def traffic(self) -> tuple[float, float]:
        """Return the bytes moved to and from memory, and the number of operations.

        Every operation is taken to read its operands and write its results once.
        Arrays in the chip's own fast memory don't count. Of an array that is sliced or
        updated in place, only the part that is used counts.
        """
        total = number = 0
        for operation, computation, times in self.executed(self.entry):
            number += times * (not operation.kind.endswith("-done"))
            total += times * self._bytes(operation, self.computations[computation])
        return total, number

    def _bytes(self, operation: Operation, computation: dict[str, Operation]) -> int:
        kind = operation.kind
        if kind.endswith("-done"):
            return 0
        if kind in ("copy-start", "slice-start"):  # from or to the fast memory
            arrays = [a for a in ARRAY.finditer(operation.shapes) if a["sizes"]]
            return min(map(_bytes_of, arrays), default=0)
        if kind.endswith("-start"):  # its results hold its operands
            return array_bytes(operation.shapes)
        if kind in PARTS:
            return 2 * array_bytes(operation.shapes)
        reads, writes = {}, array_bytes(operation.shapes)
        if kind == "dynamic-update-slice":  # in place
            update = computation.get(operation.operands[1], operation)
            reads, writes = {0: 0}, min(writes, array_bytes(update.shapes))
        if kind == "fusion":
            (fused,) = operation.called("calls")
            reads, parts = self.part_of(fused)
            writes = min(writes, parts)  # less where they stay in the fast memory
        # reversed: a repeated operand is read once; keep its first index
        indices = {name: i for i, name in reversed([*enumerate(operation.operands)])}
        for name, index in indices.items():
            size = array_bytes(computation[name].shapes) if name in computation else 0
            writes += min(size, reads.get(index, size))
        return writes

    def _part_of(self, fused: str) -> tuple[dict[int, int], int]:
        """Return the bytes that a fusion reads, by operand, and the bytes it writes.

        Operands of which it reads everything are left out.
        """
        operations = self.computations[fused]
        users = {name: [] for name in operations}
        for operation in operations.values():
            for index, name in enumerate(operation.operands):
                users.get(name, []).append((operation, index))
        reads, writes = {}, 0
        for name, operation in operations.items():
            if operation.kind == "parameter":
                partly = [_used(*user) for user in users[name]]
                if None not in partly:
                    reads[int(operation.rest.split(")")[0])] = sum(partly)
            if operation.is_root:
                results = [operation]
                if operation.kind == "tuple":
                    results = [operations[name] for name in operation.operands]
                for result in results:
                    if result.kind == "dynamic-update-slice":
                        result = operations[result.operands[1]]
                    writes += array_bytes(result.shapes)
        return reads, writes

    def collectives(self) -> dict[str, tuple[int, int]]:
        """Return the count and result bytes of each kind of collective.

        Operations of the same kind and channel count once: the TPU compiler splits one
        collective into several operations.
        """
        totals, counted = {}, set()
        for operation, _, times in self.executed(self.entry, fused=True):
            kind = operation.kind.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            channel = re.search(r"channel_id=(\d+)", operation.rest)
            if channel and (kind, channel[1]) in counted:
                continue
            counted.add((kind, channel and channel[1]))
            arrays = list(ARRAY.finditer(operation.shapes))
            if operation.kind.endswith("-start") and kind in WITH_OPERANDS:
                # drop scalars, which are context, and then the operands
                arrays = [array for array in arrays if array["sizes"]]
                arrays = arrays[len(arrays) // 2 :]
            count, size = totals.get(kind, (0, 0))
            size += times * sum(_bytes_of(array, tiled=False) for array in arrays)
            totals[kind] = (count + times, size)
        return totals


def _used(user: Operation, index: int) -> int | None:
    """Return how many bytes of an operand an operation uses; None means all."""
    if index == 0 and user.kind in PARTS:
        return array_bytes(user.shapes)
    return 0 if index == 0 and user.kind == "dynamic-update-slice" else None


def array_bytes(shapes: str) -> int:
    """Return the bytes of arrays in a chip's main memory, tile padding included."""
    return sum(
        _bytes_of(array)
        for array in ARRAY.finditer(shapes)
        if "S(" not in (array["layout"] or "")
    )


def _bytes_of(array: re.Match, tiled: bool = True) -> int:
    sizes = [int(size) for size in array["sizes"].split(",") if size]
    tile = TILE.match(array["layout"] or "")
    if tiled and tile and len(sizes) > 1:
        order = [int(axis) for axis in array["order"].split(",")]
        for axis, multiple in zip(order, (int(tile[2]), int(tile[1])), strict=False):
            sizes[axis] = -(-sizes[axis] // multiple) * multiple
    bits = 8 if array["dtype"] == "pred" else int(re.sub(r"\D", "", array["dtype"]))
    return math.prod(sizes) * bits // 8
