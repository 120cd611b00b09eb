"""What is told of the heads of a model, against what follows from its definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.analysis import pruning
from headcount.analysis.heads import (
    SIDES,
    by_rank,
    contributions,
    describe,
    importance,
    weight_on_special_token,
)
from headcount.analysis.plots import plot_maps
from headcount.analysis.pruning import curve, orders
from headcount.analysis.tables import print_heads, scores_without
from headcount.attention import (
    MERGE_RULES,
    HeadStatistics,
    attention_weights,
    head_statistics,
)
from headcount.configs.base import get_config
from headcount.data.examples import Examples, Ragged
from headcount.models.attention import Intermediates
from headcount.models.maps import attention_map, attention_maps, single_example
from headcount.models.transformer import Transformer
from headcount.tasks import LOSS, make_task
from tests.marks import slow_but
from tests.tasks.untrained import run_of

VOCAB, EOS = 40, 2
LENGTHS = (3, 9, 1, 40), (5, 7, 2, 33)  # of sources and targets


def corpus(lengths, seed):
    rng = np.random.default_rng(seed)
    return Ragged.of([[*rng.integers(3, VOCAB, n - 1).tolist(), EOS] for n in lengths])


SOURCE, TARGET = (corpus(lengths, seed) for seed, lengths in enumerate(LENGTHS))
TEXT = {name: [""] * 4 for name in ("source", "target")}


def examples(source=SOURCE, target=TARGET, split="val"):
    return Examples(split, {"source": source, "target": target}, TEXT)


def made(**changes):
    whole = get_config()
    whole.data.batch_tokens = 96
    config = whole.model
    config.width, config.mlp_dim, config.positions = 16, 32, "relative"
    config.activation = "gelu"  # ReLU's kinks would spoil the differences below
    config.num_encoder_layers, config.num_decoder_layers = 1, 2
    config.attention.update({"num_heads": 4, "num_kv_heads": 2, "value_dim": 3})
    config.encoder_attention.merge = "dynamic"
    config.decoder_attention.merge = "weighted"
    config.update(changes)
    model = Transformer(VOCAB, **config.to_dict(), rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    return run_of(make_task(whole), graph, jax.tree.map(lambda x: x[None], params))


def graph_and_params(run):
    return run.graph, run.of(0)[0]


def gated(run, gates):
    """Return the run with these gates of its only trial."""
    each = {site: np.asarray(own)[None] for site, own in gates.items()}
    return run._replace(head_gates=each)


@pytest.fixture(scope="module")
def model():
    return made(cross_attention={"sink": True})


def pairs():
    """Each sentence as a batch of its own, without padding."""
    for source, target in zip(SOURCE, TARGET, strict=True):
        batch = {}
        for side, ids in (("source", source), ("target", target)):
            batch[side] = jnp.asarray(ids)[None]
            batch[f"{side}_segments"] = jnp.ones_like(batch[side])
            batch[f"{side}_positions"] = jnp.arange(len(ids))[None]
        yield batch


@pytest.fixture(scope="module")
def gates():
    return {"cross": jnp.asarray([[1.0, 0.0, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0]])}


@pytest.fixture(scope="module")
def rows(model, gates):
    run = gated(model, gates)
    found = [
        row | other
        for row, other in zip(
            describe(run, examples(), 0), importance(run, examples(), 0), strict=True
        )
    ]
    return {(row["site"], row["layer"], row["head"]): row for row in found}


def test_every_head_has_a_row(rows):
    sizes = {"encoder": 1, "decoder": 2, "cross": 2}
    heads = {(s, i, n) for s, L in sizes.items() for i in range(L) for n in range(4)}
    assert rows.keys() == heads
    assert rows["cross", 1, 0]["gate"] == 0.5 and rows["decoder", 1, 0]["gate"] == 1


@pytest.fixture(scope="module")
def seen(model, gates):
    """Of each sentence, by site and layer: the full map, the heads' outputs, x."""
    graph, params = graph_and_params(model)

    @jax.jit
    def look(batch):
        kept = {site: [] for site in SIDES}

        def keep(site, layer):
            kept[site].append((attention_map(layer)[0], layer.heads[0], layer.x[0]))

        observe = {site: partial(keep, site) for site in SIDES}
        nnx.merge(graph, params).hidden(batch, head_gates=gates, observe=observe)
        return kept

    return [jax.device_get(look(batch)) for batch in pairs()]


