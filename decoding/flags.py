"""Command-line flags for decoding, shared by eval.py, heads.py and predict.py."""

import math

from absl import flags

BEAM_SIZE = flags.DEFINE_integer(
    "beam_size",
    5,
    "Hypotheses of beam search; 1: greedy, the default of language models.",
    1,
    2**16,
)
LENGTH_PENALTY = flags.DEFINE_float(
    "length_penalty",
    0.6,
    "Alpha: scores are log-probabilities / ((5 + n) / 6)^alpha (Wu et al. 2016); by "
    "default 0 for language models.",
    0.0,
    10.0,
)
N_BEST = flags.DEFINE_integer(
    "n_best",
    None,
    "How many hypotheses of a beam to return, as INDEX ||| text ||| score.",
    1,
)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Above 0: sample instead of searching.", 0.0
)
TOP_K = flags.DEFINE_integer(
    "top_k", 0, "Sample from the k most probable tokens; 0: all.", 0
)
TOP_P = flags.DEFINE_float(
    "top_p",
    1.0,
    "Sample from the smallest set of tokens with at least this total probability.",
    0.0,
    1.0,
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the samples.", 0, 2**31 - 1)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 128, "Hypotheses decoded at a time; fewer need less memory.", 1, 2**31
)
SEARCH = BEAM_SIZE, LENGTH_PENALTY, N_BEST
SAMPLING = TEMPERATURE, TOP_K, TOP_P, SEED


def options() -> dict:
    """Return the decoding options that were given on the command line.

    Raises:
        ValueError: an option is not finite, or the options contradict each other.
    """
    for flag in (LENGTH_PENALTY, TEMPERATURE, TOP_P):
        if not math.isfinite(flag.value):
            raise ValueError(f"--{flag.name} must be finite, got {flag.value}.")
    selected = {
        flag.name: flag.value
        for flag in (*SEARCH, *SAMPLING, BATCH_SIZE)
        if flag.present
    }
    if TEMPERATURE.value == 0 and (TOP_K.value or TOP_P.value < 1 or SEED.value):
        raise ValueError(
            "--top_k, --top_p and --seed are for sampling, which needs a --temperature "
            "above 0, such as --temperature=1."
        )
    if TEMPERATURE.value > 0:
        for flag in SEARCH:
            if flag.present:
                raise ValueError(
                    f"--{flag.name} is for beam search, and --temperature="
                    f"{TEMPERATURE.value:g} samples instead; leave one of them out."
                )
    if N_BEST.value and N_BEST.value > BEAM_SIZE.value:
        raise ValueError(
            f"--n_best must be at most --beam_size={BEAM_SIZE.value}, got "
            f"{N_BEST.value}."
        )
    return selected
