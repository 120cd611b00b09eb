"""Prefill and one step of decoding with a key-value cache.

`prefill` computes a prompt's keys and values once: those of a decoder-only model's
self-attention, or those of cross-attention to the encoder's output. They are stored per
row and do not change. Generated tokens have a separate cache.

The hypotheses (beams) of a row are on the query axis of attention, so that they share
its keys and values. A hypothesis that continues another one copies no cache entries:
self-attention's mask (`visible`) selects the entries of the hypothesis's ancestors.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from headcount.decoding.search import NEVER, continue_hypotheses, length_penalty_at
from headcount.models.transformer import layer_gates

SLOTS = 3, 2  # axes of tokens in the arrays that `Attention.cache` returns


class Prompt(NamedTuple):
    """Prefilled prompts."""

    memory: list  # per layer; see `Attention.cache`
    mask: Bool[Array, "B 1 S"]
    first: Int[Array, "B"]  # the token that the first step reads
    offset: Int[Array, "B"]  # position of that token
    real: Bool[Array, "B"]  # False for padding


class Best(NamedTuple):
    """The best finished hypothesis of each row, or the N best, the best first."""

    tokens: Int[Array, "B *N L"]  # by slot
    length: Int[Array, "B *N"]  # 0 if no hypothesis has finished
    score: Float[Array, "B *N"]


class Rows(NamedTuple):
    """Prompts that are being continued, one per row, with W live hypotheses each.

    All rows write to the same slot of the cache, `clock % L`. A row may start at any
    time (`begin`).
    """

    begin: Int[Array, "B"]  # the clock at the row's first token
    limit: Int[Array, "B"]  # largest number of tokens of a hypothesis, including EOS
    key: Key[Array, "B"]  # for sampling
    done: Bool[Array, "B"]
    tokens: Int[Array, "B W L"]  # of the live hypotheses, by slot
    visible: Bool[Array, "B W L W"]  # cache entries that each hypothesis attends to
    log_probs: Float[Array, "B W"]
    num_finished: Int[Array, "B"]  # number of finished hypotheses
    best: Best
    prompt: Prompt


class State(NamedTuple):
    """State of decoding between steps."""

    clock: Int[Array, ""]
    rows: Rows
    cache: list  # per layer; see `Attention.cache`


class Decoded(NamedTuple):
    """The best hypothesis of every row, or the n best, the best first.

    If fewer have finished, the others have length 0 and the score -inf.
    """

    tokens: Int[Array, "B *N L"]  # up to and including EOS, then 0
    length: Int[Array, "B *N"]  # including EOS
    scores: Float[Array, "B *N"]  # log-probability (nats) / length penalty
    finished: Bool[Array, "B"]  # False if the best may be longer than L


def empty_state(model, prompts, keys, *, max_length, beam_size, n_best=None) -> State:
    """Return a state whose rows are all done, for prompts of the given shape, B S."""
    zeros = jnp.zeros_like(prompts)
    B, L, W = prompts.shape[0], max_length, beam_size

    def make_zeros(tree):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    def cache(layer):
        x = jax.ShapeDtypeStruct((B, L * W, model.width), model.embedding.dtype)
        return make_zeros(jax.eval_shape(partial(entries, layer.self_attention), x)[0])

    # only shapes: XLA would take seconds to constant-fold a prefill of zeros
    def rows():
        prompt = prefill(model, zeros, zeros[:, 0])
        sizes = {"max_length": L, "beam_size": W, "n_best": n_best}
        return start(prompt, keys, zeros[:, 0], 0, **sizes)

    rows = make_zeros(jax.eval_shape(rows)._replace(key=None))
    rows = rows._replace(key=keys, done=jnp.ones(B, bool))
    return State(
        jnp.zeros((), jnp.int32), rows, [cache(layer) for layer in model.decoder]
    )


def prefill(
    model, prompts: Int[Array, "B S"], lengths: Int[Array, "B"], head_gates=None
) -> Prompt:
    """Compute prompts' keys and values; prompts of length 0 are padding.

    For encoder-decoders, a prompt is a source sentence. For decoder-only models, it
    starts with BOS, and its last token is left to the first decoding step.
    """
    S = prompts.shape[1]
    place = jnp.arange(S)
    if model.encoder:
        real = place < lengths[:, None]
        batch = {"source": prompts, "source_segments": real.astype(jnp.int32)}
        batch["source_positions"] = jnp.broadcast_to(place, prompts.shape)
        hidden = model.encode(batch, head_gates=head_gates)
        memory, first_value = [], None
        for layer in model.decoder:
            cached, value = entries(layer.cross_attention, hidden, first=first_value)
            first_value = value if first_value is None else first_value
            memory.append(cached)
        first = jnp.full(prompts.shape[0], model.bos, jnp.int32)
        offset = jnp.zeros(prompts.shape[0], jnp.int32)
        return Prompt(memory, real[:, None], first, offset, lengths > 0)
    offset = jnp.maximum(lengths - 1, 0)
    real = place < offset[:, None]
    memory = decoder_memory(model, prompts, real.astype(jnp.int32), head_gates)
    first = jnp.take_along_axis(prompts, offset[:, None], axis=1)[:, 0]
    return Prompt(memory, real[:, None], first, offset, lengths > 0)


def decoder_memory(model, tokens, segments, head_gates) -> list:
    """Return the keys and values of a decoder-only model's layers for its inputs."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = model.embed(tokens, positions, tokens.shape[1])
    arguments = model.position_arguments(positions, is_source=False)
    memory, values = [], []  # per layer; layers may need the first layer's values
    for index, layer in enumerate(model.decoder):
        gates = layer_gates(head_gates, index, self="decoder")

        def to_self(x, attention=layer.self_attention, gates=gates):
            first = values[0] if values else None
            cached, value = entries(attention, x, arguments.get("positions"), first)
            memory.append(cached)
            values.append(value)
            return attention(
                x,
                first=first,
                is_causal=True,
                query_segment_ids=segments,
                key_value_segment_ids=segments,
                gate=gates.get("self"),
                **arguments,
            )

        x = layer.sublayer(to_self, layer.self_norm, x)
        x = layer.sublayer(layer.mlp, layer.mlp_norm, x)
    return memory


