"""Where groups run: here, on a Ray cluster, or as a Slurm array."""

from sweeps.runner import Runner, Sweep


def local(sweep: Sweep, indices: list[int], address: str | None) -> list[dict]:
    """Run groups here, on every local device; returns the table's rows."""
    del address
    return Runner(sweep, indices).run()


LAUNCHERS = {"local": local}
