"""Published variants of heads: settings, formula, source and claim.

The ablation `variants` has an arm for each variant, reports print the claim next to our
interval, and docs/reference/variants.md is generated from this file.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict


class Variant(NamedTuple):
    """One way to build heads."""

    settings: Callable[..., dict]  # from the base config to values by config key
    formula: str
    source: str
    claim: str  # by the authors


def of_attention(**settings) -> Callable[..., dict]:
    """Return a function to settings of model.attention that ignores the base config."""
    return lambda base: {f"model.attention.{k}": v for k, v in settings.items()}


def first_features(base) -> dict:
    """Return modded-nanogpt's gate on 12 features of the input, with 2σ for its σ."""
    features = min(12, base.model.width)
    settings = of_attention(gate="double_sigmoid", gate_features=features)
    return settings(base)


def exclusive(base) -> dict:
    """Return exclusive self-attention; in cross-attention, queries have no value."""
    settings = of_attention(exclusive=True)(base)
    if base.model.num_encoder_layers and base.model.num_decoder_layers:
        settings["model.cross_attention.exclusive"] = False
    return settings


def latent(base) -> dict:
    """Return a latent of half the width; DeepSeek-V2's is 4 heads wide, out of 128."""
    attention = base.model.attention
    is_grouped = attention.num_kv_heads not in (None, attention.num_heads)
    ungrouped = {"num_kv_heads": attention.num_heads} if is_grouped else {}
    return without_norm(base, latent_dim=max(1, base.model.width // 2), **ungrouped)


def clip(base) -> dict:
    """Return QK clip at a threshold that small models reach; Kimi K2's is 100."""
    return without_norm(base, qk_clip=20.0)


def without_norm(base, **settings) -> dict:
    """Return settings of model.attention, with any QK norm turned off."""
    norm = {"qk_norm": False} if base.model.attention.qk_norm else {}
    return of_attention(**settings, **norm)(base)


def shared_and_routed(base) -> dict:
    """Return MoH: a quarter of the heads is always on, and half of them are chosen."""
    N = base.model.attention.num_heads
    shared = max(1, N // 4)
    return of_attention(
        merge="shared_mixture",
        mixture_shared=shared,
        mixture_heads=max(1, N // 2),
        mixture_balance=0.01,
    )(base)


VARIANTS = {
    "gate": Variant(
        of_attention(gate="sigmoid"),
        "σ(x G)_n o_n, G of D × N",
        "Qiu et al. 2025, 2505.06708",
        "perplexity 6.026 → 5.792 (15B MoE)",
    ),
    "gate, elementwise": Variant(
        of_attention(gate="sigmoid", gate_size="element"),
        "σ(x G)_n ⊙ o_n, G of D × N·V",
        "Qiu et al. 2025, 2505.06708",
        "perplexity 6.026 → 5.761 (15B MoE)",
    ),
    "gate, shared": Variant(
        of_attention(gate="sigmoid", gate_size="shared"),
        "σ(x G) ⊙ o_n, G of D × V",
        "Qiu et al. 2025, 2505.06708",
        "perplexity 6.026 → 5.801 (15B MoE)",
    ),
    "gate, from 1": Variant(
        of_attention(gate="double_sigmoid"),
        "2σ(x G)_n o_n, G = 0 at the start",
        "as the gate above, with the identity at the start",
        "none published",
    ),
    "gate, 12 features": Variant(
        first_features,
        "2σ(x[:12] G)_n o_n, G = 0 at the start",
        "modded-nanogpt 2025, with σ",
        "fewer steps to a loss of 3.28, without an interval",
    ),
    "gate, no input": Variant(
        of_attention(gate="double_sigmoid", gate_features=0),
        "2σ(a)_n o_n, a = 0 at the start",
        "Qiu et al. 2025, 2505.06708, as a control",
        "less than gates that depend on the input",
    ),
    "gate on values": Variant(
        of_attention(gate="sigmoid", gate_size="element", gate_on="values"),
        "σ(x G)_k ⊙ v_k",
        "Qiu et al. 2025, 2505.06708",
        "helps, but less than on the output",
    ),
    "exclusive": Variant(
        exclusive,
        "o_n − (o_n·v) / ‖v‖² v, v the token's own value",
        "Zhai 2026, 2603.09078",
        "better up to 2.7B parameters, more so for long sequences",
    ),
    "differential": Variant(
        of_attention(differential=True),
        "(softmax₁ − λ softmax₂) V, RMS norm per head",
        "Ye et al. 2024, 2410.05258",
        "the same loss with 65% of the parameters or tokens",
    ),
    "latent": Variant(
        latent,
        "c = x W; k_n = [c K_n, r], v_n = c U_n",
        "DeepSeek-V2 2024, 2405.04434",
        "better than multi-head attention; a cache 93% smaller than DeepSeek 67B's",
    ),
    "knocking": Variant(
        of_attention(knocking="linear", knocking_all=True),
        "q_n T, k_n T', v_n T'', T = 1 at the start, shared by heads",
        "Zhou et al. 2025, 2510.23052",
        "lower and steadier loss (6.1B MoE)",
    ),
    "knocking, MLP": Variant(
        of_attention(knocking="mlp"),
        "(v_n U ⊙ 2σ(v_n G)) W, U = W = 1 and G = 0 at the start",
        "Zhou et al. 2025, 2510.23052",
        "as the linear form",
    ),
    "value residual": Variant(
        of_attention(value_residual=True),
        "V ← (1 − λ) V + λ V₁, λ = 1/2 at the start",
        "Zhou et al. 2024, 2410.17897",
        "the same loss with 16% fewer parameters or 20% fewer tokens",
    ),
    "shared and routed": Variant(
        shared_and_routed,
        "Σ_n g_n o_n W_n, k_s heads always on, k routed",
        "MoH, Jin et al. 2024, 2410.11842",
        "better with 50 to 90% of the heads",
    ),
    "talking heads": Variant(
        of_attention(talking_heads=True),
        "softmax(L P) P', L the heads' logits",
        "Shazeer et al. 2020, 2003.02436",
        "lower perplexity",
    ),
    "sink": Variant(
        of_attention(sink=True),
        "softmax over the keys and a learned logit b_n",
        "gpt-oss 2025",
        "none published",
    ),
    "QK norm": Variant(
        of_attention(qk_norm=True),
        "RMSNorm(q_n) · RMSNorm(k_n)",
        "Henry et al. 2020, 2010.04245",
        "0.9 BLEU on five small corpora",
    ),
    "QK clip": Variant(
        clip,
        "W_q, W_k ← √(τ / max) W_q, W_k where a head's largest logit exceeds τ",
        "Kimi K2 2025, 2507.20534",
        "no loss spikes; no effect on the loss otherwise",
    ),
}


def claim_of(overrides: dict, base: dict) -> str | None:
    """Return the claim of an arm's variant, or None if the arm is no variant.

    Args:
        overrides: the arm's values by config key; "match" is ignored.
        base: the base config, nested.
    """
    settings = {key: value for key, value in overrides.items() if key != "match"}
    matches = (v for v in VARIANTS.values() if v.settings(ConfigDict(base)) == settings)
    variant = next(matches, None)
    return variant and variant.claim