def fit_width(prompt: Prompt, S: int) -> Prompt:
    """Pad or cut prompts to S columns."""

    def fit(x, axis):
        missing = [(0, 0)] * x.ndim
        missing[axis] = (0, max(0, S - x.shape[axis]))
        return jax.lax.slice_in_dim(jnp.pad(x, missing), 0, S, axis=axis)

    memory = [
        tuple(fit(x, axis) for x, axis in zip(arrays, SLOTS, strict=False))
        for arrays in prompt.memory
    ]
    return prompt._replace(memory=memory, mask=fit(prompt.mask, 2))


def start(
    prompt: Prompt, keys, limits, clock, *, max_length, beam_size, n_best=None
) -> Rows:
    """Return rows in which prompts start at the clock; padding rows are done."""
    B, L, W = len(prompt.mask), max_length, beam_size
    shape = (B,) if n_best is None else (B, n_best)
    return Rows(
        begin=jnp.full(B, clock, jnp.int32),
        limit=limits,
        key=keys,
        done=~prompt.real,
        tokens=jnp.zeros((B, W, L), jnp.int32),
        visible=see_own_slot(jnp.zeros((B, W, L, W), bool), clock),
        # hypotheses are identical at first: only one may have continuations
        log_probs=jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, NEVER), (B, W)),
        num_finished=jnp.zeros(B, jnp.int32),
        best=Best(
            tokens=jnp.zeros((*shape, L), jnp.int32),
            length=jnp.zeros(shape, jnp.int32),
            score=jnp.full(shape, -jnp.inf),
        ),
        prompt=prompt,
    )


def run_until(step, state: State, enough: Int[Array, "*R"] | int) -> State:
    """Run steps until enough rows are done, in every trial.

    `step` is `advance` with all arguments but the state.
    """
    return jax.lax.while_loop(
        lambda state: (state.rows.done.sum(-1) < enough).any(), step, state
    )


