"""One step of decoding: the live hypotheses of a batch, and their cache.

The beams of a sentence stand on the query axis of attention, so that they share its
keys and values: those of the source are held once a sentence, and those of the
target where they were written. A beam that goes on from another's hypothesis copies
no cache; the mask of the self-attention (`sees`) tells which beam wrote each step.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from headcount.attention.cached import cached_attention
from headcount.decoding.search import EOS, NEVER, next_pieces, penalty
from headcount.models.positions import relative_bias
from headcount.models.sites import gates_of


class Encoded(NamedTuple):
    """Sentences as every layer of the decoder looks at them."""

    memory: list  # of (key, value) of each layer, B K H S and B K S V
    mask: Bool[Array, "B 1 S"]


class Best(NamedTuple):
    """The best hypothesis that has ended; or N of them, the best first."""

    tokens: Int[Array, "B *N L"]  # by slot
    length: Int[Array, "B *N"]  # 0 where none has ended
    score: Float[Array, "B *N"]


class Rows(NamedTuple):
    """Sentences on the way, one a row; `W` live hypotheses each.

    The slots of the cache are used in turn, by all rows at once: slot `clock % L` at a
    time. A row may begin at any time (`begin`).
    """

    begin: Int[Array, "B"]  # the clock at its first token
    limit: Int[Array, "B"]  # tokens that a hypothesis may have, EOS included
    key: Key[Array, "B"]  # of its samples
    done: Bool[Array, "B"]
    tokens: Int[Array, "B W L"]  # of the live hypotheses, by slot
    sees: Bool[Array, "B W L W"]  # what each of them sees, by slot and beam
    log_probs: Float[Array, "B W"]
    num_ended: Int[Array, "B"]  # hypotheses
    best: Best
    source: Encoded


class State(NamedTuple):
    """What a step of decoding works on."""

    clock: Int[Array, ""]
    rows: Rows
    cache: list  # of (key, value) of each layer, B K H L·W and B K L·W V


class Decoded(NamedTuple):
    """The best hypothesis of every sentence, or the n best, the best first.

    Where fewer have ended, the others have no token and the score -inf.
    """

    tokens: Int[Array, "B *N L"]  # up to EOS and including it, then 0
    scores: Float[Array, "B *N"]  # log-probability (nats) over the length penalty
    finished: Bool[Array, "B"]  # False: the best may be longer than L, see `limits`


def empty(model, source, keys, *, max_length, beam_size, n_best=None) -> State:
    """A state whose rows are all done, for sentences of the shape of the source."""
    nothing = jnp.zeros_like(source)
    B, L, W = source.shape[0], max_length, beam_size

    def cache(layer):
        x = jax.ShapeDtypeStruct((B, L * W, model.width), model.embedding.dtype)
        return zeros(jax.eval_shape(partial(remembered, layer.self_attention), x))

    def zeros(tree):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    # of the shapes alone: XLA would fold an encoding of zeros, for seconds
    def rows():
        encoded = encode(model, nothing, nothing, nothing)
        sizes = {"max_length": L, "beam_size": W, "n_best": n_best}
        return start(encoded, keys, nothing[:, 0], 0, **sizes)

    rows = zeros(jax.eval_shape(rows)._replace(key=None))
    rows = rows._replace(key=keys, done=jnp.ones(B, bool))
    return State(
        jnp.zeros((), jnp.int32), rows, [cache(layer) for layer in model.decoder]
    )


def encode(model, source, segments, positions, head_gates=None) -> Encoded:
    """What the decoder needs to know of sentences, one a row."""
    hidden = model.encode(source, segments, positions, head_gates=head_gates)
    memory = [remembered(layer.cross_attention, hidden) for layer in model.decoder]
    return Encoded(memory, (segments > 0)[:, None])


def of_width(encoded: Encoded, S: int) -> Encoded:
    """The same in S columns: padding is added, or left out."""

    def fit(x, axis):
        missing = [(0, 0)] * x.ndim
        missing[axis] = (0, max(0, S - x.shape[axis]))
        return jax.lax.slice_in_dim(jnp.pad(x, missing), 0, S, axis=axis)

    memory = [(fit(key, 3), fit(value, 2)) for key, value in encoded.memory]
    return Encoded(memory, fit(encoded.mask, 2))


def start(
    encoded: Encoded, keys, limits, clock, *, max_length, beam_size, n_best=None
) -> Rows:
    """Sentences that begin at the clock. A row without tokens is done."""
    B, L, W = len(encoded.mask), max_length, beam_size
    kept = (B,) if n_best is None else (B, n_best)
    return Rows(
        begin=jnp.full(B, clock, jnp.int32),
        limit=limits,
        key=keys,
        done=~encoded.mask.any((1, 2)),
        tokens=jnp.zeros((B, W, L), jnp.int32),
        sees=with_own(jnp.zeros((B, W, L, W), bool), clock),
        # The beams are alike at first: only one may have continuations.
        log_probs=jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, NEVER), (B, W)),
        num_ended=jnp.zeros(B, jnp.int32),
        best=Best(
            tokens=jnp.zeros((*kept, L), jnp.int32),
            length=jnp.zeros(kept, jnp.int32),
            score=jnp.full(kept, -jnp.inf),
        ),
        source=encoded,
    )


def run(step, state: State, enough: Int[Array, "*R"] | int) -> State:
    """Decode until that many rows are done; of several trials, in every one of them.

    `step` is `advance` with all but the state.
    """
    return jax.lax.while_loop(
        lambda state: (state.rows.done.sum(-1) < enough).any(), step, state
    )


def advance(
    model, state: State, *, length_penalty, head_gates=None, **options
) -> State:
    """Decode one token of every live hypothesis."""
    clock, rows = state.clock, state.rows
    B, W, L = rows.tokens.shape
    hidden, cache = next_hidden(model, state, head_gates)
    length = clock - rows.begin + 1  # with the token decoded now
    is_slot = jnp.arange(L) == clock % L
    found = next_pieces(
        model.logits(hidden).astype(jnp.float32),
        rows.log_probs,
        length,
        length >= rows.limit,
        rows.key,
        **options,
    )

    score = jnp.where(found.ends, found.eos_log_probs, -jnp.inf)
    score /= penalty(length, length_penalty)[:, None]
    several = rows.best.score.ndim == 2
    best = (with_several if several else with_one)(rows, score, length, is_slot)
    num_ended = rows.num_ended + found.ends.sum(1, dtype=jnp.int32)
    live = found.log_probs.max(1)
    first, last = best.score, best.score
    if several:
        first = best.score[:, 0]
        # where none goes on, fewer have ended than are wanted
        last = jnp.where(live > NEVER / 2, best.score[:, -1], jnp.inf)
    hope = live / penalty(rows.limit, length_penalty)
    # W poor hypotheses may end before a better one does: look at the live ones too
    enough = (num_ended >= W) & (live / penalty(length, length_penalty) <= first)
    settled = enough | (hope <= last)
    cut = ~settled & ~rows.done & (length >= L)  # something better may be longer than L

    tokens = pick(rows.tokens, found.parents)
    tokens = jnp.where(is_slot, found.pieces[..., None], tokens)
    sees = pick(rows.sees.reshape(B, W, -1), found.parents).reshape(B, W, L, W)
    written = found.parents[:, :, None, None] == jnp.arange(W)
    sees = with_own(jnp.where(is_slot[:, None], written, sees), clock + 1)
    rows = rows._replace(
        done=rows.done | settled | (length >= L),
        tokens=tokens,
        sees=sees,
        log_probs=found.log_probs,
        num_ended=num_ended,
        best=best._replace(
            length=jnp.where(cut[:, None] if several else cut, 0, best.length)
        ),
    )
    return State(clock + 1, rows, cache)


def with_one(rows: Rows, score: Float[Array, "B W"], length, is_slot) -> Best:
    """The best that has ended, with the hypotheses that end now and their scores."""
    winner = score.argmax(1)
    score = jnp.where(rows.done, -jnp.inf, score.max(1))
    better = score > rows.best.score
    ended = jnp.where(is_slot, EOS, pick(rows.tokens, winner[:, None])[:, 0])
    return Best(
        tokens=jnp.where(better[:, None], ended, rows.best.tokens),
        length=jnp.where(better, length, rows.best.length),
        score=jnp.where(better, score, rows.best.score),
    )


def with_several(rows: Rows, score: Float[Array, "B W"], length, is_slot) -> Best:
    """The same of the n best; of equal scores those come first that ended first."""
    score = jnp.where(rows.done[:, None], -jnp.inf, score)
    length = jnp.broadcast_to(length[:, None], score.shape)
    ended = Best(jnp.where(is_slot, EOS, rows.tokens), length, score)
    every = jax.tree.map(lambda *x: jnp.concatenate(x, 1), rows.best, ended)
    score, choice = jax.lax.top_k(every.score, rows.best.score.shape[1])
    length = jnp.take_along_axis(every.length, choice, axis=1)
    return Best(pick(every.tokens, choice), length, score)


def with_own(sees: Bool[Array, "B W L W"], clock) -> Bool[Array, "B W L W"]:
    """`sees`, but at the clock's slot every hypothesis sees its own place only."""
    _, W, L, _ = sees.shape
    beams, is_slot = jnp.arange(W), jnp.arange(L) == clock % L
    return jnp.where(is_slot[:, None], (beams[:, None] == beams)[:, None], sees)


