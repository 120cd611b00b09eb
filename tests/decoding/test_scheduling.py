"""Many prompts through few rows: refills, lanes, caches that grow, and programs."""

import jax.numpy as jnp
import numpy as np
import pytest

from headcount.decoding import generate as decoding
from headcount.decoding import scheduling
from headcount.decoding.generate import generate
from tests.decoding_cases import batch, jitted, make, scale_eos, sentences, trimmed


@pytest.fixture
def one_lane(monkeypatch):
    monkeypatch.setattr(scheduling, "num_lanes", lambda _: 1)


@pytest.mark.slow
def test_rows_are_refilled_on_the_device(monkeypatch, one_lane):
    """30 prompts in 8 rows take one prefill and one call."""
    graph, params = make(layers=1)
    calls = {"prefill": 0, "serve": 0}
    original = decoding.programs

    def spy(*arguments):
        found = original(*arguments)

        def counted(name):
            def call(*arrays):
                calls[name] += 1
                return getattr(found, name)(*arrays)

            return call

        return found._replace(**{name: counted(name) for name in calls})

    monkeypatch.setattr(decoding, "programs", spy)
    texts = sentences(*range(1, 31))
    limits = [len(text) for text in texts]
    options = {"beam_size": 4}
    many, scores = generate(
        graph, params, texts, limits=limits, batch_size=32, **options
    )
    assert calls == {"prefill": 1, "serve": 1}
    for i in (0, 7, 29):
        alone, score = generate(
            graph, params, [texts[i]], limits=[limits[i]], **options
        )
        assert alone == [many[i]]
        np.testing.assert_allclose(score, [scores[i]], rtol=1e-4)


@pytest.mark.slow
def test_a_large_batch_size_has_not_many_more_rows_than_prompts(monkeypatch, one_lane):
    graph, params = make(layers=1)
    rows = []
    original = scheduling.decode_all

    def spy(programs, prompts, limits, waiting, **sizes):
        rows.extend(sizes["sizes"])
        return original(programs, prompts, limits, waiting, **sizes)

    monkeypatch.setattr(scheduling, "decode_all", spy)
    texts = sentences(*[3] * 20)
    wanted, _ = generate(graph, params, texts, batch_size=128)
    few = max(rows)
    found, _ = generate(graph, params, texts, batch_size=10**6)
    assert found == wanted and max(rows) == few == 128


@pytest.mark.slow
def test_lanes_together_equal_one(monkeypatch):
    graph, params = make(layers=1)
    texts = sentences(*np.random.default_rng(0).integers(1, 20, 41))
    lanes = []
    original = scheduling.decode_all

    def spy(programs, prompts, limits, waiting, **sizes):
        lanes.append(len(waiting[0]))
        return original(programs, prompts, limits, waiting, **sizes)

    monkeypatch.setattr(scheduling, "decode_all", spy)
    options = {"batch_size": 6, "beam_size": 2, "length_penalty": 0.6}
    monkeypatch.setattr(scheduling, "num_lanes", lambda _: 3)
    apart, scores = generate(graph, params, texts, **options)
    assert sorted(lanes[:3]) == [13, 14, 14]
    lanes.clear()
    monkeypatch.setattr(scheduling, "num_lanes", lambda _: 1)
    together, expected = generate(graph, params, texts, **options)
    assert lanes[0] == 41
    assert apart == together
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_an_error_in_one_lane_is_raised_and_ends_the_others(monkeypatch):
    graph, params = make(layers=1)
    monkeypatch.setattr(scheduling, "num_lanes", lambda _: 2)
    original, threads = scheduling.to_arrays, []

    def fail(numbers, *others):
        threads.append(len(numbers[0]))
        if len(threads) == 3:
            raise RuntimeError("out of memory")
        return original(numbers, *others)

    monkeypatch.setattr(scheduling, "to_arrays", fail)
    texts = sentences(*[3] * 200)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(graph, params, texts, limits=[4] * 200, batch_size=2)
    assert len(threads) < 20  # of a hundred


