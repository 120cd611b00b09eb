"""What heads look for: weight on the tokens that a role names, against three controls.

A role says which keys are right for a query: the token before it, BOS, the subject of
the verb. A head's score is the weight that it puts on them, as the mean over a
sentence's queries and then over sentences. It has the role only if that beats

- the best fixed offset: the score of a head that always looks the same number of tokens
  away, at the distance that is best for this role. A role that is an offset itself
  (self, previous, next) instead has to get more weight than all other tokens together;
- untrained models of the same config: the scores of the heads of the same layer in
  `UNTRAINED` of them, on the scale of log-odds;
- chance: the share of right keys among those that the query may see.

The first and the last are paired one-sided t-tests over sentences, the second asks
whether the head could be one more untrained head (a t-distributed prediction). The
largest of the three p-values is the head's for this role (an intersection-union test),
corrected by Holm over all heads and roles of a trial.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import scipy
from flax import nnx

from headcount.analysis.significance import LEVEL, holm, summary
from headcount.data import columns, stories
from headcount.data.batches import unpacked_batches
from headcount.data.examples import Examples, Ragged
from headcount.data.tokenizers import BOS, EOS
from headcount.models.maps import attention_maps
from headcount.runtime import sharding
from headcount.tasks import Run

UNTRAINED = 10  # models, with seeds that no trial has
FIRST_UNTRAINED_SEED = 1_000_000_000
MIN_EXAMPLES = 20  # sentences in which a role has a query; rarer roles are left out
BATCH_TOKENS = 2048  # of a batch: bounds the memory of its maps
REPEATED = 64  # rows of repeated random tokens
REPEATED_LENGTH = 48  # tokens of such a row, at most
NUM_SPECIAL = 4  # ids that are no words
TEXT_OF = {"source": "source", "target": "text"}  # of tagging, of language models
POSITIONAL = {"self": 0, "previous token": -1, "next token": 1}
# Relations of `stories`: what the query is, and what the right key is.
STORIES = {
    "subject": ("verb", "its subject"),
    "agreement": ("verb that agrees", "its subject"),
    "modifier": ("noun", "its adjective"),
    "antecedent": ("pronoun", "its antecedent"),
    "same_name": ("name", "its last mention"),
}


class Case(NamedTuple):
    """A sentence, and for each site and role which keys are right for each query."""

    fields: dict[str, list[int]]
    gold: dict[str, dict[str, np.ndarray]]  # T S booleans, rows of no query are empty


def measure_roles(
    run: Run, examples: Examples, trials: list[int], limit: int = 200
) -> list[dict]:
    """Return a row for every trial, head and role of `MIN_EXAMPLES`; see the module.

    A row has `weight` with its 95 % interval over sentences (`low`, `high`), the same
    by norms (`norm_weight`, see `models.attention.norm_weighted_map`), the controls
    (`chance`, `offset_weight` at `offset`, `untrained` with its `untrained_sd`), `p`
    and `p_holm`, and `has_role`.

    Args:
        limit: how many examples of the split to use, from the first on.

    Raises:
        ValueError: a sentence is longer than the model takes.
    """
    cases = list(make_cases(run, examples, limit))
    names = role_names(cases)
    if not any(names.values()):
        return []
    found = []
    with sharding.using(run.mesh):
        params = untrained_params(run)
        untrained = [
            score(run, jax.tree.map(lambda x, i=i: x[i], params), {}, cases, names)
            for i in range(UNTRAINED)
        ]
        for trial in trials:
            scores = score(run, *run.of(trial), cases, names)
            found += [
                {"trial": trial} | row for row in rows_of(scores, untrained, names)
            ]
    return found


def rows_of(scores: dict, untrained: list[dict], names: dict) -> list[dict]:
    """Return the rows of one trial, from the scores of `score`."""
    rows = []
    for site, roles in names.items():
        for name in roles:
            own = scores[site, name]
            heads = np.stack([of[site, name].weight.mean(0) for of in untrained])
            _, L, N = own.weight.shape
            for layer, head in np.ndindex(L, N):
                weight = own.weight[:, layer, head]
                mean, _, low, high = summary(weight)
                others, offset = own.offset(layer, head)
                beaten = heads[:, layer].ravel()
                p = max(
                    one_sided(weight - own.chance),
                    one_sided(weight - others),
                    outlier(mean, beaten),
                )
                row = {"site": site, "layer": layer, "head": head, "role": name}
                row |= {"examples": len(weight), "weight": float(mean)}
                row |= {"low": float(low), "high": float(high)}
                row["norm_weight"] = float(own.norm_weight[:, layer, head].mean())
                row["chance"] = float(own.chance.mean())
                row |= {"offset": offset, "offset_weight": float(others.mean())}
                row["untrained"] = float(beaten.mean())
                row["untrained_sd"] = float(beaten.std(ddof=1))
                rows.append(row | {"p": p})
    corrected = holm(np.array([row["p"] for row in rows]))
    return [
        row | {"p_holm": float(p), "has_role": bool(p <= LEVEL)}
        for row, p in zip(rows, corrected, strict=True)
    ]


def one_sided(differences: np.ndarray) -> float:
    """Return the p-value of a mean above 0, by a t-test."""
    n, sd = len(differences), max(differences.std(ddof=1), 1e-6)
    return float(scipy.stats.t.sf(differences.mean() / sd * n**0.5, n - 1))


def outlier(value: float, others: np.ndarray) -> float:
    """Return the p-value that a share is one more of others, against a larger one."""
    value, others = (
        np.log(x / (1 - x))
        for x in (np.clip(x, 1e-6, 1 - 1e-6) for x in (value, others))
    )
    n, sd = len(others), max(others.std(ddof=1), 1e-6)
    t = (value - others.mean()) / sd / (1 + 1 / n) ** 0.5
    return float(scipy.stats.t.sf(t, n - 1))


class Scores(NamedTuple):
    """A role's scores in each of E sentences that have it."""

    weight: np.ndarray  # E L N
    norm_weight: np.ndarray  # E L N
    chance: np.ndarray  # E
    fixed: dict  # by offset: E, of a head that looks there; or E L N, the rest

    def offset(self, layer: int, head: int) -> tuple[np.ndarray, int]:
        """Return the scores E at the best offset for this role, and that offset."""
        each = {
            k: x if x.ndim == 1 else x[:, layer, head] for k, x in self.fixed.items()
        }
        best = max(each, key=lambda k: each[k].mean())
        return each[best], int(best)


