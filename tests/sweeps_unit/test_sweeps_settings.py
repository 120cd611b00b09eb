"""What a workdir remembers of a sweep, what may be added, and what is an error."""

import json
import shlex
import shutil

import pytest
from sweep_fakes import (
    RATE,
    TINY,
    finish_all,
    only_workdir,
    options,
    write_ablation,
    write_report,
)

from headcount.configs import recall
from headcount.sweeps import settings
from headcount.sweeps.looks import margin_of
from headcount.sweeps.settings import SETTINGS, command_of, open_sweep, select_groups
from headcount.sweeps.table import make_rows
from tests.runs import succeed

YIELD = 'yield from ({"model.mlp_dim": F} for F in '


def stored(workdir):
    return json.loads((workdir / "sweep.json").read_text())


def test_a_workdir_remembers_its_sweep(tmp_path, corpus):
    given = options(tmp_path / "s", corpus)
    first = open_sweep(given)
    assert [arm.name for arm in first.plan.arms] == ["K=4", "K=2", "K=1"]
    again = open_sweep(only_workdir(given))
    assert again.groups == first.groups and again.settings == first.settings
    assert set(SETTINGS) == set(stored(tmp_path / "s"))


def test_a_sweep_cannot_be_opened_without_its_task(tmp_path, corpus):
    given = options(tmp_path / "s", corpus)
    open_sweep(given)
    path = tmp_path / "s" / "sweep.json"
    text = path.read_text().replace('"name": "translation"', '"name": "parity"')
    path.write_text(text)
    with pytest.raises(ValueError, match=r"task\.name.*'parity'.*--task_file"):
        open_sweep(only_workdir(given))


def test_an_error_tells_the_margins_as_numbers(tmp_path, corpus):
    given = options(tmp_path / "s", corpus, seeds=4, looks=[2, 4])
    open_sweep(given)
    with pytest.raises(ValueError, match=r"margin \(there 0.3, now 0.5\).* once\)"):
        open_sweep(given._replace(margin="0.5"))


def test_a_sweep_of_another_task_in_the_workdir_is_an_error(tmp_path, corpus):
    given = options(tmp_path / "s", corpus)
    open_sweep(given)
    config = recall.get_config().lock()
    with pytest.raises(ValueError, match="holds another sweep"):
        open_sweep(given._replace(config=config, config_file="configs/recall.py"))


def test_nothing_in_a_workdir_is_executed(tmp_path, corpus):
    """Not even an ablation that sweep.json names, if it lacks the arms."""
    touch = f"__import__('pathlib').Path({str(tmp_path / 'executed')!r}).touch()"
    body = f"{touch}; yield {{'model.mlp_dim': 32}}"
    given = options(tmp_path / "s", corpus, ablation=write_ablation(tmp_path, body))
    open_sweep(given)
    (tmp_path / "executed").unlink()
    for verb in ("run", "status", "report", "list"):
        open_sweep(only_workdir(given, verb=verb))
    path = tmp_path / "s" / "sweep.json"
    whole = stored(tmp_path / "s")
    for changes in (
        {"looks": [4, 2]},
        {"looks": [1, 2]},
        {"looks": [2, 4], "seeds": 8},
    ):
        path.write_text(json.dumps(whole | changes))
        with pytest.raises(ValueError, match="sweep.json is damaged .looks"):
            open_sweep(only_workdir(given))
    path.write_text(json.dumps(whole | {"margin": 0.0}))
    with pytest.raises(ValueError, match="sweep.json is damaged .margin must be"):
        open_sweep(only_workdir(given))
    for key in ("arms", "docstring"):
        lacking = {k: v for k, v in whole.items() if k != key}
        path.write_text(json.dumps(lacking))
        for verb in ("run", "status", "report", "list"):
            with pytest.raises(ValueError, match=f"sweep.json is damaged.*{key}"):
                open_sweep(only_workdir(given, verb=verb))
        path.write_text(json.dumps(lacking | {key: []}))
        with pytest.raises(ValueError, match=f"sweep.json is damaged.*{key}"):
            open_sweep(only_workdir(given))
    assert not (tmp_path / "executed").exists()


