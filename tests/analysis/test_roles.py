"""Roles: heads set by hand have theirs and no other; untrained heads have none."""

import base64
import zlib
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.analysis import explorer, roles, tables
from headcount.configs.stories import get_config
from headcount.data import columns, stories, tokenizers
from headcount.data.examples import Examples, Ragged
from headcount.models.maps import attention_maps, single_example
from headcount.tasks import make_task
from tests.tasks.untrained import run_of

WORDS = sorted({w for story in stories.documents("val") for w in story.words})
P = 48  # positions, and the most tokens of a story


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    config = get_config()
    config.model.width = 2 * (len(WORDS) + 4) + P
    config.model.mlp_dim = 8
    config.data.max_length = config.model.max_positions = P
    config.model.attention.num_heads = 3
    config.model.attention.head_dim = len(WORDS) + 4
    config.model.attention.value_dim = len(WORDS) + 4
    config.model.scale_embeddings = False
    config.model.norm_type = "rms_norm"  # keeps zeros
    made = make_task(config, tmp_path_factory.mktemp("run") / "tokenizer")
    texts = [story.text for story in stories.documents("val")]
    made.tokenizer = tokenizers.load_or_make(made.folder, "words", texts, 0)
    return made


@pytest.fixture(scope="module")
def examples(task):
    texts = [story.text for story in stories.documents("val")]
    tokens = task.tokenizer.encode(texts, eos=False)
    return Examples("val", {"target": tokens}, {"text": texts})


def as_run(task, model):
    graph, params = nnx.split(model)
    return run_of(task, graph, jax.tree.map(lambda x: x[None], params))


def ids_of(task, words):
    return [task.tokenizer.encode([word], eos=False)[0][0] for word in words]


def made_by_hand(task):
    """Layer 0: a head for the previous token, one for subjects; layer 1: induction.

    Vectors have three parts: the token, its position, and the token before, which the
    first head writes. All other heads are uniform.
    """
    V = len(WORDS) + 4
    model = task.build(rngs=nnx.Rngs(0))
    flat = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(jnp.zeros_like, flat))
    D = task.config.model.width
    model.embedding[...] = jnp.eye(V, D)
    model.decoder_positions[...] = jnp.eye(P, D, k=V)
    token, place, before = slice(0, V), slice(V, V + P), slice(V + P, 2 * V + P)
    first, second = (layer.self_attention for layer in model.decoder)
    for layer in model.decoder:
        layer.self_norm.scale[...] = jnp.ones(D)
    query, key = (np.zeros((D, 3, V)) for _ in range(2))
    query[place, 0] = 3 * np.eye(P, V)
    key[place, 0] = 3 * np.eye(P, V, k=1)
    verbs = [*stories.VERBS, *stories.VERBS.values(), *stories.WITH_THING, "has"]
    nouns = [*stories.NOUNS, *stories.NOUNS.values(), "she", "he"]
    nouns += [*stories.WOMEN, *stories.MEN]
    query[ids_of(task, verbs), 1, 0] = 8
    key[ids_of(task, nouns), 1, 0] = 8
    query[ids_of(task, verbs), 1, 1] = 4
    key[place, 1, 1] = np.arange(P) / 10  # the last one
    first.query[...], first.key[...] = jnp.asarray(query), jnp.asarray(key)
    value, kernel = np.zeros((D, 3, V)), np.zeros((3, V, D))
    value[token, 0], kernel[0, :, before] = np.eye(V), np.eye(V)
    first.value[...], first.merge["kernel"][...] = (
        jnp.asarray(value),
        jnp.asarray(kernel),
    )
    query, key = (np.zeros((D, 3, V)) for _ in range(2))
    query[token, 1] = 3 * np.eye(V)
    query[ids_of(task, ["."]), 1] = 0  # what follows a full stop is often a name
    key[before, 1] = 3 * np.eye(V)
    second.query[...], second.key[...] = jnp.asarray(query), jnp.asarray(key)
    return as_run(task, model)


@pytest.mark.slow
def test_heads_set_by_hand_have_their_role_and_no_other(task, examples):
    run = made_by_hand(task)
    rows = roles.measure_roles(run, examples, [0], limit=60)
    found = {(r["layer"], r["head"], r["role"]) for r in rows if r["has_role"]}
    assert found == {
        (0, 0, "previous token"),
        (0, 0, "local (1 or 2 tokens before)"),
        (0, 1, "verb → its subject"),
        (0, 1, "verb that agrees → its subject"),
        (1, 1, "induction"),
        (1, 1, "after the same token"),
    }
    for row in rows:
        if row["has_role"]:
            assert row["low"] > max(row["chance"], row["untrained"])
        if (row["layer"], row["head"]) == (0, 2):  # uniform
            assert row["weight"] == pytest.approx(row["chance"], abs=1e-6)
    matched = {r["role"]: r for r in roles.by_role(rows)}
    assert matched["induction"]["best"] == ["1.1"]
    assert matched["induction"]["having"] == 1
    assert matched["noun → its adjective"]["having"] == 0


