"""Similarity of heads against its definitions; interactions against brute force."""

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.spatial.distance import jensenshannon

from headcount.analysis.similarity import (
    alignments,
    divergences,
    interactions,
    similarity,
)
from headcount.configs.base import get_config
from headcount.data.examples import Examples, Ragged
from headcount.models.maps import attention_maps, single_example
from headcount.models.transformer import Transformer
from headcount.tasks import make_task
from tests.tasks.untrained import run_of

RNG = np.random.default_rng(0)
SENTENCES = [
    {
        "source": [*RNG.integers(4, 30, S).tolist(), 2],
        "target": [*RNG.integers(4, 30, T).tolist(), 2],
    }
    for S, T in ((3, 5), (9, 7), (40, 2))
]


@pytest.fixture(scope="module")
def run():
    config = get_config()
    config.data.batch_tokens = 96
    config.model.update({"width": 16, "mlp_dim": 16, "num_encoder_layers": 1})
    config.model.attention.num_heads = 2
    graph, params = nnx.split(
        Transformer(30, **config.model.to_dict(), rngs=nnx.Rngs(0))
    )
    params = jax.tree.map(lambda x: 3 * x[None], params)
    return run_of(make_task(config), graph, params)


@pytest.mark.slow
def test_divergences_are_scipys_means_over_queries(run):
    rows = similarity(run, SENTENCES, 0)
    found = {
        (r["site"], r["layer"], r["head"], r["other_layer"], r["other_head"]): r
        for r in rows
    }
    assert len(found) == 1 + 6 + 6  # pairs of 2, 4 and 4 heads
    totals, count = {}, {}
    for fields in SENTENCES:
        maps = attention_maps(run.graph, *run.of(0), single_example(fields))
        for site, (weights, _) in maps.items():
            weights = np.asarray(weights, float)[:, 0]
            for at in found:
                if at[0] == site:
                    pair = weights[at[1], at[2]], weights[at[3], at[4]]
                    each = jensenshannon(*pair, base=2, axis=-1) ** 2
                    totals[at] = totals.get(at, 0) + np.nan_to_num(each).sum()
                    count[at] = count.get(at, 0) + len(each)
    for at, row in found.items():
        wanted = totals[at] / count[at]
        assert row["divergence"] == pytest.approx(wanted, abs=1e-5)
        assert 0 < row["cka"] < 1


def test_disjoint_maps_are_one_bit_apart_and_equal_ones_none():
    maps = np.eye(4)[[[0, 1, 2], [1, 2, 3], [0, 1, 2]]]
    found = divergences(maps)
    np.testing.assert_allclose(found, [[0, 3, 0], [3, 0, 3], [0, 3, 0]], atol=1e-12)
    assert np.isnan(divergences(0.5 * maps)).all()  # with a learned sink


def test_cka_of_a_rotated_and_scaled_output_is_one_and_of_noise_small():
    x, noise = RNG.normal(size=(2, 500, 4))
    turn = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
    found = alignments(np.stack([x, 3 * x @ turn + 1, noise]))
    assert found[0, 1] == pytest.approx(1) and found[0, 2] < 0.1
    gram = [c @ c.T for c in (each - each.mean(0) for each in (x, noise))]
    wanted = (gram[0] * gram[1]).sum() / np.prod([np.linalg.norm(g) for g in gram])
    assert found[0, 2] == pytest.approx(wanted)


@pytest.mark.slow
def test_interactions_are_those_of_brute_force(run):
    fields = {name: Ragged.of([s[name] for s in SENTENCES]) for name in SENTENCES[0]}
    examples = Examples("val", fields, {name: [""] * 3 for name in fields})
    rows = interactions(run, examples, 0, "cross")
    assert len(rows) == 6
    params = run.of(0)[0]

    @jax.jit
    def sums(gates, batch):
        model = nnx.merge(run.graph, params)
        return run.task.loss(model, batch, head_gates=gates)

    def loss(*removed):
        gates = nnx.merge(run.graph, params).head_gates()
        for layer, head in removed:
            gates["cross"] = gates["cross"].at[layer, head].set(0)
        each = [sums(gates, single_example(fields)) for fields in SENTENCES]
        return sum(float(x) for x, _ in each) / sum(float(x) for _, x in each)

    whole = loss()
    for row in (rows[0], rows[4]):
        one, two = (row["layer"], row["head"]), (row["other_layer"], row["other_head"])
        both = loss(one, two) - whole
        wanted = both - (loss(one) - whole) - (loss(two) - whole)
        assert row["added_loss"] == pytest.approx(both, abs=1e-5)
        assert row["interaction"] == pytest.approx(wanted, abs=2e-5)
