"""Roles of heads: attention weight on the keys that a role names, with three controls.

A role defines the right keys of a query, such as the previous token, BOS, or the
subject of the verb. A head's score is its attention weight on the right keys, averaged
over a sentence's queries and then over sentences. It has the role only if its score
exceeds

- the best fixed offset: the score of a head that always attends to the token at a fixed
  distance, for the distance that is best for this role. For roles that are distances
  themselves (self, previous, next, local, global), the control is the weight on all
  other tokens together;
- untrained models of the same config: the scores of the same layer's heads in
  `UNTRAINED` of them, compared in log-odds;
- chance: the fraction of right keys among those that the query may see.

The first and the last are paired one-sided t-tests over sentences. The second tests
whether the head could be another untrained head (a t-distributed prediction interval).
It takes the heads of one untrained model as independent; to the extent that they are
correlated, its p-values are too small. The p-value of a head and role is the largest of
the three (an intersection-union test), Holm-corrected over all heads and roles of a
trial.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import scipy
from flax import nnx

from headcount.analysis.formatting import grouped
from headcount.analysis.significance import LEVEL, holm, summary
from headcount.data import columns, stories
from headcount.data.batches import unpacked_batches
from headcount.data.examples import Examples, Ragged
from headcount.data.tokenizers import BOS, EOS, NUM_SPECIAL
from headcount.models.maps import attention_maps
from headcount.tasks import Run

UNTRAINED = 10  # untrained models, with seeds that no trial has
FIRST_UNTRAINED_SEED = 1_000_000_000
MIN_EXAMPLES = 20  # sentences that must have a query of a role; rarer roles are skipped
BATCH_TOKENS = 2048  # tokens per batch; bounds the memory of the maps
REPEATED = 64  # rows of repeated random tokens
REPEATED_LENGTH = 48  # maximum number of tokens of such a row
POSITIONAL = {  # smallest and largest distance from the query to the right key
    "self": (0, 0),
    "previous token": (-1, -1),
    "next token": (1, 1),
    "local (1 or 2 tokens before)": (-2, -1),
    "local (1 or 2 tokens after)": (1, 2),
    "global (8 tokens or more before)": (-math.inf, -8),
    "global (8 tokens or more after)": (8, math.inf),
}
# Relations of `stories`: the query and the right key.
STORIES = {
    "subject": ("verb", "its subject"),
    "agreement": ("verb that agrees", "its subject"),
    "modifier": ("noun", "its adjective"),
    "antecedent": ("pronoun", "its antecedent"),
    "same_name": ("name", "its last mention"),
}


class Case(NamedTuple):
    """A sentence, with the right keys of each query by site and role."""

    fields: dict[str, list[int]]
    # booleans of shape T S; rows that are not queries of the role are all False
    gold: dict[str, dict[str, np.ndarray]]


def measure_roles(
    run: Run, examples: Examples, trials: list[int], limit: int
) -> list[dict]:
    """Test every head of every trial for every role; see the module docstring.

    Roles with fewer than `MIN_EXAMPLES` sentences are left out. A row has `weight` with
    its 95% interval over sentences (`low`, `high`), the norm-weighted score
    (`norm_weight`; None where `models.maps.norm_weighted_map` is NaN), the
    controls (`chance`, `offset_weight` at `offset`, `untrained` with its
    `untrained_sd`), `p` and `p_holm`, and `has_role`.

    Args:
        limit: number of examples to use, from the start of the split.

    Raises:
        ValueError: a sentence is longer than the model supports.
    """
    cases = list(make_cases(run, examples, limit))
    names = role_names(cases)
    if not any(names.values()):
        return []
    rows = []
    with jax.set_mesh(run.mesh):
        params = untrained_params(run)
        untrained = [
            score(run, jax.tree.map(lambda x, i=i: x[i], params), {}, cases, names)
            for i in range(UNTRAINED)
        ]
        for trial in trials:
            scores = score(run, *run.of(trial), cases, names)
            rows += [
                {"trial": trial} | row for row in rows_of(scores, untrained, names)
            ]
    return rows


def rows_of(scores: dict, untrained: list[dict], names: dict) -> list[dict]:
    """Return the rows of one trial, from its scores and those of untrained models."""
    rows = []
    for site, roles in names.items():
        for name in roles:
            role_scores = scores[site, name]
            heads = np.stack([of[site, name].weight.mean(0) for of in untrained])
            _, L, N = role_scores.weight.shape
            for layer, head in np.ndindex(L, N):
                weight = role_scores.weight[:, layer, head]
                mean, _, low, high = summary(weight)
                at_offset, offset = role_scores.offset(layer, head)
                beaten = heads[:, layer].ravel()
                p = max(
                    one_sided(weight - role_scores.chance),
                    one_sided(weight - at_offset),
                    outlier(mean, beaten),
                )
                row = {"site": site, "layer": layer, "head": head, "role": name}
                row |= {"examples": len(weight), "weight": float(mean)}
                row |= {"low": float(low), "high": float(high)}
                shares = role_scores.norm_weight[:, layer, head].mean()
                row["norm_weight"] = None if np.isnan(shares) else float(shares)
                row["chance"] = float(role_scores.chance.mean())
                row |= {"offset": offset, "offset_weight": float(at_offset.mean())}
                row["untrained"] = float(beaten.mean())
                row["untrained_sd"] = float(beaten.std(ddof=1))
                rows.append(row | {"p": p})
    corrected = holm(np.array([row["p"] for row in rows]))
    return [
        row | {"p_holm": float(p), "has_role": bool(p <= LEVEL)}
        for row, p in zip(rows, corrected, strict=True)
    ]


def one_sided(differences: np.ndarray) -> float:
    """Return the p-value of a one-sided t-test for a mean above 0."""
    n, sd = len(differences), max(differences.std(ddof=1), 1e-6)
    return float(scipy.stats.t.sf(differences.mean() / sd * n**0.5, n - 1))


def outlier(value: float, sample: np.ndarray) -> float:
    """Return the p-value of a one-sided test whether a fraction exceeds a sample.

    Under the null hypothesis it is one more draw from the same distribution, which is
    normal in log-odds.
    """
    value, sample = (
        np.log(x / (1 - x))
        for x in (np.clip(x, 1e-6, 1 - 1e-6) for x in (value, sample))
    )
    n, sd = len(sample), max(sample.std(ddof=1), 1e-6)
    t = (value - sample.mean()) / sd / (1 + 1 / n) ** 0.5
    return float(scipy.stats.t.sf(t, n - 1))


class Scores(NamedTuple):
    """A role's scores in each of the E sentences that have a query of the role."""

    weight: np.ndarray  # E L N
    norm_weight: np.ndarray  # E L N
    chance: np.ndarray  # E
    # by offset: scores of a head that attends there, E; or, for positional roles, the
    # weight on all other tokens, E L N
    fixed: dict

    def offset(self, layer: int, head: int) -> tuple[np.ndarray, int]:
        """Return the scores at the best offset for this role, E, and the offset."""
        by_offset = {
            k: x if x.ndim == 1 else x[:, layer, head] for k, x in self.fixed.items()
        }
        best = max(by_offset, key=lambda k: by_offset[k].mean())
        return by_offset[best], int(best)