def test_statistics_are_the_mean_over_all_tokens_of_the_full_maps(rows, seen):
    fields = [name for name in HeadStatistics._fields if name != "max_logit"]
    names = *fields, "sink", "learned_sink"
    means = {site: [] for site in SIDES}
    for kept in seen:
        for site, layers in kept.items():
            weights = np.stack([maps for maps, _, _ in layers]).astype(np.float64)
            offset = (
                np.arange(weights.shape[-1]) - np.arange(weights.shape[-2])[:, None]
            )
            edge = 0 if site == "decoder" else -1
            total = weights.sum(-1)
            found = {"sink": weights[..., edge], "learned_sink": 1 - total}
            weights = weights / total[..., None]
            logs = np.log(np.where(weights > 0, weights, 1))
            found |= {
                "entropy": -(weights * logs).sum(-1),
                "confidence": weights.max(-1),
                "distance": (weights * abs(offset)).sum(-1),
                "previous": (weights * (offset == -1)).sum(-1),
                "current": (weights * (offset == 0)).sum(-1),
                "following": (weights * (offset == 1)).sum(-1),
            }
            means[site].append(np.stack([found[n] for n in names]))
    means = {site: np.concatenate(parts, -1).mean(-1) for site, parts in means.items()}
    for (site, layer, head), row in rows.items():
        assert (row["learned_sink"] is None) == (site != "cross")
        told = [row[name] or 0 for name in names]
        np.testing.assert_allclose(told, means[site][:, layer, head], atol=2e-5)


@pytest.mark.slow
def test_max_logit_is_the_largest_over_all_sentences(model, gates, rows):
    graph, params = graph_and_params(model)

    @jax.jit
    def look(batch):
        kept = {site: [] for site in SIDES}

        def keep(site, layer):
            found = head_statistics(layer.query, layer.key, **layer.masks)
            kept[site].append(found.max_logit[0])

        observe = {site: partial(keep, site) for site in SIDES}
        nnx.merge(graph, params).hidden(batch, head_gates=gates, observe=observe)
        return kept

    each = [look(batch) for batch in pairs()]
    for (site, layer, head), row in rows.items():
        largest = max(float(kept[site][layer][head]) for kept in each)
        np.testing.assert_allclose(row["max_logit"], largest, rtol=1e-4, atol=1e-5)


def test_what_the_merge_makes_of_heads_is_the_mean_over_all_tokens(model, rows, seen):
    """Each site has another rule, and the cross-attention gates that are not 1."""
    made = nnx.merge(*graph_and_params(model))
    for site in SIDES:
        stack = made.encoder if site == "encoder" else made.decoder
        for layer in range(len(stack)):
            name = "cross_attention" if site == "cross" else "self_attention"
            rule, arguments = getattr(stack[layer], name).rule()
            looks = [kept[site][layer][1:] for kept in seen]
            heads, x = (np.concatenate(parts) for parts in zip(*looks, strict=True))
            weights = weights_by_hand(rule.function.__name__, x[None], arguments)[0]
            added = np.einsum(
                "TNV,NVD->TND",
                heads * weights[..., None],
                np.broadcast_to(arguments["kernel"], (4, 3, 16)),
            )
            norms = np.linalg.norm(added, axis=2).mean(0)
            told = [rows[site, layer, head] for head in range(4)]
            shares = [row["share"] for row in told]
            np.testing.assert_allclose(shares, norms / norms.sum(), rtol=1e-4)
            assert (shares[1] == 0) == ((site, layer) == ("cross", 0))
            means = [row["merge_weight"] for row in told]
            spreads = [row["merge_weight_sd"] for row in told]
            if site == "cross":
                assert means == [None] * 4
            else:
                np.testing.assert_allclose(means, weights.mean(0), rtol=1e-4)
            if site == "encoder":
                np.testing.assert_allclose(spreads, weights.std(0), rtol=1e-2)
            else:
                assert spreads == [None] * 4


