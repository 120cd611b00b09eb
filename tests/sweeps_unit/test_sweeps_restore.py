"""A sweep that starts from the sweep.csv of another workdir."""

import csv
import json

import pytest
from sweep_fakes import (
    RATE,
    edit_results,
    finish,
    finish_all,
    options,
    statuses,
    write_report,
    write_run,
)

from headcount.sweeps.restore import restore
from headcount.sweeps.settings import open_sweep
from headcount.sweeps.table import LOGGED, collect, write_csv


def test_a_restored_sweep_has_the_same_table_and_report(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    edit_results(first, 1, lambda row: row | {"open_heads": 2})
    before = collect(first)
    second = open_sweep(options(tmp_path / "b", corpus))
    sweep = restore(second, tmp_path / "a/sweep.csv")
    assert collect(sweep) == before
    assert statuses(sweep) == {"K=4": "done", "K=2": "done", "K=1": "done"}
    verdicts = [(tmp_path / name / "verdicts.csv").read_text() for name in "ab"]
    assert verdicts[0] == verdicts[1] and "K=2 is " in verdicts[0]
    assert "| K=2 |" in write_report(sweep), "without predictions and curves"
    again = restore(sweep, tmp_path / "a/sweep.csv")
    assert collect(again) == before


def test_what_training_logged_is_restored(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    for index, group in enumerate(first.groups):
        warmup = group.trials[1].config["optimizer"]["warmup_steps"]
        line = {"step": warmup + 1, "trial": 1, "gradient_norm": 0.1 + index}
        line |= {"largest_gradient_norm": 1e-9, "train_loss": 1 / 3}
        line |= {"generalization_gap": 0.0}
        with (first.folder(group) / "metrics.jsonl").open("w") as file:
            file.write(json.dumps(line) + "\n")
            file.write(json.dumps({"step": 20, "trial": 0}) + "\n")
    before = collect(first)
    assert before[1]["largest_gradient_norm"] == 1e-9 and before[1]["train_loss"]
    second = open_sweep(options(tmp_path / "b", corpus))
    assert collect(restore(second, tmp_path / "a/sweep.csv")) == before


def test_a_table_of_before_something_was_logged_is_restored(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    before = collect(first)
    table = tmp_path / "a/sweep.csv"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    with table.open("w") as file:
        writer = csv.DictWriter(file, rows[0].keys() - {*LOGGED, "plan"})
        writer.writeheader()
        writer.writerows({k: row[k] for k in writer.fieldnames} for row in rows)
    second = open_sweep(options(tmp_path / "b", corpus))
    assert collect(restore(second, table)) == before


@pytest.mark.parametrize(
    "changed, culprit",
    [
        ({"looks": [2, 3], "seeds": 3}, r"looks \(there None, now \[2, 3\]\)"),
        ({"metric": "loss"}, r"metric \(there bleu, now loss\)"),
        ({"margin": "0.02"}, r"margin \(there None, now 0.02\)"),
    ],
)
def test_a_plan_can_t_be_changed_once_results_are_known(
    tmp_path, corpus, changed, culprit
):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    collect(first)
    second = open_sweep(options(tmp_path / "b", corpus, **changed))
    with pytest.raises(ValueError, match=f"--finished=.*another plan: {culprit}"):
        restore(second, tmp_path / "a/sweep.csv")
    assert not list(tmp_path.glob("b/groups/*/run.json")), "nothing was taken over"


@pytest.mark.parametrize("plan", ["{", "3", '{"seeds": 2}'])
def test_a_damaged_plan_is_named(tmp_path, corpus, plan):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    rows = [row | {"plan": plan} for row in collect(first)]
    write_csv(tmp_path / "a/sweep.csv", list(rows[0]), rows)
    second = open_sweep(options(tmp_path / "b", corpus))
    with pytest.raises(ValueError, match="is damaged: its column plan can't be read"):
        restore(second, tmp_path / "a/sweep.csv")


def test_seeds_added_to_a_restored_sweep_are_said_to_be_so(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    collect(first)
    counts = {"b": 4, "c": 5}
    for (name, seeds), source in zip(counts.items(), "ab", strict=True):
        sweep = open_sweep(options(tmp_path / name, corpus, seeds=seeds))
        sweep = restore(sweep, tmp_path / source / "sweep.csv")
        collect(sweep)
    again = open_sweep(options(tmp_path / "c", corpus, seeds=5))
    assert again.settings["earlier_seeds"] == [2, 4]
    fewer = open_sweep(options(tmp_path / "d", corpus))
    with pytest.raises(ValueError, match=r"seeds \(there 5, now 2\)"):
        restore(fewer, tmp_path / "c/sweep.csv")


def test_what_follows_a_restored_search_is_restored_too(tmp_path, corpus):
    tuned = {"tune": [f"{RATE}=0.001,0.002"]}
    first = open_sweep(options(tmp_path / "a", corpus, **tuned))
    for index in range(3):
        finish(first, index, splits=("val",))
    first = first.extended()
    finish(first, 3)
    before = collect(first)
    second = open_sweep(options(tmp_path / "b", corpus, **tuned))
    sweep = restore(second, tmp_path / "a/sweep.csv")
    assert collect(sweep) == before
    states = {(row["stage"], row["arm"]): row["status"] for row in before}
    assert list(states.values()).count("waiting") == 2, "of two arms, to be trained"


def test_finished_and_missing_seeds_of_a_group_are_told_apart(tmp_path, corpus):
    """A sweep that had got more seeds, which a new workdir puts into one group."""
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    more = open_sweep(options(tmp_path / "a", corpus, seeds=4))
    before = collect(more)
    second = open_sweep(options(tmp_path / "b", corpus, seeds=4))
    assert [len(group.trials) for group in second.groups] == [4, 4, 4]
    sweep = restore(second, tmp_path / "a/sweep.csv")
    after = collect(sweep)
    for row in before:
        done = row["seed"] < 2
        assert row["status"] == ("done" if done else "waiting")
    assert [row | {"folder": ""} for row in after] == [
        row | {"folder": ""} for row in before
    ]
    assert sorted(len(group.trials) for group in sweep.groups) == [2] * 6
    assert open_sweep(options(tmp_path / "b", corpus, seeds=4)).groups == sweep.groups


def test_a_group_is_restored_whole_or_not(tmp_path, corpus):
    """A training that diverged is over; one that is not scored on test is not."""
    first = open_sweep(options(tmp_path / "a", corpus))
    finish(first, 0)
    finish(first, 1, splits=("val",))
    folder = first.folder(first.groups[2])
    write_run(folder, "diverged")
    lines = [{"step": 7, "trial": i, "diverged_at": 5 + i} for i in range(2)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    collect(first)
    second = open_sweep(options(tmp_path / "b", corpus))
    sweep = restore(second, tmp_path / "a/sweep.csv")
    assert statuses(sweep) == {"K=4": "done", "K=2": "waiting", "K=1": "diverged"}
    rows = [row for row in collect(sweep) if row["arm"] == "K=1"]
    assert [row["diverged_at"] for row in rows] == [5, 6]
    assert not (sweep.folder(sweep.groups[1]) / "run.json").exists()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_group_in_which_one_trial_diverged_keeps_the_scores_of_the_other(
    tmp_path, corpus, lost
):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)

    def edit(row):
        return row | ({"diverged_at": 3, "bleu": None} if row["trial"] == lost else {})

    edit_results(first, 1, edit)
    before = collect(first)
    second = open_sweep(options(tmp_path / "b", corpus))
    after = collect(restore(second, tmp_path / "a/sweep.csv"))
    assert after == before
    states = [row["status"] for row in after if row["arm"] == "K=2"]
    assert states[lost] == "diverged" and states[1 - lost] == "done"


def test_a_table_of_another_config_is_named(tmp_path, corpus):
    """Rather than train everything again without a word."""
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    collect(first)
    given = options(tmp_path / "b", corpus)
    given.config.train.num_steps = 21
    with pytest.raises(ValueError, match="has no training of this sweep: its config"):
        restore(open_sweep(given), tmp_path / "a/sweep.csv")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (",is_baseline,", ",is_base,", "has no column is_baseline"),
        ('kv_heads"": 2', 'kv_heads"": 3', "arms that this sweep does not have"),
        (",best,", ",last,", "--checkpoint=last"),
        (",done,", ",fertig für heute,", "is not a complete CSV file: 'utf-8'"),
        (
            ",40.0,",
            ",,",
            "is damaged: a row of arm K=4 can't be read .it has no scores",
        ),
        (",9000,", ",many,", "is damaged: a row of arm K=4"),
        (",40.0,", ",nan,", "other.csv is damaged: test_bleu of arm K=4, seed 0"),
        (",40.0,", ",inf,", "test_bleu of arm K=4, seed 0, can't be inf"),
        (",40.0,", ",140.0,", "test_bleu of arm K=4, seed 0, can't be 140"),
        (",40.0,0.5,", ",40.0,x,", "damaged: .* of arm K=4, seed 0, can't be x"),
        (",40.0,50.0,0.5,", ",40.0,50.0,7.5,", "test_exact_match of arm K=4, seed 0"),
        ('"{""beam_size"": 5}"', "beams", "is damaged: a row of arm K=4"),
    ],
)
def test_another_table_is_named_and_nothing_written(tmp_path, corpus, old, new, named):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    collect(first)
    text = (tmp_path / "a/sweep.csv").read_text()
    assert old in text
    (tmp_path / "other.csv").write_bytes(text.replace(old, new).encode("latin-1"))
    sweep = open_sweep(options(tmp_path / "b", corpus))
    with pytest.raises(ValueError, match=named):
        restore(sweep, tmp_path / "other.csv")
    assert not list((tmp_path / "b/groups").glob("*/run.json"))


@pytest.mark.parametrize("left", [0.2, 0.5, 0.8])
def test_a_table_that_was_cut_off_is_said_to_be_so(tmp_path, corpus, left):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    collect(first)
    lines = (tmp_path / "a/sweep.csv").read_text().splitlines(keepends=True)
    lines[3] = lines[3][: int(left * len(lines[3]))]
    (tmp_path / "cut.csv").write_text("".join(lines[:4]))
    sweep = open_sweep(options(tmp_path / "b", corpus))
    with pytest.raises(ValueError, match="cut.csv is not a complete CSV file"):
        restore(sweep, tmp_path / "cut.csv")


def test_a_table_from_before_a_metric_existed_is_taken_over(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "a", corpus))
    finish_all(first)
    before = collect(first)
    text = (tmp_path / "a/sweep.csv").read_text()
    assert "_chrf" in text
    with (tmp_path / "old.csv").open("w", newline="") as file:
        rows = [
            {name: x for name, x in row.items() if not name.endswith("_chrf")}
            for row in csv.DictReader(text.splitlines())
        ]
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    again = open_sweep(options(tmp_path / "b", corpus))
    restore(again, tmp_path / "old.csv")
    after = collect(again)
    assert [row["dev_chrf"] for row in after] == [None] * len(after)
    for name in ("id", "status", "test_bleu"):
        assert [row[name] for row in after] == [row[name] for row in before]
