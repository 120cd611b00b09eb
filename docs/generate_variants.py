"""Write docs/reference/variants.md from configs/variants.py and results/.

python docs/generate_variants.py
"""

import csv
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from headcount.analysis.formatting import interval, signed
from headcount.analysis.sequential import judge_at_last
from headcount.attention.kernels import gpu, tpu
from headcount.configs import modern, recall
from headcount.configs.base import get_config
from headcount.configs.variants import VARIANTS
from headcount.models.attention import Attention
from headcount.models.cost import abstract, parameters, plain, products_of

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference" / "variants.md"
WITHOUT_NORM = {"model.attention.qk_norm": False}
WIDTH, HEADS, LENGTH = 1024, 16, 1024  # of the layer whose costs the table shows
HEAD = """# Variants of heads

*Written by `python docs/generate_variants.py` from
[configs/variants.py](../../configs/variants.py) and `results/`. Do not edit.*

Each is a set of keys of `model.attention`, off by default, for all sites or for one
(`model.decoder_attention`, ...). `--ablation=variants` trains all of the first table
beside plain heads, as they are and with equal parameters.
[attention.py](../../models/attention.py) applies them; most are functions of
[variants.py](../../attention/variants.py). ALiBi and partial rotary positions, dropout
of attention weights and Muon are not among them: see the ablations `positions` and
`muon` [below](#in-other-ablations), and `model.attention.dropout`.
QK clip fails with an error if `positions=relative`, because it can't scale the learned
biases in the logits. Our verdicts come from two sweeps with equal parameters;
[variants](../research/variants.md) says how they were made:

- `variants_shakespeare`: Shakespeare by characters with the modern block, and a
  learning rate per arm. Losses are compared on dev, which also selected the rates and
  checkpoints; [claim 30](../research/claims.md) compares the same models on test. The
  baseline has QK norm; the latent and QK clip exclude it, so their arms differ from the
  baseline in that, too. The table also gives their differences from the arm that only
  lacks QK norm.
- `variants_recall`: exact recall of values, in models so small that plain heads recall
  a third of them.

Letters: o_n the output of head n, x the layer's input, v a value, N heads, H and V the
sizes of a key and a value, D the width. Sizes in the column *keys* are those for D =
1,024 and N = 16; in the sweeps (D = 128 and 32, N = 4), `latent_dim` is half of D, one
head is shared, and two are routed.

"""
COSTS = f"""
## Costs

The costs of one layer of causal self-attention without biases, with rotary positions, D
= {WIDTH:,}, N = {HEADS}, {LENGTH:,} tokens. Multiply-adds are those of matrix products,
per token. The cache is for decoding in bfloat16, per token and layer. *Kernels* lists
the fused kernels that support the layer in bfloat16; `blockwise` serves other
platforms. Talking heads need the whole map, so no fused kernel supports them.

"""