def advance(
    model, state: State, *, length_penalty, vocabulary, head_gates=None, **options
) -> State:
    """Decode one token of every live hypothesis."""
    clock, rows = state.clock, state.rows
    B, W, L = rows.tokens.shape
    hidden, cache = next_hidden(model, state, head_gates)
    length = clock - rows.begin + 1  # including the token decoded now
    is_slot = jnp.arange(L) == clock % L
    continuations = continue_hypotheses(
        model.logits(hidden).astype(jnp.float32),
        rows.log_probs,
        length,
        length >= rows.limit,
        rows.key,
        vocabulary=vocabulary,
        **options,
    )

    score = jnp.where(continuations.ends, continuations.eos_log_probs, -jnp.inf)
    score /= length_penalty_at(length, length_penalty)[:, None]
    is_n_best = rows.best.score.ndim == 2
    update = update_n_best if is_n_best else update_best
    best = update(rows, score, length, is_slot, vocabulary.eos)
    num_finished = rows.num_finished + continuations.ends.sum(1, dtype=jnp.int32)
    live = continuations.log_probs.max(1)
    first, last = best.score, best.score
    if is_n_best:
        first = best.score[:, 0]
        # if no hypothesis continues, accept fewer than n finished ones
        last = jnp.where(live > NEVER / 2, best.score[:, -1], jnp.inf)
    attainable = live / length_penalty_at(rows.limit, length_penalty)
    # W poor hypotheses can finish before a better one: also consider live ones
    current = live / length_penalty_at(length, length_penalty)
    settled = (num_finished >= W) & (current <= first)
    settled |= attainable <= last
    cut = ~settled & ~rows.done & (length >= L)  # a better one may be longer than L

    tokens = pick(rows.tokens, continuations.parents)
    tokens = jnp.where(is_slot, continuations.tokens[..., None], tokens)
    visible = pick(rows.visible.reshape(B, W, -1), continuations.parents).reshape(
        B, W, L, W
    )
    written = continuations.parents[:, :, None, None] == jnp.arange(W)
    visible = jnp.where(is_slot[:, None], written, visible)
    rows = rows._replace(
        done=rows.done | settled | (length >= L),
        tokens=tokens,
        visible=see_own_slot(visible, clock + 1),
        log_probs=continuations.log_probs,
        num_finished=num_finished,
        best=best._replace(
            length=jnp.where(cut[:, None] if is_n_best else cut, 0, best.length)
        ),
    )
    return State(clock + 1, rows, cache)


def update_best(
    rows: Rows, score: Float[Array, "B W"], length, is_slot, eos: int
) -> Best:
    """Return the best of the hypotheses that have finished or end now."""
    winner = score.argmax(1)
    score = jnp.where(rows.done, -jnp.inf, score.max(1))
    better = score > rows.best.score
    ended = jnp.where(is_slot, eos, pick(rows.tokens, winner[:, None])[:, 0])
    return Best(
        tokens=jnp.where(better[:, None], ended, rows.best.tokens),
        length=jnp.where(better, length, rows.best.length),
        score=jnp.where(better, score, rows.best.score),
    )


def update_n_best(
    rows: Rows, score: Float[Array, "B W"], length, is_slot, eos: int
) -> Best:
    """Return the n best as in `update_best`; in ties, earlier ones come first."""
    score = jnp.where(rows.done[:, None], -jnp.inf, score)
    length = jnp.broadcast_to(length[:, None], score.shape)
    ended = Best(jnp.where(is_slot, eos, rows.tokens), length, score)
    candidates = jax.tree.map(lambda *x: jnp.concatenate(x, 1), rows.best, ended)
    score, choice = jax.lax.top_k(candidates.score, rows.best.score.shape[1])
    length = jnp.take_along_axis(candidates.length, choice, axis=1)
    return Best(pick(candidates.tokens, choice), length, score)


def see_own_slot(visible: Bool[Array, "B W L W"], clock) -> Bool[Array, "B W L W"]:
    """Limit every hypothesis to its own entry in the clock's slot."""
    _, W, L, _ = visible.shape
    beams, is_slot = jnp.arange(W), jnp.arange(L) == clock % L
    return jnp.where(is_slot[:, None], (beams[:, None] == beams)[:, None], visible)