def batched(sentences: list[dict]) -> list[tuple[np.ndarray, dict]]:
    """Return batches with one sentence per row, after the indices of the sentences.

    Args:
        sentences: token ids by field.
    """
    fields = {name: Ragged.of([s[name] for s in sentences]) for name in sentences[0]}
    return unpacked_batches(fields, batch_tokens=BATCH_TOKENS)


def score(run: Run, params, gates: dict, cases: list[Case], names: dict) -> dict:
    """Return the `Scores` of every site and role."""
    parts = {(site, name): [] for site, roles in names.items() for name in roles}
    for indices, batch in batched([case.fields for case in cases]):
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
            *(np.stack([part[i] for part in parts_of_role]) for i in range(3)),
            {
                k: np.stack(
                    [part[3].get(k, np.zeros_like(part[2])) for part in parts_of_role]
                )
                for k in sorted(set().union(*(part[3] for part in parts_of_role)))
            },
        )
        for at, parts_of_role in parts.items()
    }


def of_sentence(site, name, gold, weights, shares) -> tuple:
    """Return the fields of `Scores` for a role in one sentence."""
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
    """Initialize `UNTRAINED` models of the run's config; seeds are the leading axis."""

    @jax.jit
    @jax.vmap
    def init(seed):
        return nnx.split(run.task.build(rngs=nnx.Rngs(jax.random.key(seed))))[1]

    return init(FIRST_UNTRAINED_SEED + np.arange(UNTRAINED))


def role_names(cases: list[Case]) -> dict[str, list[str]]:
    """Return the roles of each site with at least `MIN_EXAMPLES` sentences."""
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
    """Yield the sentences with their right keys, then rows of repeated random tokens.

    Only models that have just a decoder get rows of random tokens.
    """
    sites = nnx.merge(run.graph, run.of(0)[0]).sites()
    links = gold_links(run, examples.split)
    if links is not None and len(links) != len(examples):
        links = None  # masked language models cut long documents into several examples
    for index, fields in enumerate(first_sentences(run, examples, limit)):
        word_links = None
        if links is not None and index < len(links):
            text = next(iter(examples.text.values()))[index]
            words = words_of_tokens(run, text, next(iter(fields.values())))
            word_links = words, links[index]
        yield Case(fields, gold_of(run, sites, fields, word_links))
    if list(sites) == ["decoder"]:
        yield from repeated_cases(run)


