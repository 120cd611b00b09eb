"""What train.py and eval.py leave in a sweep's workdir, without training."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

from headcount.configs import base
from headcount.runtime.workdir import with_digest, write_json
from headcount.sweeps import report
from headcount.sweeps.settings import Options
from headcount.sweeps.store import Sweep
from headcount.sweeps.table import collect

ROOT = Path(__file__).resolve().parent.parent.parent
RATE = "optimizer.learning_rate"
LINES = [f"the dog number {i} sleeps in the sun" for i in range(12)]
EVALUATION = {"beam_size": 5}  # options that eval.py used
ABLATION = '''
def sizes(base):
    """Which width?

    Scientific: model.mlp_dim.
    Nuisance: optimizer.learning_rate.
    Fixed: the rest.
    """
    BODY
'''
TINY = {
    "data.vocab_size": 80,
    "model.width": 32,
    "model.mlp_dim": 32,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
}


def write_corpus(folder):
    """Write text files with the same pairs in every split."""
    folder.mkdir()
    for split in ("train", "val", "test"):
        for language in ("en", "de"):
            text = "".join(f"{line}\n" for line in LINES)
            (folder / f"{split}.{language}").write_text(text)
    return folder


def options(workdir, corpus, **changes) -> Options:
    """Return the flags of a sweep of two seeds and three arms, K=4, K=2 and K=1."""
    config = base.get_config()
    config.update_from_flattened_dict(
        TINY
        | {
            "data.name": "text",
            "data.directory": str(corpus),
            "train.num_steps": 20,
            "train.best_metric": "bleu",
        }
    )
    given = {
        "verb": "run",
        "workdir": workdir,
        "proposes": True,
        "config": config.lock(),
        "config_file": "configs/base.py",
        "overrides": {"train.num_steps": 20},
        "ablation": "kv_heads",
        "seeds": 2,
        "checkpoint": "best",
    }
    return Options(**(given | changes))


def only_workdir(given: Options, **changes) -> Options:
    """Return the flags of a later call that names the workdir alone."""
    return given._replace(config=None, ablation=None, seeds=None)._replace(**changes)


def write_ablation(tmp_path, body: str) -> str:
    """Write an ablation into a file of its own; return its name for --ablation."""
    path = tmp_path / "own.py"
    path.write_text(ABLATION.replace("BODY", body))
    return f"{path}:sizes"


def write_run(folder, status: str = "finished", **changes) -> None:
    """Write a run.json."""
    run = {"format_version": 1, "status": status, "num_parameters": 9000}
    run |= {"devices": ["cpu: cpu"], "attention": {"cross": "x"}}
    run |= {"versions": {"jax": "1"}, "python": "3", "commit": "c0ffee"}
    (folder / "run.json").write_text(json.dumps(run | changes))


def finish(sweep: Sweep, index: int, *, dev=30.0, test=40.0, splits=("val", "test")):
    """Leave in a group's folder what train.py and eval.py would.

    A trial's score is `dev` or `test`, plus its seed (that of a search less 1,000,000),
    plus 100 times its learning rate if that is tuned.
    """
    group = sweep.groups[index]
    folder = sweep.folder(group)
    lines = []
    for step in (10, 20):
        for trial in range(len(group.trials)):
            rates = {"steps_per_second": 2.0, "tokens_per_second": 1000.0}
            lines.append({"step": step, "trial": trial, "loss": 3.0, **rates})
            scores = {"dev_bleu": dev + step / 10, "dev_loss": 3 - step / 10}
            lines.append({"step": step, "trial": trial, **scores})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 2')  # cut off by a kill
    write_run(folder)
    for split in splits:
        rows = []
        for i, trial in enumerate(group.trials):
            rate = trial.nuisance.get(RATE, 0)
            seed = trial.seed % 1_000_000
            score = (dev if split == "val" else test) + seed + 100 * rate
            rows.append(
                {
                    "trial": i,
                    "step": 20,
                    "split": split,
                    "checkpoint": "best",
                    "diverged_at": None,
                    "examples": len(LINES),
                    "options": EVALUATION,
                    "signatures": {"bleu": "nrefs:1", "chrf": "nc:6"},
                    "bleu": score,
                    "chrf": score + 10,
                    "exact_match": 0.5,
                    "loss": 2 - score / 100 + index * seed / 100,
                }
            )
            suffix = f"-{i}" if len(group.trials) > 1 else ""
            predictions = [line.replace("sun", f"{score:.0f}") for line in LINES]
            path = folder / f"{split}{suffix}.txt"
            path.write_text("\n".join(predictions) + "\n")
        write_json(folder / f"result-{split}.json", [with_digest(r) for r in rows])


def finish_all(sweep: Sweep) -> None:
    """Finish every group."""
    for index in range(len(sweep.groups)):
        finish(sweep, index)


def edit_results(sweep: Sweep, index: int, edit, splits=("val", "test")) -> None:
    """Replace the rows of a group's results by `edit(row)`."""
    for split in splits:
        path = sweep.folder(sweep.groups[index]) / f"result-{split}.json"
        rows = json.loads(path.read_text())
        write_json(path, [with_digest(without_digest(edit(row))) for row in rows])


def without_digest(row: dict) -> dict:
    """Return a row as eval.py has it before it adds the digest."""
    return {key: value for key, value in row.items() if key != "digest"}


def statuses(sweep: Sweep) -> dict[str, str]:
    """Return the status of the trials by arm, which all trials of an arm share."""
    found = {}
    for row in collect(sweep):
        assert found.setdefault(row["arm"], row["status"]) == row["status"]
    return found


def write_report(sweep: Sweep, num_examples: int = 5) -> str:
    """Write the report; return its Markdown."""
    report.write(sweep, collect(sweep), num_examples)
    return (sweep.workdir / "report.md").read_text()


def read_table(workdir) -> list[dict]:
    """Read sweep.sqlite."""
    with sqlite3.connect(workdir / "sweep.sqlite") as database:
        database.row_factory = sqlite3.Row
        rows = [dict(row) for row in database.execute("SELECT * FROM trials")]
    database.close()
    return rows


def start_instead(runner, train: str, score: str = "") -> list[subprocess.Popen]:
    """Let a runner start Python programs instead of train.py and eval.py.

    `FOLDER` in them stands for the group's folder.
    """
    started = []

    def start(group, splits, **given):
        text = train if splits is None else score
        text = text.replace("FOLDER", repr(str(runner.sweep.folder(group))))
        started.append(subprocess.Popen([sys.executable, "-c", text], **given))
        return started[-1]

    runner.start = start
    return started


# A program for `start_instead` that finishes a training at once.
FINISH = """
import json, pathlib
run = {"format_version": 1, "status": "finished", "num_parameters": 1, "devices": []}
run |= {"attention": {}, "versions": {}, "python": "3", "commit": None}
run["devices"] = ["cpu"]
pathlib.Path(FOLDER, "run.json").write_text(json.dumps(run))
"""
