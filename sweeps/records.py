"""What the files of a group say; one that is damaged is named."""

from pathlib import Path

from headcount.runtime.workdir import differing, is_like, summary
from headcount.runtime.workdir import read_json as read_whole
from headcount.sweeps.plan import Group, Trial

DECODING = {"beam_size": 5, "length_penalty": 0.6}  # of every group alike
OF_RUN = {"num_parameters": 0, "devices": [""], "attention": {}, "versions": {}}
OF_RUN |= {"python": "", "commit": None}
RECORDS = {  # what a row takes of a group's files, and how a damaged one is mended
    "run.json": (
        OF_RUN,
        "restore it, or move its folder away and sweep.py run trains its group again.",
    ),
    "failed.json": ({"error": ""}, "sweep.py run tries its group again."),
}


def read_json(path: Path):
    """What a JSON file holds; None where there is none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return read_whole(path)
    except FileNotFoundError:
        return None


def read_record(path: Path) -> dict | None:
    """What a file of `RECORDS` holds; None where there is none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = read_json(path)
        whole = found is None or is_like(found, RECORDS[path.name][0])
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged; {RECORDS[path.name][1]}")
    return found


def read_group(path: Path) -> Group:
    """The group that a group.json says.

    Raises:
        ValueError: it is damaged.
    """
    try:
        trials = [Trial(**trial) for trial in read_json(path)]
    except TypeError:
        trials = []
    if not trials:
        raise ValueError(
            f"{path} is damaged (it holds no trials); restore it, or move its folder "
            f"away and sweep.py run trains them again."
        )
    return Group(path.parent.name, trials)


def read_result(folder: Path, split: str, group: Group, settings: dict):
    """A group's result-SPLIT.json, a row a trial; None where there is none yet.

    Raises:
        ValueError: it is damaged, or made otherwise than the sweep makes them, as by a
            call of eval.py on the group's folder.
    """
    path = folder / f"result-{split}.json"
    wanted = {"checkpoint": settings["checkpoint"], "decoding": DECODING}
    scores = {"bleu", "chrf", "exact_match", settings["metric"]}
    mend = "move it away, and sweep.py run scores its group again."
    try:
        found = read_json(path)
        if found is None:
            return None
        made = [{key: row[key] for key in wanted} for row in found]
        whole = len(found) == len(group.trials)
        whole = whole and all(row.keys() >= {"step", "diverged_at"} for row in found)
        numbers = [row[score] for row in found for score in scores]
        whole = whole and all(type(number) in (int, float) for number in numbers)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged; {mend}")
    for each in made:
        if differs := differing(wanted, each):
            told = summary(differs).replace("(there ", "(in the sweep ")
            told = told.replace(", now ", ", in the file ")
            raise ValueError(
                f"{path} was made otherwise than the rest of the sweep: {told}; {mend}"
            )
    return found