def test_another_format_version_is_an_error(tmp_path, corpus):
    given = options(tmp_path / "s", corpus)
    open_sweep(given)
    path = tmp_path / "s" / "sweep.json"
    path.write_text(json.dumps(stored(tmp_path / "s") | {"format_version": 99}))
    with pytest.raises(ValueError, match="sweep.json has format_version 99"):
        open_sweep(given)


@pytest.mark.parametrize("verb", ["status", "report"])
def test_looking_at_a_sweep_adds_no_groups(tmp_path, corpus, verb):
    """So anybody who may read the folder can use it."""

    def contents():
        return {p: p.stat().st_mtime_ns for p in [workdir, *workdir.rglob("*")]}

    workdir = tmp_path / "s"
    given = options(workdir, corpus)
    sweep = open_sweep(given)
    shutil.rmtree(sweep.folder(sweep.groups[2]))  # a group that is still to come
    (workdir / ".plan").unlink()  # opening a lock writes it
    before = contents()
    opened = open_sweep(given._replace(verb=verb))
    assert {row["status"] for row in make_rows(opened)} == {"waiting"}
    assert contents() == before and opened.groups == sweep.groups


CHANGES = {
    "seeds": 8,
    "looks": [2, 4, 8],
    "margin": "0.01",
    "tune": [f"{RATE}=0.001,0.002", "model.dropout=0.0,0.1"],
    "metric": "loss",
    "note": "Two words.",
    "group_size": 4,
}


def test_the_command_starts_the_same_sweep_again(tmp_path, corpus):
    overrides = TINY | {"data.name": "text", "data.directory": str(corpus)}
    overrides |= {"train.num_steps": 20, "train.best_metric": "bleu"}
    given = options(tmp_path / "s", corpus, overrides=overrides, **CHANGES)
    sweep = open_sweep(given)
    words = shlex.split(command_of(sweep))
    assert words[:3] == ["python", "sweep.py", "run"]
    assert command_of(open_sweep(only_workdir(given))) == command_of(sweep)
    # another sweep in the folder would be an error
    succeed(["sweep.py", "list", "--nocalibrate", *words[3:]])


def test_the_command_shows_settings_that_a_later_call_leaves_out(tmp_path, corpus):
    given = options(tmp_path / "s", corpus, **CHANGES)
    command = command_of(open_sweep(given))
    short = given._replace(seeds=None, looks=None, margin=None, note=None)
    assert command_of(open_sweep(short)) == command


def test_a_sweep_with_added_seeds_keeps_its_other_settings(tmp_path, corpus):
    given = options(tmp_path / "s", corpus)
    first = open_sweep(given)
    alone = only_workdir(given)
    assert open_sweep(alone).settings == first.settings
    more = open_sweep(alone._replace(seeds=3, note="Two words."))
    changed = {"seeds": 3, "note": "Two words.", "earlier_seeds": [2]}
    assert first.settings["earlier_seeds"] is None
    assert more.settings == first.settings | changed
    assert open_sweep(alone).settings == more.settings
    most = open_sweep(alone._replace(seeds=5))
    assert most.settings == more.settings | {"seeds": 5, "earlier_seeds": [2, 3]}
    assert open_sweep(alone._replace(verb="report")).settings == most.settings


def test_seeds_may_be_added_in_the_config(tmp_path, corpus):
    """They count as --seeds if they have changed, which --seeds still overrides."""
    given = options(tmp_path / "s", corpus, seeds=None)
    before = open_sweep(given).settings
    assert open_sweep(given).settings == before
    more = given._replace(config=given.config.copy_and_resolve_references())
    more.config.seeds = before["seeds"] + 2
    after = open_sweep(more).settings
    assert after["seeds"] == after["base"]["seeds"] == before["seeds"] + 2
    assert after["earlier_seeds"] == [before["seeds"]]
    less = more._replace(config=given.config)
    with pytest.raises(ValueError, match="seeds .there"):
        open_sweep(less)


