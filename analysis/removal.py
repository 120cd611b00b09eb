"""Remove gated heads from a model: a smaller model with the same outputs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from headcount.analysis.heads import all_gates
from headcount.configs.base import get_config
from headcount.data import tokenizers
from headcount.runtime.files import new_folder
from headcount.runtime.logging import say
from headcount.tasks import Run, make_task
from headcount.training.run import write_finished

# Rules that sum over heads with separate kernels, so that a zero kernel adds nothing.
REMOVABLE_RULES = ("concat", "scaled", "gated", "gated_elementwise")
GATE_KEYS = ("gate", "gate_size", "gate_features", "gate_on", "gate_penalty")


def smaller(run: Run, trial: int, removed: list[tuple[str, int, int]]) -> tuple:
    """Return the config and the parameters of a trial without some of its heads.

    All layers of a site must have the same number of heads: that of the layer that
    keeps the most. Other layers are padded with heads whose merge kernel is 0. With
    `value_residual`, all layers keep every head that any of them keeps.

    Args:
        removed: (site, layer, head) of each head to remove, in addition to heads with a
            gate of 0.

    Raises:
        ValueError: there is no such head or none to remove, a gate is neither 0 nor 1,
            or the model's heads can't be removed individually.
    """
    params, gates = run.of(trial)
    gates = {s: np.array(values) for s, values in all_gates(run, params, gates).items()}
    for site, layer, head in removed:
        shape = gates[site].shape if site in gates else None
        if shape is None or not (0 <= layer < shape[0] and 0 <= head < shape[1]):
            raise ValueError(
                f"There is no head {site}.{layer}.{head}; the sites have "
                + ", ".join(f"{s} {len(g)} × {g.shape[1]}" for s, g in gates.items())
                + " layers and heads."
            )
        gates[site][layer, head] = 0
    model = nnx.merge(run.graph, params)
    if model.positions == "relative":
        raise ValueError(
            "model.positions=relative has a bias per head that all layers share; its "
            "heads can't be removed one by one."
        )
    if model.positions == "alibi":
        raise ValueError(
            "model.positions=alibi has slopes that depend on the number of heads; its "
            "heads can't be removed."
        )
    for site, attention_site in model.sites().items():
        check(attention_site.attentions[0], site, gates[site])
    learned = fold_learned(model, gates)
    if not learned and all(values.all() for values in gates.values()):
        raise ValueError(
            "No head is to be removed; name some with --heads=SITE.LAYER.HEAD."
        )
    config = ConfigDict(run.config.to_dict())
    for site, attention_site in model.sites().items():
        first = attention_site.attentions[0]
        keeps = gates[site] > 0
        if first.value_residual:  # heads use values of the same head in the first layer
            keeps[:] = keeps.any(0)
        N = max(1, keeps.sum(1).max())
        if keeps.shape[1] == N and not gates[site].all():
            choice = "the same head" if first.value_residual else "a head"
            say(
                f"Every layer of {site} still has {N} heads, as many as the layer that "
                f"keeps most; to make {site} smaller, remove {choice} from each layer."
            )
        for layer, attention in enumerate(attention_site.attentions):
            chosen = np.sort(np.argsort(~keeps[layer], stable=True)[:N])
            slice_heads(attention, chosen, is_kept=gates[site][layer, chosen] > 0)
        section = config.model[f"{site}_attention"]
        if site in learned:
            section.update(dict.fromkeys(GATE_KEYS), gate="none", gate_penalty=0.0)
        section.num_heads = section.num_kv_heads = first.query.shape[1]
        section.head_dim, section.value_dim = sizes(first)
    if learned == set(model.sites()):
        plain = get_config().model.attention
        config.model.attention.update({key: plain[key] for key in GATE_KEYS})
    return config, nnx.split(model)[1]


def fold_learned(model, gates: dict[str, np.ndarray]) -> set[str]:
    """Fold learned gates into the merge kernels.

    This modifies the model, and sets `gates` to 0 where a learned gate is 0.

    Returns:
        The sites that had learned gates, which are now removed.
    """
    folded_sites = set()
    for site, attention_site in model.sites().items():
        for layer, attention in enumerate(attention_site.attentions):
            learned = attention.learned_gates()
            if learned is not None:
                kernel = attention.merge["kernel"]
                kernel[...] = kernel[...] * learned[:, None, None]
                gates[site][layer] *= np.asarray(learned) > 0
                attention.output_gate = None
                folded_sites.add(site)
    return folded_sites


def check(attention, site: str, gates: np.ndarray) -> None:
    """Raise a ValueError if a layer's heads can't be removed individually."""
    if not np.isin(gates, (0, 1)).all():
        raise ValueError(f"The gates of {site} must be 0 or 1 for removal.")
    if attention.merge_rule not in REMOVABLE_RULES:
        raise ValueError(
            f"The merge rule {attention.merge_rule!r} of {site} is not a sum of "
            f"heads with kernels of their own; heads can be removed with "
            f"{', '.join(REMOVABLE_RULES)}."
        )
    if attention.latent is None and attention.key.shape[1] != attention.query.shape[1]:
        raise ValueError(
            f"The heads of {site} share keys and values (num_kv_heads); they can't be "
            f"removed one by one."
        )
    for path, param in parameters(attention):
        if param.axes.split().count("heads") > 1:
            raise ValueError(
                f"{'.'.join(map(str, path))} of {site} mixes heads; they can't be "
                f"removed one by one."
            )


def sizes(attention) -> tuple[int, int]:
    """Return H and V, without the rotary part of latent attention's keys."""
    if attention.latent is None:
        return attention.query.shape[-1], attention.value.shape[-1]
    return attention.latent.key.shape[-1], attention.latent.value.shape[-1]


def parameters(attention) -> list[tuple[tuple, nnx.Param]]:
    """Return the parameters of a layer with their paths."""
    nodes = nnx.iter_graph(attention)
    return [(path, node) for path, node in nodes if isinstance(node, nnx.Param)]


def slice_heads(attention, chosen: np.ndarray, is_kept: np.ndarray) -> None:
    """Keep the chosen heads of a layer; zero the merge kernels where not `is_kept`.

    With differential attention, a head is a pair: the heads n and n + N/2.
    """
    merged = attention.num_merged_heads
    for _, param in parameters(attention):
        for axis, letter in enumerate(param.axes.split()):
            if letter in ("N", "K", "heads"):
                indices = np.arange(param.shape[axis]).reshape(-1, merged)[:, chosen]
                param.set_value(jnp.take(param[...], indices.ravel(), axis))
    kernel = attention.merge["kernel"]
    kernel[...] = kernel[...] * is_kept[:, None, None]


def write_smaller(
    run: Run, workdir: Path, to: Path, trial: int, removed: list[tuple[str, int, int]]
) -> dict[str, int]:
    """Write a run with the smaller model; return its number of parameters, and before.

    Raises:
        ValueError: the folder is not empty, or `smaller` fails.
    """
    with new_folder(to) as folder:
        config, params = smaller(run, trial, removed)
        tokenizers.copy(workdir / "tokenizer", folder / "tokenizer")
        old_count = sum(leaf[0].size for leaf in jax.tree.leaves(run.params))
        settings = {
            key: value
            for key, value in run.trials[trial].items()
            if not key.startswith("head_gates.")
        }
        step = int(run.step[trial])
        count = write_finished(folder, config.to_dict(), settings, params, step)
        make_task(config, folder / "tokenizer")  # check that the run can be opened
    return {"parameters": count, "before": old_count}
