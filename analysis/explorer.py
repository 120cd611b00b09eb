"""A self-contained web page to explore the heads of a run: data for explorer.html.

The template is a separate file beside this one, so that it can be edited. Attention
weights are stored as compressed bytes, which the page decompresses.
"""

import base64
import json
import zlib
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from headcount.analysis.heads import (
    SIDES,
    all_gates,
    describe,
    heads_of,
    importance,
)
from headcount.analysis.roles import batched, measure_roles, special_tokens
from headcount.data.examples import Examples
from headcount.models.maps import attention_maps
from headcount.tasks import Run
from headcount.tasks.heldout_loss import logits_of

TEMPLATE = Path(__file__).with_suffix(".html")
PLACE = "/*DATA*/"  # placeholder for the data in the template
ROLES_SHOWN = 4  # strongest roles to show per head


def page(data: dict) -> str:
    """Return the HTML page with the data from `explore`."""
    # escaped, because a script must not contain "</script>"
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return TEMPLATE.read_text().replace(PLACE, text, 1)


def explore(
    runs: dict[str, Run],
    examples: dict[str, Examples],
    sentences: dict[str, list[dict]],
    trials: dict[str, list[int]],
    limit: int,
) -> dict:
    """Compute the data that the page shows.

    Args:
        runs: one or two runs, by name.
        examples: examples to measure heads on, by run.
        sentences: token ids by field, by run; see `roles.first_sentences`.
        trials: trials to show, by run.
        limit: maximum number of examples to measure heads on.
    """
    data_of_runs = []
    for name, run in runs.items():
        mine = examples[name], sentences[name], trials[name]
        with jax.set_mesh(run.mesh):
            data_of_runs.append(one_run(name, run, *mine, limit))
    split = next(iter(examples.values())).split
    title = "Heads of " + " and ".join(runs)
    about = (
        f"{len(next(iter(sentences.values())))} sentences; numbers are means over "
        f"{limit} examples of {split} at most."
    )
    return {"title": title, "about": about, "runs": data_of_runs}


def one_run(name, run, examples, sentences, trials, limit) -> dict:
    """Compute the data of one run; see the page's script for its format."""
    model = nnx.merge(run.graph, run.of(trials[0])[0])
    sites = [
        {
            "name": site,
            "layers": len(attention_site.attentions),
            "heads": attention_site.attentions[0].num_merged_heads,
            "queries": READ.get(attention_site.queries, attention_site.queries),
            "keys": READ.get(attention_site.keys, attention_site.keys),
        }
        for site, attention_site in model.sites().items()
    ]
    roles = measure_roles(run, examples, trials, limit)
    sample = examples.take(range(len(examples))[:limit])
    of_trials = []
    for trial in trials:
        mine = [row for row in roles if row["trial"] == trial and row["has_role"]]
        rows = zip(
            describe(run, sample, trial),
            importance(run, sample, trial, is_full=False),
            strict=True,
        )
        of_trials.append(
            {
                "name": f"trial {trial}",
                "heads": [head_data(*row, mine) for row in rows],
                "maps": packed_maps(run, trial, sentences),
                "predictions": predictions(run, trial, sentences),
            }
        )
    shown = [shown_sentence(run, fields) for fields in sentences]
    return {"name": name, "sites": sites, "sentences": shown, "trials": of_trials}


# the queries and keys of a decoder are its inputs: the target, shifted by one
READ = {"target": "read"}


def head_data(statistics: dict, importance: dict, roles: list[dict]) -> dict:
    """Return the data of one head."""
    at = {name: statistics[name] for name in ("site", "layer", "head")}
    mine = [row for row in roles if all(row[name] == at[name] for name in at)]
    mine = sorted(mine, key=lambda row: -row["weight"])[:ROLES_SHOWN]
    names = ("role", "weight", "norm_weight", "chance", "offset", "offset_weight")
    shown_roles = [{name: row[name] for name in (*names, "untrained")} for row in mine]
    values = {
        name: statistics[name] for name in ("entropy", "distance", "sink", "confidence")
    }
    values["added_loss"] = importance["added_loss"]
    rounded = {k: None if x is None else round(x, 5) for k, x in values.items()}
    return at | rounded | {"roles": shown_roles}


