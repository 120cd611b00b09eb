"""Edit the files of runs and sweeps at random, and check that readers fail cleanly.

python -m headcount.benchmarks.fuzz_files --minutes=5

Readers get files in which one value was replaced, removed or added. They must either
return, or raise a ValueError or OSError, which scripts print as one sentence. Cases
found so far are in tests/runtime/test_schema.py.
"""

import copy
import json
import tempfile
import time
from pathlib import Path

import hypothesis
from absl import app, flags
from hypothesis import strategies as st

from headcount.configs import base
from headcount.configs.run import load_config
from headcount.configs.validation import flat
from headcount.runtime.workdir import read_json, with_digest, write_json
from headcount.sweeps import settings, status, table
from headcount.training.metrics import read_metrics
from headcount.training.trials import check_trials, head_gates

MINUTES = flags.DEFINE_float("minutes", 5.0, "How long to go on.", 0.0)
SEED = flags.DEFINE_integer("fuzz_seed", 0, "Seed of the first round.", 0)

TEXTS = st.sampled_from(
    ["", "0", "x", "../x", "model.width", "\0", "\ud800", "é" * 300]
)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308])
SPECIAL = st.sampled_from([float("nan"), float("inf"), None, True, False, [], {}])
LEAVES = st.one_of(TEXTS, NUMBERS, SPECIAL)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner),
    max_leaves=4,
)


def places(tree, path=()) -> list[tuple]:
    """Return the path of every value in a JSON tree, including the root's."""
    paths = [path]
    items = tree.items() if isinstance(tree, dict) else ()
    items = enumerate(tree) if isinstance(tree, list) else items
    for key, value in items:
        paths += places(value, (*path, key))
    return paths


def edited(tree, data: st.DataObject):
    """Replace, remove or add one value in a copy of a JSON tree."""
    *path, last = (None, *data.draw(st.sampled_from(places(tree))))
    if last is None:
        return data.draw(VALUES)
    tree = copy.deepcopy(tree)
    parent = tree
    for key in path[1:]:
        parent = parent[key]
    action = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    if action == "remove":
        del parent[last]
    elif action == "add" and isinstance(parent, dict):
        parent[data.draw(TEXTS)] = data.draw(VALUES)
    else:
        parent[last] = data.draw(VALUES)
    return tree


def read_run(folder: Path) -> None:
    """Read a run's files like eval.py, predict.py and heads.py."""
    config = flat(load_config(folder / "config.json").to_dict())
    trials = read_json(folder / "trials.json")
    check_trials(folder / "trials.json", trials, config)
    head_gates(config, trials)
    read_json(folder / "run.json")
    read_metrics(folder)


def read_sweep(workdir: Path) -> None:
    """Read a sweep's files like `sweep.py status`."""
    sweep = settings.open_sweep(settings.Options("status", workdir))
    status.print_status(sweep, table.make_rows(sweep))


def make_sweep(workdir: Path) -> None:
    """Write the files of a sweep whose first group is trained and scored."""
    config = base.get_config()
    config.model.num_encoder_layers = config.model.num_decoder_layers = 1
    given = {"config": config.lock(), "config_file": "configs/base.py"}
    given |= {"overrides": {}, "ablation": "kv_heads", "seeds": 2, "proposes": True}
    sweep = settings.open_sweep(settings.Options("run", workdir, **given))
    group = sweep.groups[0]
    folder = sweep.folder(group)
    row = {"step": 20, "checkpoint": "best", "diverged_at": None}
    row |= {"options": {"beam_size": 5}, "signatures": {}}
    row |= {metric.name: 0.5 for metric in sweep.task.metrics}
    for split in sweep.splits(group):
        rows = [with_digest({"trial": i} | row) for i, _ in enumerate(group.trials)]
        write_json(folder / f"result-{split}.json", rows)
    run = {"format_version": 1, "status": "finished", "num_parameters": 9}
    run |= {"devices": ["cpu"], "attention": {}, "versions": {}, "python": "3"}
    write_json(folder / "run.json", run | {"commit": None})
    rows = [{"step": s, "trial": t, "loss": 3.0} for s in (10, 20) for t in (0, 1)]
    rows = [r | {"steps_per_second": 2.0, "tokens_per_second": 9.0} for r in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def make_run(folder: Path) -> None:
    """Write the files of a run, without checkpoints."""
    write_json(folder / "config.json", base.get_config().to_dict())
    gates = {"head_gates.cross.0.1": 0.0, "optimizer.learning_rate": 0.1}
    write_json(folder / "trials.json", [{"seed": 0}, {"seed": 1} | gates])
    write_json(folder / "run.json", {"format_version": 1, "status": "finished"})
    (folder / "metrics.jsonl").write_text('{"step": 1, "trial": 0, "loss": 3.0}\n')


def check_once(path: Path, read, folder: Path, data: st.DataObject) -> None:
    """Edit one file, read everything, and put the file back."""
    kept = path.read_text()
    lines = kept.splitlines() if path.suffix == ".jsonl" else [kept]
    index = data.draw(st.integers(0, len(lines) - 1))
    lines[index] = json.dumps(edited(json.loads(lines[index]), data))
    try:
        path.write_text("\n".join(lines) + "\n")
        read(folder)
    except (ValueError, OSError) as error:
        assert str(error), "an error must say something"
    finally:
        path.write_text(kept)


def fuzz(folder: Path, seed: int, examples: int) -> None:
    """Edit every file of a run and of a sweep `examples` times."""
    run, sweep = folder / "run", folder / "sweep"
    if not run.exists():
        run.mkdir()
        make_run(run)
        make_sweep(sweep)
    targets = [(path, read_run, run) for path in sorted(run.iterdir())]
    files = (p for p in sorted(sweep.rglob("*.json*")) if p.is_file())
    targets += [(path, read_sweep, sweep) for path in files]
    for path, read, where in targets:
        print(f"seed {seed}: {path.relative_to(folder)}", flush=True)
        fuzz_file(path, read, where, seed, examples)


def fuzz_file(path: Path, read, folder: Path, seed: int, examples: int) -> None:
    """Edit a file `examples` times; propagate any exception that is not allowed."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.data())
    def check(data):
        check_once(path, read, folder, data)

    check()


def main(_) -> None:
    """Fuzz until the time is up, with a new seed in every round."""
    end, seed = time.monotonic() + 60 * MINUTES.value, SEED.value
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            fuzz(Path(folder), seed, 40)
            seed += 1
    print(f"{seed - SEED.value} rounds found nothing.")


if __name__ == "__main__":
    app.run(main)
