"""The questions: generators of overrides, each a dict from config path to value.

    python sweep.py run --config=configs/multi30k.py --ablation=heads --seeds=16 \\
      --workdir=runs/heads

An ablation takes the base config and yields the arms of a sweep. Its docstring opens
with the question and says which settings are scientific (compared), which nuisance
(chosen for every arm by its dev score) and that the rest is fixed. The key "match" has
`model.mlp_dim` solved so that an arm has the baseline's parameters or multiply-adds.
The baseline is the arm that is the base config, else the first one.
"""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

Arms = Iterable[dict]

HEADS = (1, 2, 4, 8, 16, 32)
SIZES = (8, 16, 32, 64, 128)
RULES = (
    "concat",
    "mean",
    "weighted",
    "dynamic",
    "gated",
    "gated_elementwise",
    "mixture",
)
SITES = ("encoder_attention", "decoder_attention", "cross_attention")


def over(path: str, *values) -> list[dict]:
    """An arm for every value of a setting."""
    return [{path: value} for value in values]


def grid(*sweeps: Arms) -> list[dict]:
    """Every combination of an arm of each sweep; later ones win."""
    return [merged(arms) for arms in itertools.product(*map(list, sweeps))]


def zipped(*sweeps: Arms) -> list[dict]:
    """The first arms of all sweeps together, the second, and so on.

    Raises:
        ValueError: one sweep is longer than another.
    """
    return [merged(arms) for arms in zip(*sweeps, strict=True)]


def chain(*sweeps: Arms) -> list[dict]:
    """The arms of one sweep after those of another."""
    return list(itertools.chain(*sweeps))


def seeds(arms: Arms, count: int, first: int = 0) -> list[dict]:
    """Every arm with the seeds first, first + 1, ..."""
    return grid(arms, over("seed", *range(first, first + count)))


def matched(arms: Arms, budget: str = "parameters") -> list[dict]:
    """Every arm with the baseline's "parameters" or "flops", by its feed-forward."""
    return grid(arms, [{"match": budget}])


def merged(dicts: Iterable[dict]) -> dict:
    """One dict of several; later ones win."""
    return {key: value for each in dicts for key, value in each.items()}


