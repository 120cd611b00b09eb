"""Ablations: functions from the base config to the arms of a sweep.

    python sweep.py run --config=configs/multi30k.py --ablation=heads --seeds=16 \\
      --workdir=runs/heads

An arm is a dict from config key to value. The docstring of an ablation starts with its
question, and declares which settings are scientific (compared), which are nuisance
(tuned per arm by the dev score), and that the rest is fixed. The key "match" gives an
arm the baseline's number of parameters or multiply-adds by solving for `model.mlp_dim`.
The baseline is the arm that equals the base config, else the first arm.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from headcount.configs.sites import layers_of
from headcount.configs.variants import VARIANTS

Arms = Iterable[dict]

HEADS = (1, 2, 4, 8, 16, 32)
SIZES = (8, 16, 32, 64, 128)
AVERAGES = ("concat", "mean", "weighted", "dynamic")
MERGE_ARMS = (*AVERAGES, "gated", "gated_elementwise", "mixture")
PENALTIES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)  # nats per token and head


def over(path: str, *values) -> list[dict]:
    """Return one arm per value of a setting."""
    return [{path: value} for value in values]


def grid(*sweeps: Arms) -> list[dict]:
    """Return all combinations of arms, one from each list; later settings win."""
    return [merged(arms) for arms in itertools.product(*map(list, sweeps))]


def zipped(*sweeps: Arms) -> list[dict]:
    """Merge the first arms of all lists, the second arms, and so on.

    Raises:
        ValueError: the lists have different lengths.
    """
    return [merged(arms) for arms in zip(*sweeps, strict=True)]


def chain(*sweeps: Arms) -> list[dict]:
    """Concatenate lists of arms."""
    return list(itertools.chain(*sweeps))


def seeds(arms: Arms, count: int, first: int = 0) -> list[dict]:
    """Repeat every arm with the seeds first, first + 1, ..."""
    return grid(arms, over("seed", *range(first, first + count)))


def matched(arms: Arms, budget: str = "parameters") -> list[dict]:
    """Give every arm the baseline's "parameters" or "flops" (multiply-adds)."""
    return grid(arms, [{"match": budget}])


def merged(dicts: Iterable[dict]) -> dict:
    """Merge dicts; later ones win."""
    return {key: value for arm in dicts for key, value in arm.items()}


def leaves_out(ablation):
    """Mark an ablation whose arms are left out where the base config excludes them.

    `sweeps.ablation.arms_of` leaves them out and logs why. In other ablations, an arm
    that can't be built is an error.
    """
    ablation.leaves_out = True
    return ablation


def heads(base) -> Iterator[dict]:
    """How many heads, if together they are as wide as the model?

    Vaswani et al. 2017, Table 3, rows A: N heads of H = V = D / N. The base config's N
    is among them if it divides D.

    Scientific: model.attention.num_heads, with K = N.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    numbers, base_heads = {*HEADS}, base.model.attention.num_heads
    if base.model.width % base_heads == 0:
        numbers.add(base_heads)
    for num_heads in sorted(numbers):
        yield heads_of("model.attention", num_heads, share(base, num_heads))


def head_speed(base) -> Iterator[dict]:
    """How much slower do more heads train?

    The arms of `heads`, for a sweep in which tokens/s count instead of scores: give it
    `--config.train.num_steps=150` (what compiles is not timed) and `--group_size=1`, so
    that every seed is timed by itself, and nothing else to do on the machine.

    Scientific: model.attention.num_heads, with K = N.
    Nuisance: none.
    Fixed: the rest.
    """
    return heads(base)


def head_rates(base) -> list[dict]:
    """Does the best learning rate depend on the number of heads?

    The arms of `heads`, at a third, half, two thirds and all of the base config's rate.

    Scientific: model.attention.num_heads, with K = N, and optimizer.learning_rate.
    Nuisance: model.dropout.
    Fixed: the rest.
    """
    rate = base.optimizer.learning_rate
    lower = [float(f"{rate * fraction:.3g}") for fraction in (1 / 3, 1 / 2, 2 / 3)]
    return grid(heads(base), over("optimizer.learning_rate", *lower, rate))


def head_dim(base) -> Iterator[dict]:
    """How much does head size matter: for keys alone, and for keys and values?

    First H alone (Vaswani et al. 2017, Table 3, rows B), then H = V with N·H
    independent of the width (Bhojanapalli et al. 2020). With model.attention.init =
    "xavier", the arms' logits start at different scales; with "fan_in", at the same.

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
    """Which merge rule is best, as it is and with equal parameters?

    Scientific: model.attention.merge. A mixture chooses N / 2 heads per token.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest; model.mlp_dim is solved in the matched arms.
    """
    rules = over("model.attention.merge", *MERGE_ARMS)
    mixture = rules[MERGE_ARMS.index("mixture")]
    mixture["model.attention.mixture_heads"] = half_of(base)
    return chain(rules, matched(rules[1:]))