PEERS = """
## Compared with other implementations

[test_variants.py](../../tests/peers/test_variants.py) and, for gpt-oss,
[test_attention_torch.py](../../tests/peers/test_attention_torch.py) give our
implementation and another one (versions:
[requirements-peers.txt](../../requirements-peers.txt)) the same weights and compare
outputs and gradients in float32. Implementations of one variant differ, so a result of
one need not hold for another.

"""
COMPARED = (  # what, with what, where code bases differ
    (
        "gate, elementwise",
        "Qwen3-Next, x-transformers",
        "x-transformers' older `gate_value_heads` adds a bias that starts at 10",
    ),
    ("gate", "x-transformers", "none found"),
    (
        "exclusive",
        "x-transformers' projection of one vector",
        "its layer flattens tokens and heads first: one factor serves all of a "
        "sequence, and a causal model sees later tokens",
    ),
    (
        "differential",
        "DiffLlama",
        "DiffLlama and ours pair heads n and n + N/2, the authors 2n and 2n + 1; "
        "DiffLlama's norm has no scale, the authors' and ours has one",
    ),
    (
        "latent",
        "DeepSeek-V3, x-transformers",
        "DeepSeek rotates elements 2i and 2i + 1 together, ours i and i + r/2; "
        "x-transformers has no norm of the latent, and rotates some heads as a whole",
    ),
    (
        "value residual",
        "x-transformers",
        "its λ is 1/2, or a sigmoid of x per head; ours is a learned number per layer",
    ),
    (
        "talking heads",
        "x-transformers",
        "it adds the mixed logits to the others, so that logits start doubled",
    ),
    ("sink", "gpt-oss, x-transformers", "none found"),
    (
        "QK norm",
        "Qwen3-Next",
        "OLMo 2 normalises all heads together; x-transformers' scales are per head",
    ),
    (
        "QK clip",
        "none",
        "x-transformers' `qk_clip_` scales the kernels' inputs in place of heads: "
        "logits stay above the threshold",
    ),
    ("Muon, whole or per head", "torch.optim.Muon, first update", "see below"),
    ("merge rule `scaled`", "x-transformers", "its scale is ours + 1"),
    ("ALiBi", "Bloom, x-transformers", "none found"),
    ("partial rotation", "GPT-NeoX, Qwen3-Next", "none found"),
    (
        "grouped heads",
        "Qwen3-Next, x-transformers",
        "head n has key n mod K in x-transformers, n // (N / K) elsewhere",
    ),
    (
        "shared and routed",
        "none: no package has it",
        "MoH's code, as released, renormalises the routed gates over the chosen heads, "
        "multiplies all gates by 2 and by the number of heads that share them, so that "
        "each starts near 1, and the balance loss by the number of routed heads; ours "
        "has the paper's formula, so its outputs start smaller than those of `concat`",
    ),
    (
        "knocking",
        "none: no package has it",
        "ours has its own matrices per layer, or with `knocking_shared` per site",
    ),
    ("gate on values, gates from 1", "none: no package has them", "not known"),
)
OTHERS = """
## In other ablations

Positions and optimizers that treat heads one by one. The sweeps are on Shakespeare by
characters, with a learning rate per arm: [positions](../research/positions.md) and
[Muon](../research/variants.md#muon). The differences are from learned positions and
from AdamW.

"""
OF_OTHERS = (  # ablation, arm, formula, keys, source, claim
    (
        "positions",
        "alibi",
        "logits − slope_n · abs(i − j)",
        "`model.positions=alibi`",
        "Press et al. 2021, 2108.12409",
        "trained on 1,024 tokens, the perplexity of sinusoidal positions trained on "
        "2,048",
    ),
    (
        "positions",
        "rotary",
        "q_n and k_n rotated by angles that grow with the position; of their first "
        "`attention.rotary_dim` features, if it is set",
        "`model.positions=rotary`",
        "Su et al. 2021, 2104.09864; GPT-J, GPT-NeoX: a part",
        "faster convergence",
    ),
    (
        "muon",
        "muon",
        "orthogonalised momentum, D × N·H",
        "`optimizer.name=muon`",
        "Jordan et al. 2024; Liu et al. 2025, 2502.16982",
        "the same loss with half the FLOP",
    ),
    (
        "muon",
        "muon, muon_per_head=True",
        "the same for each head's D × H",
        "`optimizer.name=muon`, `optimizer.muon_per_head=True`",
        "GLM-5 2026, 2602.15763; Kimi K3 2026, 2607.24653",
        "updates of one size for all heads; needed for a latent (GLM-5)",
    ),
)
MUON = """
Our Muon is Optax's, which corrects the bias of the momentum. PyTorch's does not, and
iterates in bfloat16. So the two agree only on the first update, in float32.
"""


def main() -> None:
    """Write the page."""
    TARGET.write_text(render())


def render() -> str:
    """Return the page."""
    base = get_config()
    base.model.num_encoder_layers = 0
    base.model.width, base.model.attention.num_heads = WIDTH, HEADS
    base.model.attention.use_bias = False
    small = recall.get_config()
    small.model.width = 32
    on_text = read_verdicts("variants_shakespeare", modern.get_config("short"))
    on_recall = read_verdicts("variants_recall", small)
    rows, costs = [], []
    plain_costs = costs_of(base, {})
    costs.append(["plain heads", *show(plain_costs, plain_costs)])
    for name, variant in VARIANTS.items():
        settings = variant.settings(base)
        keys = [f"`{k.removeprefix('model.')}={v}`" for k, v in settings.items()]
        cells = variant.formula, ", ".join(keys), variant.source, variant.claim
        verdicts = (
            verdicts_on.get(name, "not measured")
            for verdicts_on in (on_text, on_recall)
        )
        rows.append([name, *cells, *verdicts])
        costs.append([name, *show(costs_of(base, settings), plain_costs)])
    header = "variant", "formula", "keys", "source", "claim"
    header += "our verdict on Shakespeare", "our verdict on recall"
    cost_header = "variant", "parameters", "multiply-adds", "cache bytes", "kernels"
    compared = "what", "equals", "where code bases differ"
    other_header = "what", "formula", "keys", "source", "claim", "our verdict"
    return (
        HEAD
        + table(header, rows)
        + COSTS
        + table(cost_header, costs)
        + OTHERS
        + table(other_header, others())
        + PEERS
        + table(compared, COMPARED)
        + MUON
    )


def others() -> list[tuple[str, ...]]:
    """Return the rows of what other ablations than `variants` compare."""
    rows = []
    for ablation, arm, *columns in OF_OTHERS:
        path = ROOT / "results" / f"{ablation}_shakespeare" / "verdicts.csv"
        with path.open() as file:
            (row,) = [row for row in csv.DictReader(file) if row["arm"] == arm]
        rows.append((arm, *columns, verdict_text(row)))
    return rows