WEIGHED = [rule for rule, row in MERGE_RULES.items() if row.weights]


@pytest.mark.parametrize("rule", ["concat", "mean", *WEIGHED])
def test_what_a_rule_makes_of_each_head(rule):
    """The weights by their formulas, and what they leave of each head."""
    row, rng = MERGE_RULES[rule], np.random.default_rng(0)
    sizes = {"N": 4, "V": 3, "D": 6}
    heads, x = rng.normal(size=(2, 5, 4, 3)), rng.normal(size=(2, 5, 6))
    params = {
        name: rng.normal(size=[sizes[letter] for letter in letters.split()])
        for name, letters in row.shapes.items()
    }
    settings = {
        "mixture": {"mixture_heads": 3},
        "shared_mixture": {"mixture_heads": 2, "mixture_shared": 1},
    }.get(rule, {})

    @jax.jit
    def look(heads, x, params):
        unseen = None, None, {}, {}
        return contributions(Intermediates(*unseen, heads, x, row, params | settings))

    found = look(*jax.tree.map(jnp.float32, (heads, x, params)))
    weights = weights_by_hand(rule, x, params)
    each = weights if weights.ndim == 4 else weights[..., None]
    kernel = np.broadcast_to(params["kernel"], (4, 3, 6))
    added = np.einsum("BTNV,NVD->BTND", heads * each, kernel)
    np.testing.assert_allclose(found["norm"], np.linalg.norm(added, axis=3), rtol=1e-4)
    fixed = rule in ("concat", "mean")
    assert ("weight" in found) != fixed
    assert ("weight_square" in found) != (fixed or rule in ("scaled", "weighted"))
    if not fixed:
        weights = weights.mean(3) if weights.ndim == 4 else weights
        np.testing.assert_allclose(found["weight"], weights, rtol=1e-4)
    if "weight_square" in found:
        np.testing.assert_allclose(found["weight_square"], weights**2, rtol=1e-4)


def weights_by_hand(rule, x, params):
    """What each head is multiplied by, B T N or B T N V."""
    even = np.ones((*x.shape[:2], 4))
    if rule in ("concat", "mean"):
        return even / (4 if rule == "mean" else 1)
    if rule == "scaled":
        return even + params["scale"]
    if rule in ("gated", "gated_elementwise"):
        return 1 / (1 + np.exp(-np.tensordot(x, params["gate"], 1)))
    if rule == "shared_mixture":
        powers = np.exp(x @ params["router"])[..., 1:]
        a = 1 / (1 + np.exp(-x @ params["split"]))[..., None]
        routed = powers / powers.sum(-1, keepdims=True)
        routed *= powers > powers.min(-1, keepdims=True)  # two of three
        return np.concatenate([a, (1 - a) * routed], axis=-1)
    logits = even * params["logits"] if rule == "weighted" else x @ params["router"]
    if rule == "mixture":
        logits = np.where(logits >= np.sort(logits)[..., [-3]], logits, -np.inf)
    shares = np.exp(logits)
    return shares / shares.sum(-1, keepdims=True)