def next_hidden(
    model, state: State, head_gates: dict | None = None
) -> tuple[Float[Array, "B W D"], list]:
    """What is known before the next token of every hypothesis, and the grown cache."""
    clock, rows = state.clock, state.rows
    B, W, L = rows.tokens.shape
    step = jnp.minimum(clock - rows.begin, L - 1)[:, None]  # a done row may be older
    before = jax.lax.dynamic_index_in_dim(
        rows.tokens, (clock - 1) % L, axis=2, keepdims=False
    )
    positions = jnp.broadcast_to(step, (B, W))
    x = model.embed(jnp.where(step == 0, model.bos, before), positions, L)
    turn = positions if model.positions == "rotary" else None
    past = rows.sees.reshape(B, W, L * W)
    bias = None
    if model.positions == "relative":  # slots grow old in step, in whatever row
        table, age = model.decoder_positions[...], (clock - jnp.arange(L)) % L
        bias = jnp.repeat(relative_bias(table, -age, is_causal=True), W, axis=1)
    cache = []
    for index, (layer, grown, memory) in enumerate(
        zip(model.decoder, state.cache, rows.source.memory, strict=True)
    ):
        gates = gates_of(head_gates, index, self="decoder", cross="cross")

        def to_self(x, attention=layer.self_attention, grown=grown, gates=gates):
            query, *new = attention.queries_keys_values(x, turn)
            at = clock % L * W
            cache.append(
                tuple(
                    jax.lax.dynamic_update_slice_in_dim(old, x, at, axis)
                    for old, x, axis in zip(grown, by_head(*new), (3, 2), strict=True)
                )
            )
            parameters = attention.softmax_parameters()
            heads = cached_attention(query, *cache[-1], past, bias, **parameters)
            return attention.merged(heads, x, gates.get("self"))

        def to_memory(x, attention=layer.cross_attention, memory=memory, gates=gates):
            query, parameters = attention.queries(x), attention.softmax_parameters()
            heads = cached_attention(query, *memory, rows.source.mask, **parameters)
            return attention.merged(heads, x, gates.get("cross"))

        x = layer.sublayer(to_self, layer.self_norm, x)
        x = layer.sublayer(to_memory, layer.cross_norm, x)
        x = layer.sublayer(layer.mlp, layer.mlp_norm, x)
    return x if model.decoder_norm is None else model.decoder_norm(x), cache


def remembered(attention, x: Float[Array, "B S D"]):
    """What is kept of x to be attended to."""
    return by_head(*attention.keys_values(x))


def by_head(key: Float[Array, "B S K H"], value: Float[Array, "B S K V"]):
    """Keys B K H S and values B K S V: a head's are read together."""
    return key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)


def pick(x: Shaped[Array, "B W L"], beams: Int[Array, "B X"]) -> Shaped[Array, "B X L"]:
    """The given beams of each sentence."""
    return jnp.take_along_axis(x, beams[..., None], axis=1)


def decoded(rows: Rows) -> Decoded:
    """The best hypotheses that have ended, from the order of the slots to their own."""
    tokens, length, score = rows.best
    L = tokens.shape[-1]
    place = jnp.arange(L)
    slot, finished = (rows.begin[:, None] + place) % L, length > 0
    if score.ndim == 2:
        slot, finished = slot[:, None], finished[:, 0]
    tokens = jnp.take_along_axis(tokens, slot, axis=-1)
    tokens = jnp.where(place < length[..., None], tokens, 0)
    return Decoded(tokens, score, finished)