def test_more_seeds_keep_existing_groups(tmp_path, corpus):
    few = open_sweep(options(tmp_path / "s", corpus))
    more = open_sweep(options(tmp_path / "s", corpus, seeds=3))
    kept = {trial.id for trial in few.plan.trials}
    assert len(more.plan.trials) == 9 and len(kept) == 6
    assert kept < {trial.id for trial in more.plan.trials}
    names = [group.name for group in more.groups]
    assert {group.name for group in few.groups} < set(names) and len(names) == 6
    again = open_sweep(options(tmp_path / "s", corpus, seeds=None))
    assert again.groups == more.groups


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"ablation": "haeds"}, "--ablation.*heads"),
        ({"seeds": 0}, "3 arms and 0 seeds"),
        ({"metric": "rouge"}, "--metric must be one of bleu, .*'rouge'"),
        ({"ablation": None}, "--config and --ablation"),
        ({"config": None, "verb": "report"}, "holds no sweep"),
        ({"verb": "report"}, "holds no sweep"),
        ({"test_split": "tset"}, "tset"),
        ({"tune": [f"{RATE}=0.1", f"{RATE}=0.2"]}, "--tune names a key twice"),
    ],
)
def test_bad_settings_leave_no_sweep(tmp_path, corpus, changes, named):
    given = options(tmp_path / "s", corpus)
    if changes.get("verb") == "report":
        given = only_workdir(given)
    with pytest.raises((ValueError, OSError), match=named):
        open_sweep(given._replace(**changes))
    assert not (tmp_path / "s").exists()


def test_the_workdir_of_a_training_run_is_named_and_left_as_it_is(tmp_path, corpus):
    given = options(tmp_path, corpus)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a training run, not a sweep"):
        open_sweep(given)
    assert not (tmp_path / "sweep.json").exists()


@pytest.mark.parametrize(
    "config, named",
    [
        ({"data.name": "numbrs"}, "numbrs"),
        ({RATE: 1e39}, RATE),
        ({"seed": 2**32 - 1}, "seed"),
    ],
)
def test_a_bad_config_leaves_no_sweep(tmp_path, corpus, config, named):
    given = options(tmp_path / "s", corpus)
    given.config.update_from_flattened_dict(config)
    with pytest.raises((ValueError, OSError), match=named):
        open_sweep(given)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "split", ["train", "val", "val[:100]", "train[50%:]", "test[:9]+val[:9]"]
)
def test_the_test_split_may_not_contain_train_or_dev(tmp_path, corpus, split):
    with pytest.raises(ValueError, match="^--test_split="):
        open_sweep(options(tmp_path / "s", corpus, test_split=split))
    assert not (tmp_path / "s").exists()


def test_data_that_scoring_needs_are_checked_before_training(
    tmp_path, corpus, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        "headcount.tasks.Translation.check_scoring",
        lambda task, split: asked.append(split),
    )
    open_sweep(options(tmp_path / "s", corpus))
    assert asked == ["val", "test"]