def next_hidden(
    model, state: State, head_gates: dict | None
) -> tuple[Float[Array, "B W D"], list]:
    """Return the last layer's output for every hypothesis, and the extended cache."""
    clock, rows = state.clock, state.rows
    B, W, L = rows.tokens.shape
    step = jnp.minimum(clock - rows.begin, L - 1)[:, None]  # done rows may exceed L
    previous = jax.lax.dynamic_index_in_dim(
        rows.tokens, (clock - 1) % L, axis=2, keepdims=False
    )
    first = rows.prompt.first[:, None]
    offset = 0 if model.encoder else rows.prompt.offset[:, None]
    positions = jnp.broadcast_to(offset + step, (B, W))
    longest = L if model.encoder else L + rows.prompt.mask.shape[-1]
    x = model.embed(jnp.where(step == 0, first, previous), positions, longest)
    rotation = positions if model.positions == "rotary" else None
    past = rows.visible.reshape(B, W, L * W)
    bias = None
    if model.positions in ("relative", "alibi"):  # all rows' slots have the same age
        age = (clock - jnp.arange(L)) % L
        bias = jnp.repeat(model.position_bias(-age, is_source=False), W, axis=1)
        if not model.encoder:
            place = jnp.arange(rows.prompt.mask.shape[-1])
            distance = place - positions[:, :1]  # B S, equal for all hypotheses
            prompt_bias = jnp.moveaxis(
                model.position_bias(distance, is_source=False), 0, 1
            )
            generated_bias = jnp.broadcast_to(bias, (B, *bias.shape))
            bias = jnp.concatenate([prompt_bias, generated_bias], axis=-1)
    if not model.encoder:
        prompt_mask = jnp.broadcast_to(
            rows.prompt.mask, (B, W, rows.prompt.mask.shape[-1])
        )
        past = jnp.concatenate([prompt_mask, past], axis=-1)
    cache, values = [], []
    for index, (layer, grown, memory) in enumerate(
        zip(model.decoder, state.cache, rows.prompt.memory, strict=True)
    ):
        gates = layer_gates(head_gates, index, self="decoder", cross="cross")

        def to_self(
            x, attention=layer.self_attention, grown=grown, memory=memory, gates=gates
        ):
            first = values[0] if values else None
            query, *key_value = attention.queries_keys_values(x, rotation, first)
            values.append(key_value[1])
            updates = zip(
                grown, attention.cache(x, *key_value, rotation), SLOTS, strict=False
            )
            at = clock % L * W
            grown = tuple(
                jax.lax.dynamic_update_slice_in_dim(old, x, at, axis)
                for old, x, axis in updates
            )
            cache.append(grown)
            parts = [grown] if model.encoder else [memory, grown]
            if B == 1:  # XLA drops the axis, and would update two copies of the cache
                parts = [tuple(map(jnp.concatenate, zip(*parts, strict=True), SLOTS))]
            heads = attention.attend_cached(query, parts, past, bias)
            heads = attention.transform_heads(heads, x, key_value[1])
            return attention.merged(heads, x, gates.get("self"))

        def to_memory(x, attention=layer.cross_attention, memory=memory, gates=gates):
            query = attention.queries(x)
            heads = attention.attend_cached(query, [memory], rows.prompt.mask)
            heads = attention.transform_heads(heads, x)
            return attention.merged(heads, x, gates.get("cross"))

        x = layer.sublayer(to_self, layer.self_norm, x)
        if model.encoder:
            x = layer.sublayer(to_memory, layer.cross_norm, x)
        x = layer.sublayer(layer.mlp, layer.mlp_norm, x)
    return x if model.decoder_norm is None else model.decoder_norm(x), cache


def entries(attention, x: Float[Array, "B S D"], positions=None, first=None):
    """Return the cache entries of x, and its values; see `Attention.cache`."""
    key, value = attention.keys_values(x, positions, first)
    return attention.cache(x, key, value, positions), value


def pick(x: Shaped[Array, "B W L"], beams: Int[Array, "B X"]) -> Shaped[Array, "B X L"]:
    """Select the given hypotheses of each row."""
    return jnp.take_along_axis(x, beams[..., None], axis=1)


def decoded(rows: Rows) -> Decoded:
    """Return finished hypotheses, with tokens in order rather than by slot."""
    tokens, length, score = rows.best
    L = tokens.shape[-1]
    place = jnp.arange(L)
    slot, finished = (rows.begin[:, None] + place) % L, length > 0
    if score.ndim == 2:
        slot, finished = slot[:, None], finished[:, 0]
    tokens = jnp.take_along_axis(tokens, slot, axis=-1)
    tokens = jnp.where(place < length[..., None], tokens, 0)
    return Decoded(tokens, length, score, finished)