@pytest.mark.parametrize("site", slow_but(["encoder"], SIDES))
def test_the_share_on_the_sink_is_that_of_the_full_map(site):
    """Of packed rows, one of them full, and fewer heads of keys."""
    keys = jnp.asarray([[1, 1, 1, 2, 2, 3, 4, 4], [1, 1, 2, 2, 2, 0, 0, 0]])
    asks = jnp.asarray([[1, 2, 2, 3, 4, 4], [1, 1, 1, 2, 0, 0]])
    asks = asks if site == "cross" else keys
    first, last = ([0, 3, 5, 6], [0, 2]), ([2, 4, 5, 7], [1, 4])
    special = np.zeros(keys.shape)
    for row, places in enumerate(first if site == "decoder" else last):
        special[row, places] = 1
    draws = jax.random.split(jax.random.key(0))
    query = jax.random.normal(draws[0], (*asks.shape, 4, 5))
    key = jax.random.normal(draws[1], (*keys.shape, 2, 5))
    segments = {"query_segment_ids": asks, "key_value_segment_ids": keys}
    masks = segments | {"is_causal": site == "decoder"}
    weights = attention_weights(query, key, **masks)
    wanted = np.einsum("BNTS,BS->BTN", weights, special)
    found = weight_on_special_token(site, query, key, **masks)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert (np.asarray(found > 0).all(2) == (asks > 0)).all()


def losses(model, gates):
    """The summed loss of each sentence in turn."""
    graph, params = graph_and_params(model)
    loss = model.task.loss
    found = [loss_of_pair(graph, loss, params, batch, gates) for batch in pairs()]
    return np.array(found, float)


@partial(jax.jit, static_argnames=("graph", "loss"))
def loss_of_pair(graph, loss, params, batch, gates):
    return loss(nnx.merge(graph, params), batch, head_gates=gates)[0]


@pytest.mark.parametrize(
    "head", [("encoder", 0, 1), ("decoder", 1, 3), ("cross", 0, 1), ("cross", 1, 0)]
)
def test_what_a_head_is_to_the_loss(model, gates, rows, head):
    """By gates that are moved a little, each sentence by itself; and by zeros."""
    site, *place = head
    every = nnx.merge(*graph_and_params(model)).head_gates() | gates
    tokens = sum(LENGTHS[1])

    def at(gate):
        return losses(model, every | {site: every[site].at[tuple(place)].set(gate)})

    now, h = float(every[site][tuple(place)]), 0.03
    near, far = at(now + h) - at(now - h), at(now + 2 * h) - at(now - 2 * h)
    slopes = (8 * near - far) / (12 * h)  # of fourth order, since h cannot be small
    assert (slopes > 0).any() and (slopes < 0).any()  # absolute values by the sentence
    told = rows[head]
    np.testing.assert_allclose(
        told["importance"], abs(slopes).sum() / tokens, rtol=5e-3, atol=1e-5
    )
    added = (at(0).sum() - at(now).sum()) / tokens
    np.testing.assert_allclose(told["added_loss"], added, atol=1e-5)
    if now == 0:
        assert told["alone"] is told["noise_loss"] is None
        return
    noise = np.random.default_rng(0).normal(1, 1, len(TARGET))
    noisy = sum(at(now * factor)[i] for i, factor in enumerate(noise))
    assert np.isclose(told["noise_loss"], (noisy - at(now).sum()) / tokens, atol=1e-5)
    only = every[site].at[place[0]].set(0).at[tuple(place)].set(now)
    more = losses(model, every | {site: only}).sum() - at(now).sum()
    np.testing.assert_allclose(told["alone"], more / tokens, atol=1e-5)