def score(run: Run, params, gates: dict, cases: list[Case], names: dict) -> dict:
    """Return the `Scores` of every site and role."""
    parts = {(site, name): [] for site, roles in names.items() for name in roles}
    fields = {
        field: Ragged.of([case.fields[field] for case in cases])
        for field in cases[0].fields
    }
    for indices, batch in unpacked_batches(fields, batch_tokens=BATCH_TOKENS):
        maps = jax.device_get(attention_maps(run.graph, params, gates, batch))
        for row, index in enumerate(indices):
            for site, roles in cases[index].gold.items():
                for name, gold in roles.items():
                    if (site, name) not in parts or not gold.any():
                        continue
                    T, S = gold.shape
                    weights = maps[site][0][:, row, :, :T, :S].astype(np.float64)
                    shares = maps[site][1][:, row, :, :T, :S].astype(np.float64)
                    parts[site, name].append(
                        of_sentence(site, name, gold, weights, shares)
                    )
    return {
        at: Scores(
            *(np.stack([part[i] for part in found]) for i in range(3)),
            {
                k: np.stack([part[3].get(k, np.zeros_like(part[2])) for part in found])
                for k in sorted(set().union(*(part[3] for part in found)))
            },
        )
        for at, found in parts.items()
    }


def of_sentence(site, name, gold, weights, shares) -> tuple:
    """Return a sentence's score and norm-weighted score L N, chance, and by offset."""
    queries, keys = np.nonzero(gold)
    count = gold.any(1).sum()
    score, norm_score = (
        maps[:, :, queries, keys].sum(-1) / count for maps in (weights, shares)
    )
    sees = queries + 1 if site == "decoder" else gold.shape[1]
    chance = (1 / np.broadcast_to(sees, queries.shape)).sum() / count
    if name in POSITIONAL:
        rows = np.unique(queries)
        return (
            score,
            norm_score,
            chance,
            {0: weights[:, :, rows].sum((2, 3)) / count - score},
        )
    offsets, counts = np.unique(keys - queries, return_counts=True)
    fixed = zip(offsets.tolist(), counts / count, strict=True)
    return score, norm_score, chance, dict(fixed)


def untrained_params(run: Run):
    """Return the initial parameters of models of the run's config, seeds in front."""

    @jax.jit
    @jax.vmap
    def init(seed):
        return nnx.split(run.task.build(rngs=nnx.Rngs(jax.random.key(seed))))[1]

    return init(FIRST_UNTRAINED_SEED + np.arange(UNTRAINED))


def role_names(cases: list[Case]) -> dict[str, list[str]]:
    """Return the roles of each site that enough sentences have."""
    counts = {}
    for case in cases:
        for site, roles in case.gold.items():
            for name, gold in roles.items():
                of_site = counts.setdefault(site, {})
                of_site[name] = of_site.get(name, 0) + bool(gold.any())
    return {
        site: [name for name, count in roles.items() if count >= MIN_EXAMPLES]
        for site, roles in counts.items()
    }


