"""Beam search, greedy search and sampling: choose which hypotheses to continue."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from headcount.data.tokenizers import BOS, EOS, PAD
from headcount.decoding.sampling import sample

NEVER = -1e9  # log-probability of excluded continuations; finite, so sums are finite
BLOCK = 64  # tokens per block in `top_tokens`


class Vocabulary(NamedTuple):
    """EOS and excluded tokens of a search."""

    eos: int = EOS  # ends a hypothesis
    banned: tuple[int, ...] = (PAD, BOS)


DEFAULT_VOCABULARY = Vocabulary()


class Continuations(NamedTuple):
    """Result of one search step, with W hypotheses per row."""

    log_probs: Float[Array, "B W"]  # of the new hypotheses
    parents: Int[Array, "B W"]  # indices of the old hypotheses that they continue
    tokens: Int[Array, "B W"]  # last tokens of the new hypotheses
    ends: Bool[Array, "B W"]  # whether each old hypothesis ends now
    eos_log_probs: Float[Array, "B W"]  # of each old hypothesis followed by EOS


def check_options(
    *,
    beam_size: int = 1,
    length_penalty: float = 0.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    return_scores: bool = True,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
) -> dict:
    """Return all options of `generate`, with defaults.

    Raises:
        ValueError: an option is out of range.
    """
    options = dict(locals())
    for name, valid, requirement in (
        ("beam_size", beam_size >= 1, "at least 1"),
        ("length_penalty", length_penalty >= 0, "at least 0"),
        ("temperature", temperature >= 0, "at least 0"),
        ("top_k", top_k >= 0, "at least 0"),
        ("top_p", 0 < top_p <= 1, "above 0 and at most 1"),
    ):
        if not valid:
            raise ValueError(f"{name} must be {requirement}, got {options[name]}.")
    if temperature and beam_size > 1:
        raise ValueError(f"Sampling needs beam_size 1, got {beam_size}.")
    return options


def check_n_best(n_best: int | None, beam_size: int) -> None:
    """Raise a ValueError unless n_best is from 1 to beam_size, or None."""
    if n_best is not None and not 1 <= n_best <= beam_size:
        raise ValueError(
            f"n_best must be from 1 to beam_size={beam_size}, got {n_best}."
        )


def length_penalty_at(length, exponent: float):
    """Return ((5 + length) / 6)^exponent: Wu et al. 2016, equation 14."""
    return ((5 + length) / 6) ** exponent


def continue_hypotheses(
    logits: Float[Array, "B W vocab"],
    log_probs: Float[Array, "B W"],
    length: Int[Array, "B"],
    last: Bool[Array, "B"],
    keys: Key[Array, "B"],
    *,
    beam_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    return_scores: bool,
    vocabulary: Vocabulary,
) -> Continuations:
    """Choose continuations of hypotheses by search or sampling.

    Args:
        logits: logits of the next token.
        log_probs: log-probabilities of the hypotheses so far.
        length: number of tokens, including the next one.
        last: whether this is a row's last step, in which all its hypotheses end.
        keys: keys for sampling, one per row.
        beam_size, temperature, top_k, top_p, return_scores, vocabulary: see
            `generate.generate_trials`.
    """
    B, W, size = logits.shape
    eos, banned = vocabulary
    first = eos + 1 if banned == tuple(range(eos)) else 0
    allowed = logits
    if not first:  # mask excluded tokens; otherwise they are the first ones
        ruled_out = jnp.zeros(size, bool).at[jnp.array((eos, *banned))].set(True)
        allowed = jnp.where(ruled_out, -jnp.inf, logits)
    ranked, tokens = top_tokens(allowed, min(W, size), first)
    # Probabilities are the model's own, including those of excluded tokens.
    if first:
        largest = jnp.maximum(ranked[..., 0], logits[..., :first].max(-1))
    else:
        largest = logits.max(-1)
    log_total = largest
    if return_scores or W > 1:  # a single hypothesis needs no comparison
        log_total += jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))
    eos_log_probs = log_probs + logits[..., eos] - log_total
    if temperature:
        start = eos if first else 0
        drawable = allowed[:, 0].at[:, eos].set(logits[:, 0, eos])[:, start:]
        keys = jax.vmap(jax.random.fold_in)(keys, length)
        drawn = start + sample(drawable, keys, temperature, top_k, top_p)
        logit = jnp.take_along_axis(logits[:, 0], drawn[:, None], axis=1)
        ends = (last | (drawn == eos))[:, None]
        continued = log_probs + jnp.maximum(logit - log_total, NEVER)
        return Continuations(
            log_probs=jnp.where(ends, NEVER, continued),
            parents=jnp.zeros((B, 1), jnp.int32),
            tokens=drawn[:, None],
            ends=ends,
            eos_log_probs=eos_log_probs,
        )

    extended = jnp.maximum(log_probs[..., None] + ranked - log_total[..., None], NEVER)
    extended = jnp.where(last[:, None, None], NEVER, extended).reshape(B, -1)
    best, choice = jax.lax.top_k(extended, W)
    parents = choice // ranked.shape[-1]
    tokens = jnp.take_along_axis(tokens.reshape(B, -1), choice, axis=1)
    # A hypothesis ends if fewer than W continuations, EOS or not, are better.
    better = (best[:, None] > eos_log_probs[..., None]).sum(-1)
    better += (eos_log_probs[:, None] > eos_log_probs[..., None]).sum(-1)
    ends = (better < W) & (eos_log_probs > NEVER / 2)
    return Continuations(best, parents, tokens, ends, eos_log_probs)


def top_tokens(
    logits: Float[Array, "*B vocab"], count: int, first: int
) -> tuple[Float[Array, "*B _"], Int[Array, "*B _"]]:
    """Return the largest logits and their tokens, ignoring tokens below `first`.

    Equivalent to `jax.lax.top_k` on these tokens. For large vocabularies, it first
    selects blocks of tokens by their maxima, in one vectorised pass. On two cores, for
    160 rows of 8000 tokens, this took 0.4 ms, `top_k` 1.9 ms and `argmax` 5.7 ms.
    """
    *shape, vocab = logits.shape
    logits = logits.reshape(-1, vocab)  # with more axes, XLA sorts fully on CPUs
    num_blocks = vocab // BLOCK
    if num_blocks < max(2 * count, first):  # each ignored token needs its own block
        logits = jnp.where(jnp.arange(vocab) < first, -jnp.inf, logits)
        values, tokens = jax.lax.top_k(logits, count)
        return values.reshape(*shape, count), tokens.reshape(*shape, count)
    # Blocks are strided, so that maxima are elementwise over rows. The first tokens are
    # excluded in small arrays rather than by copying the logits.
    blocked = logits[:, : num_blocks * BLOCK].reshape(-1, BLOCK, num_blocks)
    largest = blocked.max(1).at[:, :first].set(blocked[:, 1:, :first].max(1))
    _, blocks = jax.lax.top_k(largest, count)
    members = jnp.take_along_axis(blocked, blocks[:, None], axis=2)
    top = jnp.where(blocks < first, -jnp.inf, members[:, 0])
    members = members.at[:, 0].set(top).reshape(-1, BLOCK * count)
    remainder = logits[:, num_blocks * BLOCK :]
    candidates = jnp.concatenate([members, remainder], axis=1)
    values, places = jax.lax.top_k(candidates, count)
    block = jnp.take_along_axis(blocks, places % count, axis=1)
    tokens = places // count * num_blocks + block
    in_remainder = places - BLOCK * count
    tokens = jnp.where(in_remainder >= 0, num_blocks * BLOCK + in_remainder, tokens)
    return values.reshape(*shape, count), tokens.reshape(*shape, count)