def first_sentences(run: Run, examples: Examples, count: int) -> list[dict]:
    """Return the token ids by field of the first examples.

    Language models get windows of at most `data.max_length` tokens: the first of every
    document and, if that is too few, all second ones, and so on.

    Raises:
        ValueError: a sentence is longer than the model supports.
    """
    if "source" not in examples.fields:
        return first_windows(examples, run.config.data.max_length, count)
    sentences = []
    for index in range(min(count, len(examples))):
        fields = {
            name: examples.fields[name][index].tolist()
            for name in examples.fields
            if name.startswith(("source", "target"))  # with features and types
        }
        run.task.check_length(fields, f"Example {index} of {examples.split}")
        sentences.append(fields)
    return sentences


def first_windows(examples: Examples, length: int, count: int) -> list[dict]:
    """Return the first windows of documents, without those that their end cuts short.

    The first window of every document is there, however short the document.
    """
    documents = examples.fields["target"]
    starts = range(0, max(1, documents.lengths.max()), length)
    places = (
        (index, start)
        for start in starts
        for index, size in enumerate(documents.lengths)
        if not start or start + length <= size
    )
    return [
        {"target": documents[index][start : start + length].tolist()}
        for index, start in itertools.islice(places, count)
    ]


def repeated_cases(run: Run) -> Iterator[Case]:
    """Yield rows of random tokens that repeat after a random period.

    Olsson et al. 2022 use a fixed period, which a head could match by attending to a
    fixed distance.
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
        gold = after_same(reads, special_tokens(run))
        yield Case({"target": ids}, {"decoder": {"induction": gold}})


def special_tokens(run: Run) -> tuple[int, int]:
    """Return the ids of BOS and EOS, which imported vocabularies have elsewhere."""
    # a translation task has two tokenizers instead of one, both with our ids
    tokenizer = getattr(run.task, "tokenizer", None)
    return (BOS, EOS) if tokenizer is None else (tokenizer.bos, tokenizer.eos)


def after_same(reads: np.ndarray, special: tuple[int, int]) -> np.ndarray:
    """Mark the keys that follow an earlier occurrence of the query's token, T T.

    Args:
        reads: token ids.
        special: ids of special tokens, which have no such keys.
    """
    same = reads[:, None] == reads
    after = np.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    return np.tril(after, 0) & ~np.isin(reads, special)[:, None]


def words_of_tokens(run: Run, text: str, ids: list[int]) -> np.ndarray:
    """Return the index of each token's word in the text, split at blanks; -1: none."""
    tokenizer, words = run.task.tokenizer, text.split()
    if run.task.splits_words:
        sizes = np.maximum(tokenizer.encode(words, eos=False).lengths, 1)
        # BOS and EOS belong to no word
        return np.pad(np.repeat(np.arange(len(words)), sizes), 1, constant_values=-1)
    if run.config.data.tokenizer == "words":
        is_word = ~np.isin(ids, special_tokens(run))
        return np.where(is_word, np.cumsum(is_word) - 1, -1)
    pieces = [p.replace("▁", " ") for p in run.task.token_strings("target", ids)]
    starts = np.array([piece.startswith(" ") for piece in pieces])
    is_word = ~np.isin(ids, special_tokens(run))
    # the first word has index 0, with or without a leading blank
    starts[np.argmax(is_word)] = False
    is_word &= [bool(piece.strip()) for piece in pieces]
    return np.where(is_word, np.cumsum(starts), -1)


def gold_of(run: Run, sites: dict, fields: dict, links: tuple | None) -> dict:
    """Return the right keys of a sentence's queries, by site and role.

    Args:
        links: the words of the tokens, and the gold links; see `by_link`.
    """
    inputs = {"source": fields.get("source")}
    if "target" in fields:
        inputs["target"] = run.task.decoder_input(fields["target"])
    labels = {
        field: run.task.token_strings(field, ids)
        for field, ids in inputs.items()
        if ids is not None
    }
    by_site = {}
    for site, attention_site in sites.items():
        queries, keys = (
            np.array(inputs[f]) for f in (attention_site.queries, attention_site.keys)
        )
        key_labels = labels[attention_site.keys]
        gold = by_token(site, queries, keys, key_labels, special_tokens(run))
        if links is not None and site != "cross":
            gold |= by_link(*links, is_causal=site == "decoder")
        if site == "cross":
            gold["same word"] = same_word(labels[attention_site.queries], key_labels)
        if site == "decoder":
            gold = {name: np.tril(right) for name, right in gold.items()}
        by_site[site] = gold
    return by_site