def make_cases(run: Run, examples: Examples, limit: int) -> Iterator[Case]:
    """Yield the sentences with what is right in them, then rows of random tokens."""
    sites = nnx.merge(run.graph, run.of(0)[0]).sites()
    links = gold_links(run, examples.split)
    for index, fields in enumerate(first_sentences(run, examples, limit)):
        found = None
        if links is not None:
            field = next(iter(fields))
            text = examples.text[TEXT_OF[field]][index]
            words = words_of_tokens(run, text, fields[field])
            found = words, links[index]
        yield Case(fields, gold_of(run, sites, fields, found))
    if list(sites) == ["decoder"]:
        yield from repeated_cases(run)


def first_sentences(run: Run, examples: Examples, count: int) -> list[dict]:
    """Return the token ids by field of the first examples.

    Of long documents the first `data.max_length` tokens.

    Raises:
        ValueError: a sentence is longer than the model takes.
    """
    longest, found = run.config.data.max_length, []
    for index in range(min(count, len(examples))):
        fields = {
            name: examples.fields[name][index].tolist()
            for name in examples.fields
            if name.startswith(("source", "target"))  # with features and types
        }
        if "source" not in fields:
            fields = {"target": fields["target"][:longest]}
        run.task.check_length(fields, f"Example {index} of {examples.split}")
        found.append(fields)
    return found