def costs_of(base, settings: dict) -> tuple[int, int, int, str]:
    """Return parameters, multiply-adds and cache bytes per token, and kernels."""
    config = base.copy_and_resolve_references()
    config.update_from_flattened_dict(settings)
    arguments = config.model.attention.to_dict()
    layer = abstract(partial(Attention, WIDTH, layer=1, rotary=True, **arguments))
    x = jax.ShapeDtypeStruct((1, LENGTH, WIDTH), jnp.float32)

    def values(layer, x):
        return layer.keys_values(x, jnp.arange(x.shape[1])[None])[1]

    def call(layer, x):
        first = values(layer, x) if layer.value_share is not None else None
        return layer(x, positions=jnp.arange(LENGTH)[None], first=first)

    adds = products_of(plain(layer), x, method=call)
    if layer.value_share is not None:  # the first layer has computed them
        adds -= products_of(layer, x, method=values)
    graph, params = nnx.split(layer)
    token = jax.ShapeDtypeStruct((1, 1, WIDTH), jnp.float32)

    def cached(params, x):
        layer = nnx.merge(graph, params)
        return layer.cache(x, *layer.keys_values(x, jnp.zeros((1, 1), jnp.int32)))

    cache = jax.eval_shape(cached, params, token)
    size = sum(2 * leaf.size for leaf in jax.tree.leaves(cache))
    return parameters(nnx.state(layer)), adds // LENGTH, size, kernels(layer)


def kernels(layer: Attention) -> str:
    """Return which fused kernels take a layer."""
    if layer.talking_heads is not None:
        return "none"
    N, _, H, V = layer.sizes()
    query, value = (
        jax.ShapeDtypeStruct((1, LENGTH, N, size), jnp.dtype("bfloat16"))
        for size in (H, V)
    )
    names = [
        module.__name__.rsplit(".", 1)[-1]
        for module in (gpu, tpu)
        if module.unsupported(query, value, None, None) is None
    ]
    return ", ".join(["cpu", *names])


def show(costs: tuple, of: tuple) -> list[str]:
    """Return costs with their ratios to those of plain heads."""
    texts = [f"{a:,} ({a / b:.2f})" for a, b in zip(costs[:3], of[:3], strict=True)]
    return [*texts, costs[3]]


def read_verdicts(sweep: str, base) -> dict[str, str]:
    """Return the verdict of every variant with equal parameters, from results/."""
    folder = ROOT / "results" / sweep
    if not folder.exists():
        return {}
    with (folder / "verdicts.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    with (folder / "sweep.csv").open() as file:
        trials = list(csv.DictReader(file))
    names = {row["overrides"]: row["arm"] for row in trials}

    def row_of(settings):
        for arm in (settings | {"match": "parameters"}, settings):
            row = rows.get(names.get(json.dumps(arm)))
            if row is not None and int(row["seeds"]):
                return row
        return None

    verdicts, without_norm = {}, row_of(WITHOUT_NORM)
    for name, variant in VARIANTS.items():
        settings = variant.settings(base)
        if (row := row_of(settings)) is not None:
            verdicts[name] = verdict_text(row)
            if without_norm is not None and settings.items() > WITHOUT_NORM.items():
                difference = difference_of(row, without_norm, trials, len(rows))
                verdicts[name] += f"; {difference} from the arm without QK norm"
        elif (row := row_of(dict.fromkeys(settings, False))) is not None:
            verdicts[name] = f"{verdict_text(row, -1)}, from the arm without it"
    return verdicts


def verdict_text(row: dict, sign: int = 1) -> str:
    """Return a verdict; with sign -1, that on the baseline instead of the arm."""
    kind = row["verdict"]
    if sign < 0:
        kind = {"better": "worse", "worse": "better"}.get(kind, kind)
    ends = [sign * float(row[end]) for end in ("low", "high")]
    difference = estimate(row, sign * float(row["difference"]), *sorted(ends))
    return f"{kind} ({row['metric']} {difference}, {row['seeds']} seeds)"


def estimate(row: dict, mean: float, low: float, high: float) -> str:
    """Format a difference in a verdict's metric, with its interval."""
    spec = ".4f" if row["metric"] == "loss" else ".1f"
    return f"{signed(mean, spec)}, {interval(low, high, spec, signed)}"


def difference_of(row: dict, other: dict, trials: list[dict], num_arms: int) -> str:
    """Return an arm's difference from another one, with an interval like a verdict's.

    Args:
        row, other: the arms' verdicts.
        trials: rows of sweep.csv.
        num_arms: number of arms that share the error rate.
    """
    column = f"{row['split']}_{row['metric']}"
    arm_scores, base = (
        {
            trial["seed"]: float(trial[column])
            for trial in trials
            if trial["arm"] == arm["arm"]
            and trial["stage"] == "report"
            and trial["status"] == "done"
        }
        for arm in (row, other)
    )
    differences = [arm_scores[seed] - base[seed] for seed in arm_scores if seed in base]
    looks = tuple(int(look) for look in row["looks"].split(",") if look)
    result = judge_at_last(differences, looks, num_arms)
    return estimate(row, result.mean, result.low, result.high)


def table(header, rows) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    main()