@pytest.mark.slow
def test_alone_of_one_head_and_of_two():
    """Nothing goes, or the other one does."""
    one, two = ({"num_heads": N, "num_kv_heads": 1} for N in (1, 2))
    run = made(decoder_attention=one, cross_attention=two)
    sides = (Ragged.of([side[0], side[1]]) for side in (SOURCE, TARGET))
    found = importance(run, examples(*sides), 0)
    assert {r["alone"] for r in found if r["site"] == "decoder"} == {0}
    of_two = [row for row in found if row["site"] == "cross"]
    others = [of_two[i]["added_loss"] for i in (1, 0, 3, 2)]
    assert len(set(others)) == 4 and [row["alone"] for row in of_two] == others


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["talking_heads", "differential"])
def test_heads_without_a_distribution_have_no_statistics(variant):
    run = made(cross_attention={"num_heads": 4, variant: True})
    for row in describe(run, examples(), 0):
        is_mixed = row["site"] == "cross"
        assert (row["entropy"] is None) == (row["sink"] is None) == is_mixed
        assert np.isfinite(row["share"])
    for row in importance(run, examples(), 0):
        values = [row[key] for key in ("importance", "added_loss", "noise_loss")]
        assert np.isfinite(values).all()


def test_tables_have_every_head_and_no_columns_without_values(rows, capsys, tmp_path):
    """The rules of the sites are dynamic, weighted and concat."""
    told = [{"trial": 0} | row for row in rows.values()]
    print_heads(told, "val", "entropy", tmp_path / "heads-val.json")
    lines = capsys.readouterr().out.splitlines()
    cells = [line.replace("│", " ").split() for line in lines]
    heads = [f"{row['layer']}.{row['head']}" for row in told]
    assert sorted(each[0] for each in cells if each and each[0] in heads) == sorted(
        heads
    )
    print_heads(
        [row | {"learned_sink": None} for row in told],
        *("val", "entropy", tmp_path / "heads-val.json"),
    )
    assert "learned" not in capsys.readouterr().out


def test_heads_of_trials_meet_by_their_rank(rows, capsys, tmp_path):
    """Of each layer, by added loss and the gone last; with NumPy's mean and sd."""
    mine = ("cross", 0), ("cross", 1), ("encoder", 0)
    layers = {at: [rows[*at, head] for head in range(4)] for at in mine}
    losses = {  # by trial, of heads in turn; head 1 of the cross's first layer is gone
        0: {mine[0]: [1, 0, -3, 4], mine[1]: [1, 2, 3, 4], mine[2]: [4, 1, 3, 2]},
        7: {mine[0]: [6, 0, -1, 2], mine[1]: [8, 7, 6, 5], mine[2]: [1, 4, 2, 3]},
    }
    told = [
        row
        | {"trial": trial, "added_loss": float(loss), "alone": row["alone"] and loss}
        for trial, of in losses.items()
        for at in mine
        for row, loss in zip(layers[at], of[at], strict=True)
    ]
    found = by_rank(told, "added_loss")
    heads = {at: [[r["head"] for r in t] for t in each] for at, each in found.items()}
    ranked = [heads["cross", 0, rank] for rank in (1, 2, 3, 4)]
    assert ranked == [[[3], [0]], [[0], [3]], [[2], [2]], [[1], [1]]]
    assert heads["encoder", 0, "all"] == [[0, 2, 3, 1], [1, 3, 2, 0]]
    print_heads(told, "val", "added_loss", tmp_path / "heads-val.json")
    printed = capsys.readouterr().out
    lines = [line.replace("│", " ").split() for line in printed.splitlines()]
    for rank, values in {"1": [4, 8], "4": [1, 5]}.items():
        means = [at for at, line in enumerate(lines) if line[:2] == ["1,", rank]]
        for at, of in ((0, np.mean), (1, partial(np.std, ddof=1))):
            assert any(f"{of(values):.4f}" in lines[i + at] for i in means)