def repeated_cases(run: Run) -> Iterator[Case]:
    """Yield rows of random tokens that repeat after a random period.

    Olsson et al. 2022 repeat after a fixed one, which a head could find by its
    distance.
    """
    model, size = run.config.model, run.params["embedding"].shape[1]
    length = REPEATED_LENGTH
    if model.positions == "learned":
        length = min(length, model.max_positions)
    rng = np.random.default_rng(0)
    for _ in range(REPEATED):
        period = int(rng.integers(max(2, length // 6), max(3, length // 2)))
        block = NUM_SPECIAL + rng.permutation(size - NUM_SPECIAL)[:period]
        ids = np.resize(block, length).tolist()
        reads = np.array([model.bos, *ids[:-1]])
        yield Case({"target": ids}, {"decoder": {"induction": after_same(reads)}})


def after_same(reads: np.ndarray) -> np.ndarray:
    """Return which keys follow an earlier occurrence of each query's token, T T."""
    same = reads[:, None] == reads
    after = np.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    return np.tril(after, 0) & (reads > EOS)[:, None]


def words_of_tokens(run: Run, text: str, ids: list[int]) -> np.ndarray:
    """Return the number of each token's word in the text, split at blanks; -1: none."""
    tokenizer, words = run.task.tokenizer, text.split()
    if "source" in run.task.spec(1, 1):  # tagging: each word by itself
        sizes = np.maximum(tokenizer.encode(words, eos=False).lengths, 1)
        # BOS and EOS are of no word
        return np.pad(np.repeat(np.arange(len(words)), sizes), 1, constant_values=-1)
    if run.config.data.tokenizer == "words":
        return np.arange(len(ids))
    pieces = [p.replace("▁", " ") for p in run.task.token_strings("target", ids)]
    starts = [piece.startswith(" ") for piece in pieces]
    starts[0] = False  # of the first word, whether it has a blank in front or not
    found = np.cumsum(starts)
    found[[not piece.strip() for piece in pieces]] = -1
    return found


def gold_of(run: Run, sites: dict, fields: dict, links: tuple | None) -> dict:
    """Return what is right in a sentence for each site and role.

    Args:
        links: the words of the tokens, and the gold links; see `by_link`.
    """
    read = {"source": fields.get("source")}
    if "target" in fields:
        read["target"] = [run.config.model.bos, *fields["target"][:-1]]
    labels = {
        field: run.task.token_strings(field, ids)
        for field, ids in read.items()
        if ids is not None
    }
    found = {}
    for site, about in sites.items():
        queries, keys = (np.array(read[f]) for f in (about.queries, about.keys))
        strings = labels[about.queries], labels[about.keys]
        gold = by_token(site, queries, keys, *strings)
        if links is not None and site != "cross":
            gold |= by_link(*links, is_causal=site == "decoder")
        if site == "cross":
            gold["same word"] = same_word(*strings)
        if site == "decoder":
            gold = {name: np.tril(each) for name, each in gold.items()}
        found[site] = gold
    return found


def by_token(site: str, queries, keys, query_labels, key_labels) -> dict:
    """Return what is right by the tokens alone; BOS and EOS count for sinks only."""
    T, S = len(queries), len(keys)
    real = ((queries != BOS) & (queries != EOS))[:, None]
    real = real & ((keys != BOS) & (keys != EOS))
    every, gold = np.ones((T, 1), bool), {}
    if site != "cross":
        at = np.arange(S) - np.arange(T)[:, None]
        gold = {name: real & (at == offset) for name, offset in POSITIONAL.items()}
        if site == "decoder":
            del gold["next token"]
        gold["same token earlier"] = real & (at < 0) & (queries[:, None] == keys)
    if site == "decoder":
        gold["after the same token"] = after_same(queries) & real & (at < 0)
        gold["beginning (BOS)"] = every & (keys == BOS) & (np.arange(T) > 1)[:, None]
    else:
        gold["end (EOS)"] = every & (keys == EOS)
    marks = np.array([is_punctuation(label) for label in key_labels])
    gold["punctuation"] = every & marks
    return gold


def is_punctuation(label: str) -> bool:
    """Whether a token has neither letters nor digits and is not special."""
    text = label.replace("▁", "").strip()
    return bool(text) and not any(c.isalnum() for c in text)


def same_word(query_labels: list[str], key_labels: list[str]) -> np.ndarray:
    """Return equal tokens with a digit or a capital, if each side has just one.

    Numbers and names are the same in both languages, an alignment without a model. The
    query is where the target's word has been read.
    """
    queries, keys = np.array(query_labels), np.array(key_labels)
    telling = np.array(
        [any(c.isdigit() or c.isupper() for c in x) and len(x) > 2 for x in keys]
    )
    same = (queries[:, None] == keys) & telling
    return same & (same.sum(1) == 1)[:, None] & (same.sum(0) == 1)


def by_link(words: np.ndarray, links: list, *, is_causal: bool) -> dict:
    """Return what is right by gold links between words, in both directions.

    The query is every token of one word, the right keys are the tokens of the other. A
    causal model reads a token one place after it has predicted it; there "before the
    verb" is where the verb is predicted.

    Args:
        words: the word of every token, T; -1 for none.
        links: (relation, word, other word).
    """
    gold = {}
    for name, word, other in name_links(links):
        query, key = words == word, words == other
        if is_causal:
            read = np.concatenate([[False], key[:-1]])
            pairs = [(f"before the {name}", query)]
            pairs.append((name, np.concatenate([[False], query[:-1]])))
            key = read
        else:
            pairs = [(name, query)]
        for each, at in pairs:
            right = at[:, None] & key
            gold[each] = gold.get(each, False) | right
    return gold


def name_links(links: list) -> Iterator[tuple[str, int, int]]:
    """Yield role, query word and key word of each link, in both directions."""
    for relation, word, other in links:
        if relation in STORIES:
            of, to = STORIES[relation]
            yield f"{of} → {to}", word, other
            yield f"{to.removeprefix('its ')} → its {of}", other, word
        else:
            yield f"{relation} → head", word, other
            yield f"head → {relation}", other, word


def gold_links(run: Run, split: str) -> list[list] | None:
    """Return the gold links of each example of the run's corpus, if it has some."""
    data = run.config.data
    if data.name == "stories":
        return [story.links for story in stories.documents(split)]
    if data.name == "conllu":
        return columns.dependencies(data.directory, split)
    return None


def by_role(rows: list[dict]) -> list[dict]:
    """Match heads over trials by role: each trial's best head of every site and role.

    Returns:
        A row per site and role: in how many trials a head has the role, of how many;
        mean `weight` of the trials' best heads with its interval over trials (over
        sentences, if there is one), the controls, and the best head of each trial.
    """
    groups = {}
    for row in rows:
        groups.setdefault((row["site"], row["role"]), {}).setdefault(
            row["trial"], []
        ).append(row)
    found = []
    for (site, role), trials in groups.items():
        best = [max(heads, key=lambda row: row["weight"]) for heads in trials.values()]
        mean, _, low, high = summary([row["weight"] for row in best])
        if len(best) == 1:
            low, high = best[0]["low"], best[0]["high"]
        having = [any(row["has_role"] for row in heads) for heads in trials.values()]
        row = {"site": site, "role": role, "trials": len(best), "having": sum(having)}
        row |= {"weight": float(mean), "low": float(low), "high": float(high)}
        for name in ("norm_weight", "chance", "offset_weight", "untrained"):
            row[name] = float(np.mean([each[name] for each in best]))
        heads = [f"{each['layer']}.{each['head']}" for each in best]
        found.append(row | {"best": heads})
    return found