@pytest.mark.slow
def test_the_page_has_roles_of_links_of_a_split_longer_than_its_limit(task, examples):
    run = made_by_hand(task)
    shown = roles.first_sentences(run, examples, 1)
    given = {"a": run}, {"a": examples}, {"a": shown}, {"a": [0]}
    (page,) = explorer.explore(*given, limit=60)["runs"]
    found = {
        (head["layer"], head["head"]): [row["role"] for row in head["roles"]]
        for head in page["trials"][0]["heads"]
    }
    assert "verb → its subject" in found[0, 1] and found[0, 2] == []


def test_long_documents_give_several_windows_after_the_first_of_each():
    texts = [[1, 2, 3, 4, 5], [*range(10, 22)], [7, 8, 9]]
    examples = Examples("val", {"target": Ragged.of(texts)}, {"text": ["x"] * 3})
    firsts = [[1, 2, 3, 4], [10, 11, 12, 13], [7, 8, 9]]
    more = [[14, 15, 16, 17], [18, 19, 20, 21]]  # the fifth token alone is none
    for count in (1, 3, 4, 9):
        found = roles.first_windows(examples, 4, count)
        assert [x["target"] for x in found] == [*firsts, *more][:count]


@pytest.mark.slow
def test_untrained_heads_have_no_role(task, examples):
    run = as_run(task, task.build(rngs=nnx.Rngs(5)))
    rows = roles.measure_roles(run, examples, [0], limit=60)
    assert len(rows) > 6 * 10
    assert [row for row in rows if row["has_role"]] == []


@pytest.mark.slow
def test_scores_are_means_over_queries_then_sentences_of_the_full_maps(task, examples):
    run = as_run(task, task.build(rngs=nnx.Rngs(3)))
    rows = roles.measure_roles(run, examples, [0], limit=30)
    role = "verb → its subject"
    wanted = []
    for index, story in enumerate(stories.documents("val")[:30]):
        ids = examples.fields["target"][index][:P]
        batch = single_example({"target": ids.tolist()})
        graph, params = run.graph, run.of(0)[0]
        maps, _ = attention_maps(graph, params, {}, batch)["decoder"]
        maps = np.asarray(maps, float)[:, 0]
        links = [link for link in story.links if link.relation == "subject"]
        # the decoder reads word i one place later
        pairs = [(link.word + 1, link.of + 1) for link in links]
        pairs = [(q, k) for q, k in pairs if q < len(ids)]
        wanted.append(np.mean([maps[:, :, q, k] for q, k in pairs], axis=0))
    wanted = np.mean(wanted, axis=0)
    mine = [row for row in rows if row["role"] == role]
    assert len(mine) == wanted.size
    for row in mine:
        assert row["weight"] == pytest.approx(
            wanted[row["layer"], row["head"]], abs=1e-5
        )


@pytest.mark.slow
def test_norm_weighted_maps_are_shares_of_what_each_token_adds(task, examples):
    model = task.build(rngs=nnx.Rngs(3))
    run = as_run(task, model)
    ids = examples.fields["target"][0]
    batch = single_example({"target": ids.tolist()})
    seen = []
    model.hidden(batch, observe={"decoder": seen.append})
    maps, shares = attention_maps(run.graph, run.of(0)[0], {}, batch)["decoder"]
    for layer, found in enumerate(seen):
        value, kernel = (
            np.asarray(x, float) for x in (found.value, found.arguments["kernel"])
        )
        for head in range(3):
            added = np.asarray(maps, float)[layer, 0, head][..., None] * (
                value[0, None, :, head] @ kernel[head]
            )
            norms = np.linalg.norm(added, axis=-1)
            wanted = norms / norms.sum(-1, keepdims=True)
            np.testing.assert_allclose(shares[layer, 0, head], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_a_masked_language_model_has_the_gold_links_of_its_text(tmp_path, kind):
    config = get_config()
    config.data.tokenizer = kind
    config.data.max_length = config.model.max_positions = 512
    config.task.name = "masked_language_model"
    config.model.num_encoder_layers, config.model.num_decoder_layers = 1, 0
    made = make_task(config, tmp_path)
    story, *others = stories.documents("val")
    texts = [story.text, *(other.text for other in others)]
    made.tokenizer = tokenizers.load_or_make(tmp_path, kind, texts, 0)
    run = as_run(made, made.build(rngs=nnx.Rngs(0)))
    first = next(roles.make_cases(run, made.load("val"), 1))
    words = np.arange(len(story.words))
    if kind == "characters":  # those of a word have its index, and blanks have none
        words = np.concatenate([[i] * len(w) + [-1] for i, w in enumerate(story.words)])
        words = words[:-1]
    words = np.pad(words, 1, constant_values=-1)  # BOS, EOS
    wanted = roles.by_link(words, story.links, is_causal=False)
    assert wanted
    for name, right in wanted.items():
        np.testing.assert_array_equal(first.gold["encoder"][name], right)


def test_special_tokens_are_those_of_the_vocabulary():
    """Imported ones have them elsewhere: BERT's [CLS] is 101, and its [SEP] 102."""
    ids = np.array([101, 1, 2, 1, 102])
    gold = roles.by_token("encoder", ids, ids, ["a"] * 5, (101, 102))
    assert np.argwhere(gold["self"]).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert np.argwhere(gold["same token earlier"]).tolist() == [[3, 1]]
    assert (gold["end (EOS)"] == (ids == 102)).all()
    gold = roles.by_token("decoder", ids[:4], ids[:4], ["a"] * 4, (101, 102))
    assert np.argwhere(gold["after the same token"]).tolist() == [[3, 2]]
    assert np.argwhere(gold["beginning (BOS)"]).tolist() == [[2, 0], [3, 0]]


def test_an_outlier_is_judged_by_the_spread_between_untrained_heads():
    """As many false positives as the level says, whatever the spread."""
    rng = np.random.default_rng(0)
    draws = 1 / (1 + np.exp(-rng.normal(-2, 0.5, (2000, 31))))
    p = [roles.outlier(x[0], x[1:]) for x in draws]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=3 * 0.0049)


