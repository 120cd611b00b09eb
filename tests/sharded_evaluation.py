"""Prints scores, and the rows that each device computes, for test_sharding.py.

On meshes of CPU devices, for untrained models of three tasks with two trials each.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from headcount.analysis.heads import importance
from headcount.runtime import sharding
from tests.tasks import test_classification, test_masked_language_model
from tests.tasks.test_language_model import TRAIN, VAL
from tests.tasks.test_language_model import make_task as make_language_model
from tests.tasks.untrained import evaluate, untrained_run


def language_model(folder):
    for split, texts in (("train", TRAIN), ("val", VAL)):
        (folder / f"{split}.txt").write_text("\n\n".join(texts))
    return make_language_model(folder)


TASKS = {
    "language_model": language_model,
    "classification": test_classification.make_task,
    "masked_language_model": test_masked_language_model.make_task,
}


def main():
    rows, over_data = set(), sharding.over_data

    def watched(batch):
        batch = over_data(batch)
        for leaf in jax.tree.leaves(batch):
            shards = getattr(leaf, "addressable_shards", None)
            part = shards[0].data if shards else leaf
            rows.add((len(part), len(leaf)))
        return batch

    sharding.over_data = watched
    found = []
    for name, make in TASKS.items():
        with tempfile.TemporaryDirectory() as folder:
            task = make(Path(folder))
            run, examples = untrained_run(task, scale=3.0), task.load("val")
            for shape in json.loads(sys.argv[1]):
                devices = jax.devices()[: int(np.prod(list(shape.values())))]
                mesh = sharding.make_mesh(shape, 2, 6, devices)
                where = sharding.named(mesh, "trial")
                params = jax.device_put(run.params, where)
                rows.clear()
                run = run._replace(params=params, mesh=mesh)
                scores = evaluate(run, examples)
                scores = [
                    {key: x for key, x in row.items() if isinstance(x, float)}
                    for row in scores
                ]
                if name == "language_model":
                    heads = importance(run, examples, trial=1, is_full=False)
                    added = [row["added_loss"] for row in heads]
                    scores.append(dict(zip("0123", added, strict=False)))
                found.append({"task": name, "scores": scores, "rows": sorted(rows)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