@pytest.mark.slow
def test_a_search_that_the_cache_cuts_short_is_started_again(monkeypatch):
    """Poor hypotheses have ended when the cache is full, and better ones are longer."""
    graph, params = make(seed=9)
    scale_eos(params, 1.5)
    texts = sentences(*(9 + i % 8 for i in range(40)), seed=9)
    options = {"beam_size": 5, "length_penalty": 0.6, "batch_size": 80}
    unfinished = []  # after each start
    original = decoding.decode_in_lanes

    def spy(programs, prompts, limits, waiting, *sizes):
        found = original(programs, prompts, limits, waiting, *sizes)
        unfinished.append(set(range(40)) - found[0].keys())
        return found

    monkeypatch.setattr(decoding, "decode_in_lanes", spy)
    tokens, scores = generate(graph, params, texts, **options)
    monkeypatch.setattr(decoding, "decode_in_lanes", original)
    assert any(len(tokens[i]) < 24 for i in unfinished[0])  # what the first cache holds
    # all at once, with the largest cache
    limits = jnp.array([2 * len(text) + 16 for text in texts])
    search = {"beam_size": 5, "length_penalty": 0.6}
    out = jitted(graph, max_length=64, **search)(params, *batch(texts), None, limits)
    assert tokens == [row[:-1] for row in trimmed(out.tokens)]
    np.testing.assert_allclose(scores, out.scores, rtol=1e-4)


@pytest.mark.slow
def test_a_result_too_long_for_its_prompt_holds_up_no_other(monkeypatch, one_lane):
    """It is left out when the others continue in a smaller cache, and starts again."""
    graph, params = make(seed=2)
    scale_eos(params, 1.5)
    texts = sentences(24, 17, *(3 + i % 14 for i in range(28)), seed=2)
    left_out = []
    original = scheduling.keep

    def spy(state, rows, count, **shape):
        left_out.append(int((~state.rows.done).sum() - count.sum()))
        return original(state, rows, count, **shape)

    monkeypatch.setattr(scheduling, "keep", spy)
    together, scores = generate(graph, params, texts, batch_size=4)
    assert max(left_out) > 0
    left_out.clear()
    apart, expected = generate(graph, params, texts)
    assert not any(left_out)
    assert together == apart
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


@pytest.mark.slow
def test_where_most_results_are_long_all_start_again(monkeypatch, one_lane):
    graph, params = make(layers=1)
    scale_eos(params, 0.0)
    sent = []
    original = scheduling.to_arrays

    def spy(numbers, *others):
        sent.extend(numbers[0])
        return original(numbers, *others)

    monkeypatch.setattr(scheduling, "to_arrays", spy)
    texts = sentences(*[5] * 60)
    tokens, _ = generate(graph, params, texts, batch_size=4)
    assert {len(each) for each in tokens} == {25}  # the cache has 24 slots, then 32
    assert sorted(sent[-60:]) == list(range(60))
    assert len(sent) < 80


def test_prompts_are_prefilled_no_wider_than_the_rows():
    for length in range(1, 300):
        width = scheduling.columns(length)
        assert length <= width <= scheduling.bucket(length)


@pytest.mark.slow
def test_a_bucket_compiles_each_program_once(monkeypatch):
    graph, params = make(seed=3, layers=1)
    scale_eos(params, 0.0)
    found = []

    def spy(*arguments):
        found.append(original(*arguments))
        return found[-1]

    original = decoding.programs
    monkeypatch.setattr(decoding, "programs", spy)

    def sizes():
        return [program._cache_size() for program in found[0]]

    # the model never ends, so the caches of 24 and then of 32 or 64 slots are met
    for lengths in ((5,), (16,)):
        generate(graph, params, sentences(*lengths))
    compiled = sizes()
    assert min(compiled) >= 1
    for lengths in ((4,), (12,), (16,)):
        generate(graph, params, sentences(*lengths, seed=1))
    assert all(each is found[0] for each in found)
    assert sizes() == compiled


@pytest.mark.slow
def test_on_an_accelerator_all_prompts_share_one_program(monkeypatch, one_lane):
    """The tokens are the same as on a CPU, with a third of the programs or fewer."""
    graph, params = make(seed=3, layers=1)
    texts = sentences(*range(1, 41))
    limits = [len(text) for text in texts]
    original, found = decoding.programs.__wrapped__, []

    def spy(*arguments):  # without its cache
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(decoding, "programs", spy)

    def run():
        return generate(graph, params, texts, limits=limits, batch_size=8)[0]

    wanted = run()
    monkeypatch.setattr(scheduling, "compiles_slowly", lambda: True)
    assert run() == wanted
    cpu, ours = ([each._cache_size() for each in programs] for programs in found)
    assert ours == [1, 1, 1] and min(cpu[1:]) >= 3