def merge_start(base) -> list[dict]:
    """Which merge rule is best if the outputs of all start at the same scale?

    With `equal_gain` the outputs of every rule start with the variance of concat's. The
    last arm is concat, started at the scale of mean. The ablation `merge` compares the
    rules as they are.

    Scientific: model.attention.merge, model.attention.merge_gain. A mixture chooses
    N / 2 heads per token. Gains are for the sizes of model.attention, not of a site.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    rules = ("concat", "scaled", "mean", "weighted", "dynamic")
    rules += ("gated", "gated_elementwise", "mixture")  # which `equal_gain` knows
    arms = dict(zip(rules, equal_starts(base, rules), strict=True))
    arms["mixture"]["model.attention.mixture_heads"] = half_of(base)
    return [*arms.values(), small_start(base)[1]]


def small_start(base) -> list[dict]:
    """Does concatenating heads gain by starting at the scale of averaging them?

    If averaging wins with its default initialisation but loses at equal starts, this
    shows whether its smaller initial scale explains the win.

    Scientific: model.attention.merge_gain.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    concat, mean = equal_starts(base, ("concat", "mean"))
    as_mean = round(1 / mean["model.attention.merge_gain"], 3)
    return [concat, concat | {"model.attention.merge_gain": as_mean}]


def merge_rules(base) -> list[dict]:
    """Do the outputs of heads need a kernel each, and weights that see the token?

    Four rules of the ablation `merge_start`, for models that are slow to train.

    Scientific: model.attention.merge, model.attention.merge_gain.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    return equal_starts(base, ("concat", "mean", "dynamic", "gated"))


def merge_rates(base) -> list[dict]:
    """Does averaging heads tolerate higher learning rates than concatenating them?

    Both start at the same scale; see `merge_start`.

    Scientific: model.attention.merge, model.attention.merge_gain, and
    optimizer.learning_rate, from once to eight times the base config's.
    Nuisance: model.dropout.
    Fixed: the rest.
    """
    rate = base.optimizer.learning_rate
    rates = over("optimizer.learning_rate", *(rate * times for times in (1, 2, 4, 8)))
    return grid(rates, equal_starts(base, ("concat", "mean")))


def equal_starts(base, rules: Sequence[str]) -> list[dict]:
    """Return an arm per rule, whose outputs start with the variance of concat's."""
    attention = base.model.attention
    N, D = attention.num_heads, base.model.width
    V = attention.value_dim or share(base, N)
    gains = [equal_gain(x, N, V, D, half_of(base), attention.init) for x in rules]
    return zipped(
        over("model.attention.merge", *rules),
        over("model.attention.merge_gain", *gains),
    )


