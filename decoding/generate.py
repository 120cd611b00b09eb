"""Generate token sequences: the functions that tasks call.

    generate(graph, params, prompts, ...) -> tokens and scores, or n-best lists
    generate_trials(graph, params, prompts, ...) -> the same for every trial
    stream(graph, params, prompt, ...) -> iterator of tokens, as they are decoded

For encoder-decoders, a prompt is a source sentence. For decoder-only models, it is the
beginning of a text and starts with BOS.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from headcount.decoding.scheduling import (
    TRIAL_AXES,
    Queue,
    bucket,
    decode_in_lanes,
    num_lanes,
    per_device,
    power_of_two,
    serve,
    slots,
    squeeze_trials,
)
from headcount.decoding.search import check_n_best, check_options
from headcount.decoding.step import (
    Decoded,
    Prompt,
    State,
    advance,
    empty_state,
    prefill,
    start,
)
from headcount.models import precision
from headcount.models.validation import check_gates


class Programs(NamedTuple):
    """A model's jitted functions; each is compiled once per shape."""

    make_idle: Callable  # (leaves, shape=(B, S), max_length=L, n_best=N) -> State
    prefill: Callable  # (leaves, head_gates, tokens, lengths) -> Prompt
    serve: Callable  # (state, leaves, head_gates, queue, seeds, enough); see `serve`


@lru_cache(maxsize=64)
def programs(graph, structure, options) -> Programs:
    """Return the programs of a model for the given search options.

    Look them up once per call: hashing the graph takes as long as half a decoding step.
    """
    fixed = {"graph": graph, "structure": structure}
    options = dict(options)

    @partial(jax.jit, static_argnames=("shape", "max_length", "n_best"))
    def make_idle(leaves, **sizes):
        sizes["beam_size"] = options["beam_size"]
        return per_device(partial(_idle, **fixed, **sizes))(leaves)

    @jax.jit
    def prefill_all(*arrays):
        return per_device(partial(_prefill, **fixed))(*arrays)

    @partial(jax.jit, donate_argnums=0)
    def serve_all(*arrays):
        return per_device(partial(_serve, **fixed, options=options))(*arrays)

    return Programs(make_idle, prefill_all, serve_all)


def _idle(leaves, *, graph, structure, shape, **sizes) -> State:
    """Return `empty_state` for every trial; `shape` is (B, S)."""

    def one(leaves):
        model = precision.model_of(graph, jax.tree.unflatten(structure, leaves))
        keys = jnp.broadcast_to(jax.random.key(0), shape[:1])
        return empty_state(model, jnp.zeros(shape, jnp.int32), keys, **sizes)

    state = jax.vmap(one, out_axes=TRIAL_AXES)(leaves)
    return state._replace(clock=state.clock[None])


def _prefill(
    leaves,
    head_gates,
    tokens: Int[Array, "R Q S"],
    lengths: Int[Array, "R Q"],
    *,
    graph,
    structure,
) -> Prompt:
    """Call `prefill` for every trial's prompts."""
    params = precision.rounded(graph, jax.tree.unflatten(structure, leaves))

    def one(params, tokens, lengths, head_gates):
        model = nnx.merge(graph, params)
        check_gates(head_gates, model.head_gates())
        return prefill(model, tokens, lengths, head_gates)

    return squeeze_trials(one)(params, tokens, lengths, head_gates)


def _serve(
    state: State,
    leaves,
    head_gates,
    queue: Queue,
    seeds: Int[Array, "R"],
    enough: Int[Array, "R"],
    *,
    graph,
    structure,
    options,
) -> tuple[State, Decoded, Array, Array, Array]:
    """Call `serve` for every trial; all trials of a device step together."""
    params = precision.rounded(graph, jax.tree.unflatten(structure, leaves))

    def step(params, head_gates, state):
        model = nnx.merge(graph, params)
        return advance(model, state, head_gates=head_gates, **options)

    def all_steps(params, head_gates, state, queue, seeds, enough):
        map_trials = jax.vmap if enough.ndim else lambda function, *_: function
        steps = map_trials(step, (0, 0, TRIAL_AXES), TRIAL_AXES)
        steps = partial(steps, params, head_gates)
        return serve(steps, map_trials, state, queue, seeds, enough)

    state = state._replace(clock=state.clock[0])
    arrays = params, head_gates, state, queue, seeds, enough
    state, *results = squeeze_trials(all_steps, lambda function: function)(*arrays)
    return state._replace(clock=state.clock[None]), *results