def test_another_sweeps_workdir_lists_the_differences(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "s", corpus))
    other = options(tmp_path / "s", corpus, ablation="heads", checkpoint="last")
    other.config.unlock()
    other.config.model.mlp_dim = 64
    message = (
        r"another sweep: ablation \(there 'kv_heads', now 'heads'\), .*mlp_dim \(there "
        r"32, now 64\), checkpoint"
    )
    with pytest.raises(ValueError, match=message):
        open_sweep(other)
    assert open_sweep(options(tmp_path / "s", corpus)).groups == first.groups


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"seeds": 1}, r"seeds \(there 2, now 1\)"),
        ({"seeds": 0}, r"seeds \(there 2, now 0\)"),
        ({"seeds": 3, "verb": "status"}, r"seeds .*status"),
        ({"seeds": 3, "verb": "list"}, r"seeds .*list"),
        ({"group_size": 1, "verb": "status"}, "group_size"),
        ({"metric": "chrf", "verb": "report"}, r"metric \(there 'bleu', now 'chrf'\)"),
        ({"metric": "rouge", "verb": "report"}, "--metric"),
        ({"match": "flops"}, r"match \(there None, now 'flops'\)"),
        ({"tune": [f"{RATE}=0.1"]}, "tune"),
    ],
)
def test_a_sweep_only_changes_by_run_with_more_seeds(tmp_path, corpus, changes, named):
    given = options(tmp_path / "s", corpus)
    open_sweep(given)
    before = stored(tmp_path / "s")
    for each in (given, only_workdir(given)):
        with pytest.raises(ValueError, match=named):
            open_sweep(each._replace(**changes))
    opened = open_sweep(given._replace(verb="report", note="For one report."))
    assert opened.settings["note"] and stored(tmp_path / "s") == before


@pytest.mark.parametrize(
    "best, metric", [("exact_match", "exact_match"), ("loss", "loss"), (None, "bleu")]
)
def test_the_metric_is_that_of_the_config(tmp_path, corpus, best, metric):
    given = options(tmp_path / "s", corpus)
    given.config.train.best_metric = best
    assert open_sweep(given).metric.name == metric
    given = options(tmp_path / "t", corpus, metric="chrf", config=given.config)
    assert open_sweep(given).metric.name == "chrf"


def test_an_edited_ablation_is_an_error_and_the_sweep_keeps_its_arms(tmp_path, corpus):
    name = write_ablation(tmp_path, YIELD + "(32, 64))")
    given = options(tmp_path / "s", corpus, ablation=name)
    first = open_sweep(given)
    assert open_sweep(given).settings == first.settings
    finish_all(first)
    edits = {
        YIELD + "(32,))": r"arm F=64 \(there .*, now 'unset'\)",
        YIELD + "(32, 64, 96))": r"arm F=96 \(there 'unset', now",
        YIELD + "(64, 32, 64) if F != 32)": "arm F=32",
        'yield {"model.mlp_dim": 64, "model.dropout": 0.2}': "arm F=32",
        'yield {"model.mlp_dim": 32}; yield {"model.mlp_dim": 64, "model.width": 64}': (
            r"arm F=64.model.width \(there 'unset', now 64\)"
        ),
    }
    for body, message in edits.items():
        write_ablation(tmp_path, body)
        with pytest.raises(ValueError, match=message):
            open_sweep(given)
    (tmp_path / "own.py").unlink()
    for verb in ("status", "report", "run"):
        again = open_sweep(only_workdir(given, verb=verb))
        assert again.groups == first.groups and again.settings == first.settings
    assert "F=64" in write_report(again)


def test_an_ablations_own_seeds_may_grow_but_not_shrink(tmp_path, corpus):
    body = 'yield from ({"model.mlp_dim": 32, "seed": s} for s in range(2))'
    given = options(tmp_path / "s", corpus, ablation=write_ablation(tmp_path, body))
    open_sweep(given)
    write_ablation(tmp_path, body.replace("range(2)", "range(1)"))
    with pytest.raises(ValueError, match=r"arm F=32.seeds \(there \[0, 1\], now \[0\]"):
        open_sweep(given)
    write_ablation(tmp_path, body.replace("range(2)", "range(3)"))
    more = open_sweep(given)
    assert len(more.plan.trials) == 3 and more.settings["earlier_seeds"] == [2]
    again = open_sweep(only_workdir(given))
    assert again.settings["earlier_seeds"] == [2]
    with pytest.raises(ValueError, match="sets the seeds of its arms"):
        open_sweep(given._replace(workdir=tmp_path / "planned", looks=[2, 4], seeds=4))