def half_of(base) -> int:
    """Return the number of heads that a mixture chooses per token."""
    return max(1, base.model.attention.num_heads // 2)


def equal_gain(
    rule: str, N: int, V: int, D: int, mixture_heads: int, init: str = "xavier"
) -> float:
    """Return the merge_gain that gives a rule the initial output variance of concat.

    A rule computes Σ_n w_n o_n W_n. At initialisation, the heads' outputs o_n are
    uncorrelated. If they have variance 1, the rule's outputs have variance
    V · Var(W) · Σ_n E[w_n²]. Var(W) is 2 / (into + D) with Xavier and 1 / into with
    fan_in, where `into` is N·V for a kernel per head and V for a shared kernel. So the
    variance is 2NV / (NV + D), or 1 with fan_in, for concat, and 2V / (N(V + D)), or
    1 / N, for mean and weighted, whose w_n are 1 / N. Their exact gain is
    N √((V + D) / (NV + D)), or √N.

    For gates and routers, the gain is approximate: E[w_n²] is averaged over 2^14 draws
    of normal logits. Logits are sums over the D elements of x, which have variance 1 if
    x is normalised, times weights with the variance of the init: 2 / (D + N) for Xavier
    (N·V instead of N if elementwise).
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
    }
    if rule not in weights:
        raise ValueError(
            f"The initial gain of the merge rule {rule!r} is not known; add it to "
            f"equal_gain, or set model.attention.merge_gain."
        )
    squares = np.square(weights[rule]).sum(-1).mean()
    # three digits, so that a sweep's arms are the same on every machine
    return float(f"{(N / fan(N * V, D) * fan(into, D) / squares) ** 0.5:.3g}")


def kv_heads(base) -> list[dict]:
    """How many heads may share their keys and values?

    From one key/value head per query head (multi-head) over groups (Ainslie et al.
    2023) to one for all (multi-query; Shazeer 2019), with every divisor of N. With
    model.attention.init = "xavier", fewer heads start with larger keys and values; with
    "fan_in", they do not.

    Scientific: model.attention.num_kv_heads.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    N = base.model.attention.num_heads
    divisors = (K for K in range(N, 0, -1) if N % K == 0)
    return over("model.attention.num_kv_heads", *divisors)


def sink(base) -> list[dict]:
    """Does it help a head to be able to attend to nothing?

    By a learned logit beside those of the keys; see `attention.dot_product_attention`.

    Scientific: model.attention.sink.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    del base
    return over("model.attention.sink", False, True)


def scale(base) -> Iterator[dict]:
    """Should logits be divided by √H or by H?

    √H is usual. Yang et al. 2022 (Tensor Programs V) divide by H, since query and key
    become correlated during training. Both are equal at the base config's H.

    Scientific: model.attention.head_dim, model.attention.scale; V is the baseline's.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    attention = base.model.attention
    base_dim = attention.head_dim or share(base, attention.num_heads)
    value_dim = attention.value_dim or share(base, attention.num_heads)
    for size in sorted({*SIZES, base_dim}):
        by_size = float(f"{base_dim**0.5 / size:.4g}")
        for number in (None,) if size == base_dim else (None, by_size):  # None: 1 / √H
            yield {
                "model.attention.head_dim": size,
                "model.attention.value_dim": value_dim,
                "model.attention.scale": number,
            }


def positions(base) -> list[dict]:
    """Which position encoding is best, and what does having none cost?

    Scientific: model.positions.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    del base
    kinds = ("sinusoidal", "learned", "rotary", "relative", "alibi", "none")
    return over("model.positions", *kinds)


@leaves_out
def variants(base) -> list[dict]:
    """Which published variant of heads is better than plain heads?

    Arms are each variant as it is and with equal parameters; --match=parameters or
    --match=flops drops the former. configs/variants.py has formulas and sources.
    Variants that another setting of the base config excludes are left out.

    Scientific: the variants of model.attention.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest; model.mlp_dim is solved in the matched arms.
    """
    arms = [variant.settings(base) for variant in VARIANTS.values()]
    if base.model.attention.qk_norm:  # compare with an arm without it
        arms.remove({"model.attention.qk_norm": True})
        arms += over("model.attention.qk_norm", False)
    return chain([{}], arms, matched(arms))


def merge_heads(base) -> list[dict]:
    """Does averaging heads cost less when there are many heads?

    Scientific: model.attention.merge, at each number of heads with H = V = D / N.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    numbers = [heads_of("model.attention", N, share(base, N)) for N in (2, 4, 8, 16)]
    return grid(numbers, over("model.attention.merge", *AVERAGES))


@leaves_out
def width_heads(base) -> list[dict]:
    """Is one size of head right at every width, or one number of heads?

    The widths are half, one and two times the base config's, with the feed-forward in
    proportion. Each has arms with N = 2, 4, 8 and 16 and H = V = D / N; with rotary
    positions, H must be even.

    Scientific: model.width and model.mlp_dim together, and the number of heads.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    arms = []
    for share_of in (1, 2, 4):
        width = base.model.width * share_of // 2
        wide = {
            "model.width": width,
            "model.mlp_dim": base.model.mlp_dim * share_of // 2,
        }
        arms += [
            wide | heads_of("model.attention", N, width // N)
            for N in (2, 4, 8, 16)
            if width % N == 0
        ]
    return arms


def unscaled(base) -> list[dict]:
    """Does it matter that logits are divided by √H?

    With a scale of 1, logits start √H times as large.

    Scientific: model.attention.scale.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    del base
    return over("model.attention.scale", None, 1.0)


def muon(base) -> list[dict]:
    """Does Muon train better than AdamW, and better on each head's matrix alone?

    Scientific: optimizer.name and optimizer.muon_per_head.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    del base
    per_head = {"optimizer.name": "muon", "optimizer.muon_per_head": True}
    return [*over("optimizer.name", "adamw", "muon"), per_head]


def shazeer(base) -> list[dict]:
    """Is it better to have fewer heads, smaller heads, or multi-query attention?

    The six arms of Shazeer 2019, Table 1, relative to the width: eight heads of D/8,
    the same with one key/value head, then N·H = D/8 with 1, 2, 4 and 8 heads. As in the
    paper, the feed-forward width gives all arms the parameters of the first.

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
    """Do gates help: per head, per element, or only for the best few heads?

    `scaled` has a gate per head that is the same for all tokens.

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


def gates_l0(base) -> list[dict]:
    """How many heads does a model keep if each open head is penalised?

    Gates that can close permanently (Louizos et al. 2018; Voita et al. 2019), at
    several penalties in nats per token; the report shows how many heads are left.

    Scientific: model.attention.gate_penalty.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the rest.
    """
    gates = {"model.attention.gate": "hard_concrete"}
    gates["model.attention.gate_features"] = 0
    paying = grid([gates], over("model.attention.gate_penalty", *PENALTIES))
    return chain(over("model.attention.gate", base.model.attention.gate), paying)


def sites(base) -> list[dict]:
    """Where does the number of heads matter: encoder, decoder or cross-attention?

    Scientific: the number of heads N at one site, with H = V = D / N there.
    Nuisance: optimizer.learning_rate, model.dropout.
    Fixed: the heads of the other sites, and the rest.
    """
    numbers = [N for N in (1, 4, 16) if base.model.attention.num_heads != N]
    arms = (
        heads_of(f"model.{site}_attention", N, share(base, N))
        for site in layers_of(base.model)
        for N in numbers
    )
    return chain([{}], arms)


def heads_of(path: str, N: int, size: int, K: int | None = None) -> dict:
    """Return an arm with N heads of H = V = size and K key/value heads, default N."""
    return {
        f"{path}.num_heads": N,
        f"{path}.num_kv_heads": N if K is None else K,
        f"{path}.head_dim": size,
        f"{path}.value_dim": size,
    }


def share(base, parts: int) -> int:
    """Return the model's width divided by a number of parts.

    Raises:
        ValueError: the width is not divisible.
    """
    if base.model.width % parts:
        raise ValueError(
            f"This ablation needs a model.width that is divisible by {parts}, got "
            f"{base.model.width}."
        )
    return base.model.width // parts