def generate(
    graph: nnx.GraphDef,
    params,
    prompts: list[list[int]],
    *,
    head_gates: dict | None = None,
    sample_numbers: Sequence[int] | None = None,
    n_best: int | None = None,
    **options,
) -> tuple[list[list[int]], list[float]] | list[list[tuple[list[int], float]]]:
    """Continue prompts with the model of one trial.

    Args:
        graph, params: the trial's model, from `nnx.split`.
        prompts: token ids.
        head_gates: see `generate_trials`, with shape L N.
        sample_numbers, n_best, options: see `generate_trials`.

    Returns:
        The generated token ids of each prompt, without EOS, and their scores. With
        n_best, a list of (token ids, score) per prompt instead, the best first.
    """
    params, head_gates = jax.tree.map(lambda x: x[None], (params, head_gates))
    options |= {"head_gates": head_gates, "sample_numbers": sample_numbers}
    return generate_trials(graph, params, prompts, n_best=n_best, **options)[0]


def default_limit(length: int, most: int | None) -> int:
    """Return how many tokens may follow a prompt: twice its length plus 16.

    `most` is an upper bound, or None.
    """
    limit = 2 * length + 16
    return limit if most is None else min(limit, most)


def generate_trials(
    graph: nnx.GraphDef,
    params,
    prompts: list[list[int]],
    chosen: list[list[int]] | None = None,
    *,
    batch_size: int = 128,
    limits: Sequence[int] | None = None,
    max_limit: int | None = None,
    seed: int = 0,
    sample_numbers: Sequence[int] | None = None,
    head_gates: dict | None = None,
    n_best: int | None = None,
    **options,
) -> list:
    """Continue prompts with every trial, all trials at once.

    There may be any number of prompts of any length. Results do not depend on other
    prompts or trials; samples also depend on the prompt's sample number. The longest
    prompts start first. When a prompt is done, the next one, which waits on the device,
    takes its row. On a CPU, every core decodes separate prompts, batch_size hypotheses
    each. Programs are compiled for all rows and for an eighth of them (for 16 rows and
    1 row if there are at most 16 prompts; for decoder-only models, for no more rows
    than prompts need), and for lengths of 16, 24, 32, 48, ... On accelerators, all
    prompts have one number of rows and one length.

    A hypothesis with log-probability p and n tokens, including EOS, has the score
    p / ((5 + n) / 6)^length_penalty (Wu et al. 2016, section 7). The search keeps
    beam_size live hypotheses. A hypothesis finishes when its EOS is among the beam_size
    best continuations of the step. A prompt is done when beam_size hypotheses have
    finished and no live one scores higher at its current length than the best of them,
    or when no live one can do so at any length. At a prompt's limit, only EOS is
    allowed. With beam_size 1 this is greedy decoding.

    Args:
        graph, params: a model from `nnx.split`, whose leaves have the trial axis R.
        prompts: token ids. A source sentence ends with EOS; the beginning of a text
            starts with BOS.
        chosen: indices of the prompts for each trial. Defaults to all prompts.
        batch_size: number of hypotheses per trial that are decoded at a time, with
            beam_size per prompt. Also the number of prompts per trial that are sent to
            the device at a time.
        limits: largest number of tokens of each result, including EOS. Defaults to
            `default_limit`.
        max_limit: upper bound of default limits.
        seed: seed for sampling.
        sample_numbers: numbers of the prompts, which make samples of equal prompts
            differ. Defaults to their indices.
        head_gates: see `Transformer.__call__`, with shape R L N.
        n_best: N, the number of finished hypotheses to return, ordered by score, or
            None for only the best. With n_best, the search continues until no live
            hypothesis can be among the N best, or until it would end without n_best.
            The best hypothesis is the same in both cases.
        options: the following options.
            beam_size: W. Default 1.
            length_penalty: the exponent, at least 0. Default 0.
            temperature: 0, the default, searches. Above 0, tokens are sampled from
                softmax(logits / temperature).
            top_k: sample from the k most probable tokens. Default 0, which means all.
            top_p: sample from the smallest set of tokens whose probabilities sum to at
                least top_p (Holtzman et al. 2020). Default 1.
            return_scores: False skips the softmax if beam_size is 1, which makes scores
                meaningless. Default True.
            vocabulary: EOS, and tokens that are never produced; see
                `search.Vocabulary`.

    Returns:
        The result of `generate` for every trial, in the order of `chosen`.

    Raises:
        ValueError: an option is out of range, or sampling is combined with a beam.
    """
    options = check_options(**options)
    beam_size = options["beam_size"]
    check_n_best(n_best, beam_size)
    is_decoder_only = "encoder" not in params
    if limits is None:
        limits = [default_limit(len(x), max_limit) for x in prompts]
    leaves, structure = jax.tree.flatten(params)
    if chosen is None:
        chosen = [list(range(len(prompts)))] * len(leaves[0])
    count = max(map(len, chosen))
    # few prompts don't fill the rows of a large batch
    most = max(1, min(batch_size // beam_size, max(128, 1 << count.bit_length())))
    has_few = count <= 16
    # with many prompts, a program for the last row saves less time than compiling takes
    sizes = sorted({1, min(16, most)} if has_few else {max(1, most // 8), most})
    seeds = np.full(len(chosen), seed, np.int32)
    if sample_numbers is None:
        sample_numbers = range(len(prompts))
    sample_ids = np.array(sample_numbers, np.int32)
    make_idle, prefill, serve = programs(graph, structure, tuple(options.items()))
    bound_programs = (
        partial(make_idle, leaves, n_best=n_best),
        partial(prefill, leaves, head_gates),
        lambda state, queue, enough: serve(
            state,
            leaves,
            head_gates,
            queue._replace(numbers=sample_ids[queue.numbers]),
            seeds,
            enough,
        ),
    )
    results: list[dict] = [{} for _ in chosen]
    # Translations are rarely longer than their source by more than a third. Longer ones
    # come back unfinished and are restarted with more slots. The length of a text does
    # not predict that of its continuation, which gets all slots at once.
    factor = max(limits, default=1) if is_decoder_only else 1
    while True:
        waiting = [
            sorted(set(numbers) - done.keys(), key=lambda i: len(prompts[i]))
            for numbers, done in zip(chosen, results, strict=True)
        ]
        if not any(waiting):
            break
        count = max(map(len, waiting))
        longest = bucket(max(limits[i] for i in itertools.chain(*waiting)))
        if factor > 1:  # no more rows than prompts, because each row has many slots
            per_lane = -(-count // num_lanes(len(chosen)))
            rows = min(most, 1 << (per_lane - 1).bit_length())
            if is_decoder_only:
                sizes = sorted({min(sizes[0], rows), rows})
            else:  # all slots at once if there are few prompts
                sizes = [rows]
                factor = longest if count <= most else factor
        room = partial(slots, factor=factor, longest=longest)
        finished = decode_in_lanes(
            bound_programs, prompts, limits, waiting, sizes, room, batch_size
        )
        for done, finished_now in zip(results, finished, strict=True):
            done |= finished_now
        factor *= 3
    ordered = [
        [done[i] for i in numbers]
        for numbers, done in zip(chosen, results, strict=True)
    ]
    if n_best is not None:
        return ordered
    return [
        ([ids for ids, _ in hypotheses], [score for _, score in hypotheses])
        for hypotheses in ordered
    ]


def stream(
    graph: nnx.GraphDef,
    params,
    prompt: list[int],
    *,
    limit: int,
    head_gates: dict | None = None,
    seed: int = 0,
    number: int = 0,
    **options,
) -> Iterator[int]:
    """Yield the tokens that continue a prompt as they are decoded, without EOS.

    The tokens equal those of `generate` with the same options.

    Args:
        graph, params: the trial's model, from `nnx.split`.
        prompt: token ids, starting with BOS.
        limit: largest number of tokens, including EOS.
        number: the sample's number; see `sample_numbers` of `generate_trials`.
        head_gates, seed, options: see `generate_trials`; head_gates has shape L N.

    Raises:
        ValueError: beam_size is above 1, or another option is out of range.
    """
    options = check_options(return_scores=False, **options)
    if options["beam_size"] > 1:
        raise ValueError("Tokens of a beam search can't be streamed.")
    step, begin = _stream_programs(graph, tuple(options.items()))
    S, L = power_of_two(len(prompt)), bucket(limit)
    tokens = np.zeros((1, S), np.int32)
    tokens[0, : len(prompt)] = prompt
    key = jax.random.fold_in(jax.random.key(seed), number)[None]
    sizes = np.array([len(prompt)]), np.array([limit])
    state = begin(params, head_gates, tokens, *sizes, key, max_length=L)
    eos = options["vocabulary"].eos
    for _ in range(limit):
        state, token = step(state, params, head_gates)
        if int(token) == eos:
            return
        yield int(token)
        if bool(state.rows.done[0]):
            return


@lru_cache(maxsize=16)
def _stream_programs(graph, options) -> tuple[Callable, Callable]:
    options = dict(options)
    beam_size = options["beam_size"]

    @partial(jax.jit, static_argnames="max_length")
    def begin(params, head_gates, tokens, lengths, limits, keys, max_length):
        model = precision.model_of(graph, params)
        sizes = {"max_length": max_length, "beam_size": beam_size}
        state = empty_state(model, tokens, keys, **sizes)
        prompt = prefill(model, tokens, lengths, head_gates)
        return state._replace(rows=start(prompt, keys, limits, 0, **sizes))

    @partial(jax.jit, donate_argnums=0)
    def step(state, params, head_gates):
        model = precision.model_of(graph, params)
        clock, L = state.clock, state.rows.tokens.shape[2]
        state = advance(model, state, head_gates=head_gates, **options)
        token = state.rows.tokens[0, 0, clock % L]
        return state, jnp.where(
            state.rows.num_finished[0] > 0, options["vocabulary"].eos, token
        )

    return step, begin
