"""What a compiled program moves, read from its text: memory traffic, communication."""

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
WITH_OPERANDS = ("all-gather", "collective-permute")  # the result of their start
FREE = {  # nothing is read or written
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("opt-barrier", "partition-id", "replica-id", "iota"),
}
BRANCHES = ("branch_computations", "true_computation", "false_computation")
PARTS = {"slice", "dynamic-slice", "gather"}  # of their first operand


class Operation(NamedTuple):
    """An operation of a program's text."""

    name: str
    shapes: str  # of its results
    kind: str
    operands: list[str]
    rest: str  # of its line, from the operands on
    is_root: bool  # whether its results are those of its computation

    def called(self, *kinds: str) -> list[str]:
        """The computations that it names as its `body`, its `condition`, ..."""
        named = "|".join(kinds)
        lists = re.findall(rf"\b(?:{named})=({{[^}}]*}}|%[\w.\-]+)", self.rest)
        return NAME.findall(" ".join(lists))


class Program:
    """The computations of a program's text, of `compiled.as_text()`.

    `rounds` is how often a loop is taken to run whose number of rounds is not known.
    """

    def __init__(self, text: str, rounds: float = 1):
        self.rounds = rounds
        self.computations: dict[str, dict[str, Operation]] = {}
        self.entry = None
        here = self.computations.setdefault("", {})  # of lines that are in none
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                name = line.removeprefix("ENTRY ").lstrip("%").split()[0]
                here = self.computations[name] = {}
                self.entry = name if line.startswith("ENTRY") else self.entry
            elif match := OPERATION.match(line):
                operands = NAME.findall(match["rest"].split(")", 1)[0])
                here[match["name"]] = Operation(
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
        """The operations of a computation, of its loops and of all branches.

        If `fused`, of what decides on another round of a loop and of fusions, too.
        Beside each is the computation that it is in, and how often it is executed.
        """
        for operation in self.computations[computation].values():
            kinds = ["body", *BRANCHES, *["to_apply"] * (operation.kind == "call")]
            inside = operation.called(*kinds, *["condition", "calls"] * fused)
            for name in inside:
                for within, where, times in self.executed(name, fused):
                    yield within, where, times * self._rounds(operation)
            if not inside and operation.kind not in FREE:
                yield operation, computation, 1

    def _rounds(self, operation: Operation) -> float:
        """How often a loop is run: a number beside it, or that it counts up to."""
        if operation.kind != "while":
            return 1
        if known := re.search(r"known_trip_count\D*(\d+)", operation.rest):
            return int(known[1])
        for name in operation.called("condition"):
            condition = self.computations[name]
            root = next(each for each in condition.values() if each.is_root)
            last = condition.get(root.operands[-1], root)
            number = last.rest.split(")")[0]
            if "direction=LT" in root.rest and last.kind == "constant":
                return int(number) if number.isdigit() else self.rounds
        return self.rounds

    def traffic(self) -> tuple[float, float]:
        """Bytes that go to and from memory, and how many operations there are.

        Every operation reads its operands and writes its results once, but for what
        lies in a chip's own fast memory; of that of which a part is used, the part.
        """
        total = number = 0
        for operation, computation, times in self.executed(self.entry):
            number += times * (not operation.kind.endswith("-done"))
            total += times * self._bytes(operation, self.computations[computation])
        return total, number

    def _bytes(self, operation: Operation, beside: dict[str, Operation]) -> int:
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
            update = beside.get(operation.operands[1], operation)
            reads, writes = {0: 0}, min(writes, array_bytes(update.shapes))
        if kind == "fusion":
            (fused,) = operation.called("calls")
            reads, parts = self.part_of(fused)
            writes = min(writes, parts)  # less where they stay in the fast memory
        # reversed: what is an operand twice is read once, as the first
        indices = {name: i for i, name in reversed([*enumerate(operation.operands)])}
        for name, index in indices.items():
            whole = array_bytes(beside[name].shapes) if name in beside else 0
            writes += min(whole, reads.get(index, whole))
        return writes

    def _part_of(self, fused: str) -> tuple[dict[int, int], int]:
        """Bytes that a fusion reads of operands of which it uses a part; and writes."""
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
        """How many of each kind of communication there are, and bytes of their results.

        One that the TPU's compiler spreads over several operations has one channel.
        """
        found, seen = {}, set()
        for operation, _, times in self.executed(self.entry, fused=True):
            kind = operation.kind.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            channel = re.search(r"channel_id=(\d+)", operation.rest)
            if channel and (kind, channel[1]) in seen:
                continue
            seen.add((kind, channel and channel[1]))
            arrays = list(ARRAY.finditer(operation.shapes))
            if operation.kind.endswith("-start") and kind in WITH_OPERANDS:
                arrays = [array for array in arrays if array["sizes"]]  # no context's
                arrays = arrays[len(arrays) // 2 :]
            count, size = found.get(kind, (0, 0))
            size += times * sum(_bytes_of(array, tiled=False) for array in arrays)
            found[kind] = (count + times, size)
        return found


def _used(user: Operation, index: int) -> int | None:
    """Bytes that an operation uses of an operand; None: all of it."""
    if index == 0 and user.kind in PARTS:
        return array_bytes(user.shapes)
    return 0 if index == 0 and user.kind == "dynamic-update-slice" else None


def array_bytes(shapes: str) -> int:
    """Bytes that arrays take in a chip's large memory, with the padding of tiles."""
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