def test_what_has_no_norm_weighted_map_is_shown_without(capsys, tmp_path, monkeypatch):
    """In the table, the file and the explorer."""
    rng = np.random.default_rng(0)
    weight = rng.uniform(size=(4, 9, 1, 2))
    nothing = np.full(weight.shape[1:], np.nan)
    own, *untrained = (
        {("decoder", "self"): roles.Scores(w, nothing, np.full(9, 0.2), {0: w / 2})}
        for w in weight
    )
    rows = roles.rows_of(own, untrained, {"decoder": ["self"]})
    assert {row["norm_weight"] for row in rows} == {None}
    rows = [{"trial": 0} | row for row in rows]
    tables.print_roles(rows, "val", tmp_path / "roles.json")
    assert "nan" not in capsys.readouterr().out

    maps = jnp.full((2, 1, 1, 2, 3, 3), 0.5).at[1].set(jnp.nan)
    monkeypatch.setattr(explorer, "attention_maps", lambda *_: {"decoder": tuple(maps)})
    run = SimpleNamespace(graph=None, of=lambda trial: (None, {}))
    packed = explorer.packed_maps(run, 0, [{"target": [4, 5, 6]}])
    found = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
    assert found.reshape(2, 2, 9).mean((0, 2)).tolist() == [128, 0]


def test_links_between_words_are_those_of_their_tokens():
    """Words of several tokens; the decoder reads a token one place later."""
    words, links = np.array([0, 0, 1, 2, 2]), [("nsubj", 2, 0)]
    gold = roles.by_link(words, links, is_causal=False)
    assert np.argwhere(gold["nsubj → head"]).tolist() == [
        [3, 0],
        [3, 1],
        [4, 0],
        [4, 1],
    ]
    assert (gold["head → nsubj"] == gold["nsubj → head"].T).all()
    gold = roles.by_link(words, links, is_causal=True)
    assert np.argwhere(gold["nsubj → head"]).tolist() == [[4, 1], [4, 2]]
    before = np.argwhere(gold["before the nsubj → head"]).tolist()
    assert before == [[3, 1], [3, 2], [4, 1], [4, 2]]


def test_the_best_fixed_offset_is_that_of_the_gold_keys():
    gold = np.zeros((5, 5), bool)
    gold[[1, 2, 4], [0, 1, 1]] = True  # at -1, -1, -3
    weights = np.full((1, 1, 5, 5), 0.2)
    score, _, chance, fixed = roles.of_sentence("encoder", "x", gold, weights, weights)
    assert score == pytest.approx(0.2) and chance == pytest.approx(0.2)
    assert fixed == {-3: pytest.approx(1 / 3), -1: pytest.approx(2 / 3)}
    causal = roles.of_sentence("decoder", "x", gold, weights, weights)[2]
    assert causal == pytest.approx(np.mean([1 / 2, 1 / 3, 1 / 5]))


CONLLU = """# text = Dogs bark
1\tDogs\tdog\tNOUN\tNNS\t_\t2\tnsubj:pass\t_\t_
2\tbark\tbark\tVERB\tVBP\t_\t0\troot\t_\t_

"""


def test_dependencies_are_read_and_bad_heads_name_the_line(tmp_path):
    path = tmp_path / "en-train.conllu"
    path.write_text(CONLLU)
    assert columns.dependencies(tmp_path, "train") == [[("nsubj", 0, 1)]]
    for wrong in ("x", "3", "_"):
        path.write_text(CONLLU.replace("_\t2\tnsubj", f"_\t{wrong}\tnsubj"))
        with pytest.raises(ValueError, match=f"line 2, has the head '{wrong}'"):
            columns.dependencies(tmp_path, "train")


def test_numbers_and_names_are_aligned_where_there_is_one_on_each_side():
    same = partial(roles.same_word, ["<s>", "▁Anna", "▁1960", "▁1960", "▁hat"])
    found = same(["▁Anna", "▁1960", "▁hat"])
    assert np.argwhere(found).tolist() == [[1, 0]]