def heads(base) -> Iterator[dict]:
    """How many heads, when together they are as wide as the model?

    Vaswani et al. 2017, Table 3, rows A: N heads of H = V = D / N.

    Scientific: model.attention.num_heads, with K = N.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    for num_heads in HEADS:
        yield heads_of("model.attention", num_heads, share(base, num_heads))


def head_dim(base) -> Iterator[dict]:
    """What is a head's size worth: that of its keys alone, and that of all of it?

    First H alone (Vaswani et al. 2017, Table 3, rows B), then H = V with N·H free of
    the width (Bhojanapalli et al. 2020). By model.attention.init = "xavier" the arms'
    logits begin at other scales, by "fan_in" at the same.

    Scientific: model.attention.head_dim, model.attention.value_dim.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: N, and the rest.
    """
    attention = base.model.attention
    value_dim = attention.value_dim or share(base, attention.num_heads)
    for size in SIZES:
        yield {
            "model.attention.head_dim": size,
            "model.attention.value_dim": value_dim,
        }
    for size in SIZES:
        if size != value_dim:
            yield {"model.attention.head_dim": size, "model.attention.value_dim": size}


def merge(base) -> list[dict]:
    """By which rule should the heads be merged, as it is and for equal parameters?

    Scientific: model.attention.merge; half of N heads in a mixture.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest; model.mlp_dim is solved in the matched arms.
    """
    half = max(1, base.model.attention.num_heads // 2)
    rules = [
        rule
        if rule["model.attention.merge"] != "mixture"
        else rule | {"model.attention.mixture_heads": half}
        for rule in over("model.attention.merge", *RULES)
    ]
    return chain(rules, matched(rules[1:]))


def merge_start(base) -> list[dict]:
    """Which merge rule learns best where all begin at the same scale?

    By `equal_gain` every rule's outputs begin as widely spread as concat's; the last
    arm is concat, begun as mean does by itself. As they are: the ablation `merge`.

    Scientific: model.attention.merge, model.attention.merge_gain; half of N heads in a
    mixture. The gains are for the sizes of model.attention, not for a site's own.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    attention = base.model.attention
    N, D = attention.num_heads, base.model.width
    V, half = attention.value_dim or share(base, N), max(1, N // 2)
    rules = ("concat", "scaled", "mean", "weighted", "dynamic")
    rules += ("gated", "gated_elementwise", "mixture")  # which `equal_gain` knows
    init = attention.init
    gains = {rule: equal_gain(rule, N, V, D, half, init) for rule in rules}
    arms = zipped(
        over("model.attention.merge", *gains),
        over("model.attention.merge_gain", *gains.values()),
    )
    arms[-1]["model.attention.mixture_heads"] = half
    as_mean = {"model.attention.merge_gain": round(1 / gains["mean"], 3)}
    return chain(arms, [{"model.attention.merge": "concat"} | as_mean])


def equal_gain(
    rule: str, N: int, V: int, D: int, mixture_heads: int, init: str = "xavier"
) -> float:
    """The merge_gain with which a rule's outputs begin with the variance of concat's.

    A rule is Σ_n w_n o_n W_n. At first the heads' outputs are uncorrelated, by their
    own kernels; with variance 1 those of the rule have V · Var(W) · Σ_n E[w_n²]. Xavier
    has Var(W) = 2 / (into + D), fan_in 1 / into, where N·V go into kernels of each
    head's own, and V into one for all heads. So concat has 2NV / (NV + D), or 1; mean
    and weighted, whose w_n is 1 / N, have 2V / (N(V + D)), or 1 / N; and the gain is
    N √((V + D) / (NV + D)), or √N, exactly.

    For gates and routers it is approximate: E[w_n²] is a mean over 2^14 draws of
    logits, taken to be normal. They are sums over x, whose D elements have the variance
    1 where it is normalised, with the init's variance again: Xavier's 2 / (D + N)
    (N·V: elementwise).
    """

    def fan(into, out):  # 1 / Var(W)
        return into if init == "fan_in" else (into + out) / 2

    into = V if rule in ("mean", "weighted", "dynamic") else N * V
    out = N * V if rule == "gated_elementwise" else N
    logits = np.random.default_rng(0).normal(size=(2**14, N)) * (D / fan(D, out)) ** 0.5
    powers = np.exp(logits)
    shares = powers / powers.sum(-1, keepdims=True)
    ranked = np.sort(powers)[:, N - mixture_heads :]
    gates = powers / (1 + powers)
    weights = {
        "concat": np.ones(N),
        "scaled": np.ones(N),
        "mean": np.ones(N) / N,
        "weighted": np.ones(N) / N,
        "dynamic": shares,
        "gated": gates,
        "gated_elementwise": gates,
        "mixture": ranked / ranked.sum(-1, keepdims=True),
    }[rule]
    squares = np.square(weights).sum(-1).mean()
    # to three digits, so that the arms of a sweep are the same on every machine
    return float(f"{(N / fan(N * V, D) * fan(into, D) / squares) ** 0.5:.3g}")


def kv_heads(base) -> list[dict]:
    """How many heads may share their keys and values?

    From one of each for every head (multi-head) over groups to one for all of them
    (multi-query; Shazeer 2019, Ainslie et al. 2023). By model.attention.init = "xavier"
    fewer begin with larger keys and values, by "fan_in" with the same.

    Scientific: model.attention.num_kv_heads.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    num_heads = base.model.attention.num_heads
    fewer = [K for K in reversed(HEADS) if num_heads > K and num_heads % K == 0]
    return over("model.attention.num_kv_heads", num_heads, *fewer)


def sink(base) -> list[dict]:
    """Does it help a head that it may attend to nothing?

    By a learned logit beside those of the keys (`attention.dot_product_attention`).

    Scientific: model.attention.sink.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    del base
    return over("model.attention.sink", False, True)


def scale(base) -> Iterator[dict]:
    """Should the logits of larger keys be divided by the root of their size, or by it?

    By the root, H^-0.5, is usual; by H itself Yang et al. 2022 (Tensor Programs V), for
    query and key become aligned as they learn. Both are equal at the base config's H.

    Scientific: model.attention.head_dim, model.attention.scale; V is the baseline's.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    attention = base.model.attention
    own = attention.head_dim or share(base, attention.num_heads)
    value_dim = attention.value_dim or share(base, attention.num_heads)
    for size in sorted({*SIZES, own}):
        by_size = float(f"{own**0.5 / size:.4g}")
        for number in (None,) if size == own else (None, by_size):  # None: by the root
            yield {
                "model.attention.head_dim": size,
                "model.attention.value_dim": value_dim,
                "model.attention.scale": number,
            }


def positions(base) -> list[dict]:
    """What does each kind of positions give, and what does having none cost?

    Scientific: model.positions.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    del base
    kinds = ("sinusoidal", "learned", "rotary", "relative", "none")
    return over("model.positions", *kinds)


def shazeer(base) -> list[dict]:
    """Fewer heads, smaller ones, or one set of keys and values for all?

    The six arms of Shazeer 2019, Table 1, as shares of the width: eight heads of D/8,
    the same multi-query, then N·H = D/8 in 1, 2, 4 and 8 heads. All have the
    parameters of the first by their feed-forward width, as his.

    Scientific: model.attention.num_heads, model.attention.num_kv_heads,
    model.attention.head_dim, model.attention.value_dim.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest, and the number of parameters.
    """
    shapes = [(8, 8, share(base, 8)), (8, 1, share(base, 8))]
    shapes += [(N, N, share(base, 8 * N)) for N in (1, 2, 4, 8)]
    arms = [heads_of("model.attention", N, H, K) for N, K, H in shapes]
    return chain(arms[:1], matched(arms[1:]))


def gates(base) -> list[dict]:
    """Do gates help, of whole heads or of their elements, all at once or the best few?

    `scaled` is a gate of a head that is the same for all tokens.

    Scientific: model.attention.merge, and the number of heads in a mixture.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    num_heads = base.model.attention.num_heads
    mixtures = sorted({1, max(1, num_heads // 2), num_heads})
    return chain(
        over("model.attention.merge", "concat", "scaled", "gated", "gated_elementwise"),
        grid(
            over("model.attention.merge", "mixture"),
            over("model.attention.mixture_heads", *mixtures),
        ),
    )


def sites(base) -> list[dict]:
    """Where do heads matter: in the encoder, the decoder or between them?

    Scientific: the number of heads N of one site, with H = V = D / N there.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the heads of the other two sites, and the rest.
    """
    others = [N for N in (1, 4, 16) if base.model.attention.num_heads != N]
    arms = (
        heads_of(f"model.{site}", N, share(base, N)) for site in SITES for N in others
    )
    return chain([{}], arms)


def heads_of(path: str, N: int, size: int, K: int | None = None) -> dict:
    """N heads of H = V = size with K of keys and values; None: N."""
    return {
        f"{path}.num_heads": N,
        f"{path}.num_kv_heads": N if K is None else K,
        f"{path}.head_dim": size,
        f"{path}.value_dim": size,
    }


def share(base, parts: int) -> int:
    """The width of the model, divided.

    Raises:
        ValueError: it can't be.
    """
    if base.model.width % parts:
        raise ValueError(
            f"This ablation divides model.width by {parts}, which {base.model.width} "
            f"is no multiple of."
        )
    return base.model.width // parts