def shown_sentence(run: Run, fields: dict[str, list[int]]) -> dict:
    """Return a sentence's tokens as the model reads them, and the sinks' indices."""
    inputs = dict(fields)
    if "target" in fields:
        inputs["read"] = run.task.decoder_input(fields["target"])
    shown, special = {}, special_tokens(run)
    for name, ids in inputs.items():
        field = "target" if name == "read" else name
        shown[name] = strings_of(run, field, ids)
        shown[f"{name}_sinks"] = [i for i, x in enumerate(ids) if x in special]
    first = shown["source" if "source" in shown else "target"]
    text = " ".join(first)
    return shown | {"text": text if len(text) < 90 else text[:88] + "…"}


def packed_maps(run: Run, trial: int, sentences: list[dict]) -> str:
    """Return all attention maps as compressed bytes in base64.

    A weight w is stored as round(255 w). The order of axes is: sentences, sites,
    layers, heads, raw and norm-weighted maps, queries, keys. Norm-weighted maps of NaN
    are stored as zeros.
    """
    parts = [None] * len(sentences)
    for indices, batch in batched(sentences):
        maps = jax.device_get(attention_maps(run.graph, *run.of(trial), batch))
        for row, index in enumerate(indices):
            fields, arrays = sentences[index], []
            for site in filter(maps.__contains__, SIDES):  # jit sorts dicts by key
                pair = maps[site]
                T = len(fields["source" if site == "encoder" else "target"])
                S = len(fields["target" if site == "decoder" else "source"])
                stacked = np.stack(
                    [kind_maps[:, row, :, :T, :S] for kind_maps in pair], axis=2
                )
                stacked = np.nan_to_num(np.clip(stacked, 0, 1))
                arrays.append(np.rint(255 * stacked).astype(np.uint8))
            parts[index] = b"".join(array.tobytes() for array in arrays)
    return base64.b64encode(zlib.compress(b"".join(parts), 9)).decode()


def strings_of(run: Run, field: str, ids) -> list[str]:
    """Return the text of each token of a field, without SentencePiece's blanks."""
    labels = run.task.token_strings(field, ids)
    return [label.replace("▁", " ").strip() or label for label in labels]


def predictions(run: Run, trial: int, sentences: list[dict]) -> list[dict]:
    """Predict each position of the sentences, with all heads and without each one.

    The context of each prediction comes from the sentence (teacher forcing).

    Returns:
        A dict per sentence: `tokens` has the predictions; `without` has, by head, the
        changed predictions by position.
    """
    params, gates = run.of(trial)
    gates = all_gates(run, params, gates)
    field = list(sentences[0])[-1]
    has_classes = nnx.merge(run.graph, params).classifier is not None
    results = [None] * len(sentences)

    def strings(ids):
        if has_classes:
            return [run.task.classes[i] for i in ids]
        return strings_of(run, field, ids)

    def predicted(gates, batch):
        return np.asarray(logits_of(run.graph, params, gates, batch).argmax(-1))

    for indices, batch in batched(sentences):
        with_all = predicted(gates, batch)
        lengths = [len(sentences[index][field]) for index in indices]
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            results[index] = {"tokens": strings(with_all[row, :length]), "without": {}}
        for site, layer, head in heads_of(gates):
            fewer = gates | {site: gates[site].at[layer, head].set(0)}
            without_head = predicted(fewer, batch)
            for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
                places = np.flatnonzero(
                    without_head[row, :length] != with_all[row, :length]
                )
                if len(places):
                    changed = strings(without_head[row, places])
                    key = f"{site}.{layer}.{head}"
                    results[index]["without"][key] = dict(
                        zip(places.tolist(), changed, strict=True)
                    )
    return results