def test_orders_of_removal():
    """Normalised within a layer by hand; what is gone already comes first."""
    importance = {(0, 0): 3, (0, 1): 4, (1, 0): 0.3, (1, 1): 0.1, (1, 2): 9, (2, 0): 0}
    rows = [
        {"site": "cross", "layer": layer, "head": head, "gate": float(value != 9)}
        | {"importance": value, "added_loss": -value}
        for (layer, head), value in importance.items()
    ]  # layers divided by 5, 0.316 and nothing
    found = orders(rows, seed=(0, 0))
    found = {name: [head[1:] for head in order] for name, order in found.items()}
    gone, none = (1, 2), (2, 0)
    assert found["importance"] == [gone, none, (1, 1), (1, 0), (0, 0), (0, 1)]
    normalized = [gone, none, (1, 1), (0, 0), (0, 1), (1, 0)]
    assert found["normalized_importance"] == normalized
    assert found["added_loss"] == [gone, (0, 1), (0, 0), (1, 0), (1, 1), none]
    assert found["random"][0] == gone and set(found["random"]) == set(importance)


def test_heads_are_ranked_on_dev_whatever_is_scored(model, rows, monkeypatch):
    ranked, scored = [], []

    def measured(run, dev, trial, is_full):
        ranked.append(dev.split)
        return list(rows.values())

    def evaluate(run, of, trials, **options):
        scored.append(of.split)
        return [{"loss": 0.0}]

    monkeypatch.setattr(pruning, "importance", measured)
    monkeypatch.setattr(model.task, "evaluate", evaluate)
    next(curve(model, examples(), examples(split="test"), [0]))
    assert ranked == ["val"] and scored == ["test"]


def test_scores_are_of_trials_or_of_the_draws_of_one():
    rows = [
        {"order": "random", "removed": 2, "trial": trial, "loss": 10.0 * trial + draw}
        for trial in (0, 1)
        for draw in (1, 3)
    ]
    found = (
        scores_without(rows, "random", 2, LOSS),
        scores_without(rows[:2], "random", 2, LOSS),
    )
    np.testing.assert_array_equal(found[0], [2, 12])
    np.testing.assert_array_equal(found[1], [1, 3])


def test_maps_are_of_the_site_that_is_asked_for(model):
    ids, target = SOURCE[1].tolist(), TARGET[1].tolist()
    S, T = len(ids), len(target)
    batch = single_example({"source": ids, "target": target})
    found = attention_maps(model.graph, *model.of(0), batch)
    maps = {site: weights[:, 0] for site, (weights, _) in found.items()}
    shapes = {"encoder": (1, 4, S, S), "decoder": (2, 4, T, T), "cross": (2, 4, T, S)}
    assert {site: found.shape for site, found in maps.items()} == shapes
    for site in ("encoder", "decoder"):
        np.testing.assert_allclose(maps[site].sum(-1), 1, rtol=1e-5)
    assert 0 < maps["cross"].sum(-1).max() < 0.999  # it has a sink
    ahead = np.triu(np.ones((T, T), bool), 1)
    assert not maps["decoder"][..., ahead].any() and maps["encoder"].min() > 0


@pytest.mark.slow
def test_maps_are_of_the_gated_model(model):
    """What the first layer gives without its heads, the second one looks at."""
    ids, target = SOURCE[1].tolist(), TARGET[1].tolist()
    batch = single_example({"source": ids, "target": target})
    gates = nnx.merge(*graph_and_params(model)).head_gates()["decoder"]
    fewer = gated(model, {"decoder": gates.at[0].set(0.0)})
    whole, found = (
        attention_maps(run.graph, *run.of(0), batch)["decoder"][0][:, 0]
        for run in (model, fewer)
    )
    np.testing.assert_allclose(found[0], whole[0], atol=1e-6)
    assert abs(found[1] - whole[1]).max() > 1e-4


def test_a_picture_counts_layers_and_heads_as_gates_do(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)
    maps = np.full((1, 2, 3, 4), 0.25)
    names = "translation", "source"
    plot_maps(maps, list("xyz"), list("abcd"), names, tmp_path / "maps.png")
    figure = plt.gcf()
    titles = [ax.get_title() for ax in figure.axes[:2]]
    assert titles == ["layer 0, head 0", "layer 0, head 1"]
    assert (figure.get_supylabel(), figure.get_supxlabel()) == names
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels == list("xyz")