def by_token(site: str, queries, keys, key_labels, special: tuple[int, int]) -> dict:
    """Return the right keys of roles defined by tokens and positions.

    Only sinks (the `special` ids, BOS and EOS) have one of these as their right key.
    """
    T, S = len(queries), len(keys)
    bos, eos = special
    real = ~np.isin(queries, special)[:, None] & ~np.isin(keys, special)
    every, gold = np.ones((T, 1), bool), {}
    if site != "cross":
        at = np.arange(S) - np.arange(T)[:, None]
        gold = {
            name: real & (low <= at) & (at <= high)
            for name, (low, high) in POSITIONAL.items()
            if site != "decoder" or low <= 0
        }
        gold["same token earlier"] = real & (at < 0) & (queries[:, None] == keys)
    if site == "decoder":
        gold["after the same token"] = after_same(queries, special) & real & (at < 0)
        gold["beginning (BOS)"] = every & (keys == bos) & (np.arange(T) > 1)[:, None]
    else:
        gold["end (EOS)"] = every & (keys == eos)
    marks = np.array([is_punctuation(label) for label in key_labels])
    gold["punctuation"] = every & marks
    return gold


def is_punctuation(label: str) -> bool:
    """Return whether a token is nonempty and has neither letters nor digits."""
    text = label.replace("▁", "").strip()
    return bool(text) and not any(c.isalnum() for c in text)


def same_word(query_labels: list[str], key_labels: list[str]) -> np.ndarray:
    """Align equal tokens with a digit or a capital that are unique on both sides.

    Numbers and names are often the same in both languages, so this aligns sentences
    without a model. The query is the position at which the decoder reads the word.
    """
    queries, keys = np.array(query_labels), np.array(key_labels)
    telling = np.array(
        [any(c.isdigit() or c.isupper() for c in x) and len(x) > 2 for x in keys]
    )
    same = (queries[:, None] == keys) & telling
    return same & (same.sum(1) == 1)[:, None] & (same.sum(0) == 1)


def by_link(words: np.ndarray, links: list, *, is_causal: bool) -> dict:
    """Return the right keys of roles defined by gold links, in both directions.

    The queries are all tokens of one word, and the right keys are the tokens of the
    other. A causal model reads a token one position after predicting it, so it has two
    roles per link: the query of "before the verb" predicts the verb, that of "verb"
    reads it.

    Args:
        words: the index of each token's word, T; -1 for none.
        links: (relation, word, other word).
        is_causal: whether the model is causal.
    """
    gold = {}
    for name, word, other in name_links(links):
        query, key = words == word, words == other
        if is_causal:
            reads = np.concatenate([[False], key[:-1]])
            pairs = [(f"before the {name}", query)]
            pairs.append((name, np.concatenate([[False], query[:-1]])))
            key = reads
        else:
            pairs = [(name, query)]
        for role, at in pairs:
            right = at[:, None] & key
            gold[role] = gold.get(role, False) | right
    return gold


def name_links(links: list) -> Iterator[tuple[str, int, int]]:
    """Yield the role, query word and key word of each link, in both directions."""
    for relation, word, other in links:
        if relation in STORIES:
            of, to = STORIES[relation]
            yield f"{of} → {to}", word, other
            yield f"{to.removeprefix('its ')} → its {of}", other, word
        else:
            yield f"{relation} → head", word, other
            yield f"head → {relation}", other, word


def gold_links(run: Run, split: str) -> list[list] | None:
    """Return the gold links of each example, or None if the corpus has none."""
    data = run.config.data
    if data.name == "stories":
        return [story.links for story in stories.documents(split)]
    if data.name == "conllu":
        return columns.dependencies(data.directory, split)
    return None


def by_role(rows: list[dict]) -> list[dict]:
    """Match heads over trials by role: each trial's best head of every site and role.

    Returns:
        A row per site and role: the number of `trials`, and of those `having` a head
        with the role; the mean `weight` of the trials' best heads with its interval
        over trials (with one trial, over sentences); the controls; and the best head of
        each trial.
    """
    matched = []
    for (site, role), role_rows in grouped(rows, "site", "role").items():
        trials = grouped(role_rows, "trial").values()
        best = [max(heads, key=lambda row: row["weight"]) for heads in trials]
        mean, _, low, high = summary([row["weight"] for row in best])
        if len(best) == 1:
            low, high = best[0]["low"], best[0]["high"]
        having = [any(row["has_role"] for row in heads) for heads in trials]
        row = {"site": site, "role": role, "trials": len(best), "having": sum(having)}
        row |= {"weight": float(mean), "low": float(low), "high": float(high)}
        for name in ("norm_weight", "chance", "offset_weight", "untrained"):
            values = [head[name] for head in best]
            row[name] = None if None in values else float(np.mean(values))
        heads = [f"{head['layer']}.{head['head']}" for head in best]
        matched.append(row | {"best": heads})
    return matched