def test_of_two_sweeps_that_start_at_once_one_gets_the_workdir(
    tmp_path, corpus, monkeypatch
):
    check_splits = settings.check_splits

    def meanwhile(*arguments):
        monkeypatch.setattr(settings, "check_splits", check_splits)
        open_sweep(options(tmp_path / "s", corpus, checkpoint="last"))

    monkeypatch.setattr(settings, "check_splits", meanwhile)
    with pytest.raises(ValueError, match=r"holds another sweep: checkpoint \(there"):
        open_sweep(options(tmp_path / "s", corpus))
    assert stored(tmp_path / "s")["checkpoint"] == "last"


def test_groups_and_shards_are_selected(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, group_size=1))
    groups = sweep.groups
    assert len(groups) == 6 and select_groups(sweep, None, None) == (0, 1)
    by_name = select_groups(sweep, groups[3].name, None)
    assert select_groups(sweep, "3", None) == by_name == groups[3:4]
    assert select_groups(sweep, None, "1/4") == (1, 4)
    for group, shard in (("6", None), ("K", None), (None, "3/3"), (None, "one")):
        flag = "group" if group else "shard"
        with pytest.raises(ValueError, match=f"^--{flag} .*got {group or shard}"):
            select_groups(sweep, group, shard)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_group_is_in_one_shard(tmp_path, corpus, count):
    sweep = open_sweep(options(tmp_path / "s", corpus, group_size=1))
    shards = [sweep.shard(index, count) for index in range(count)]
    names = sorted(group.name for shard in shards for group in shard)
    assert names == sorted(group.name for group in sweep.groups)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("0.3", 0.3),
        ("0.5 points", 0.5),
        ("1BLEU", 1.0),
        ("1 point", 1.0),
        ("0.4 points of BLEU", 0.4),
        ("2e-1points", 0.2),
        (1.5, 1.5),
    ],
)
def test_a_margin_may_have_its_unit(tmp_path, corpus, text, wanted):
    given = options(tmp_path / "s", corpus, margin=str(text))
    sweep = open_sweep(given)
    assert margin_of(sweep.settings, sweep.metric) == wanted
    assert open_sweep(only_workdir(given, margin=str(text))).looks is None


def test_the_default_margin_may_be_named(tmp_path, corpus):
    given = options(tmp_path / "s", corpus)
    open_sweep(given)
    sweep = open_sweep(only_workdir(given, margin="0.3"))
    assert margin_of(sweep.settings, sweep.metric) == 0.3
    with pytest.raises(ValueError, match="margin"):
        open_sweep(only_workdir(given, margin="0.4"))


@pytest.mark.parametrize(
    "text, metric",
    [
        *((each, "bleu") for each in ("0", "-0.3", "many", "", "nan", "inf", "e")),
        *(("0.3nats", "bleu"), ("0.003", "bleu"), ("101", "bleu"), ("0.3 3", "bleu")),
        *(("0.3", "loss"), ("0.005 points", "loss"), ("0.003", "exact_match")),
    ],
)
def test_a_margin_that_cannot_be_meant_is_an_error(tmp_path, corpus, text, metric):
    with pytest.raises(ValueError, match="^--margin=.* as in --margin="):
        open_sweep(options(tmp_path / "s", corpus, margin=text, metric=metric))


@pytest.mark.parametrize("name", ["sweep.json", "groups/*/group.json"])
@pytest.mark.parametrize("text", ["{", "{}", "[]", "3"])
def test_a_damaged_file_is_named_and_kept(tmp_path, corpus, name, text):
    open_sweep(options(tmp_path / "s", corpus))
    path = sorted((tmp_path / "s").glob(name))[0]
    path.write_text(text)
    for verb in ("report", "run"):
        with pytest.raises(ValueError, match=f"^{path} is damaged"):
            open_sweep(options(tmp_path / "s", corpus, verb=verb))
    assert path.read_text() == text
