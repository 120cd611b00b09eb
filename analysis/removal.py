"""Remove heads for real: a smaller model whose outputs equal those of the gated one."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from headcount.analysis.heads import all_gates
from headcount.data import tokenizers
from headcount.runtime.files import new_folder
from headcount.runtime.workdir import environment, record, set_status
from headcount.tasks import Run, make_task
from headcount.training.checkpoint import Checkpoints

# Each head has a kernel of its own, and they are added up: one of zeros adds nothing.
REMOVABLE_RULES = ("concat", "scaled", "gated", "gated_elementwise")


def smaller(run: Run, trial: int, removed: list[tuple[str, int, int]]) -> tuple:
    """Return the config and the parameters of a trial without some heads.

    A site has one head count, so its layers keep as many heads as the layer that keeps
    most; the others are filled up with heads whose merge kernel is 0. With
    `value_residual` all layers keep the heads that any of them keeps.

    Args:
        removed: site, layer and number of each, besides those whose gate is 0.

    Raises:
        ValueError: there is no such head, gates are neither 0 nor 1, or the model's
            heads can't be removed one by one.
    """
    params, gates = run.of(trial)
    gates = {s: np.array(own) for s, own in all_gates(run, params, gates).items()}
    for site, layer, head in removed:
        shape = gates[site].shape if site in gates else None
        if shape is None or not (0 <= layer < shape[0] and 0 <= head < shape[1]):
            raise ValueError(
                f"There is no head {site}.{layer}.{head}; the sites have "
                + ", ".join(f"{s} {L} × {N}" for s, (L, N) in shapes(gates).items())
                + " layers and heads."
            )
        gates[site][layer, head] = 0
    model = nnx.merge(run.graph, params)
    learned = fold_learned(model, gates)
    if model.positions == "relative":
        raise ValueError(
            "model.positions=relative has a bias per head that all layers share; its "
            "heads can't be removed one by one."
        )
    config = ConfigDict(run.config.to_dict())
    for site, about in model.sites().items():
        first = about.attentions[0]
        check(first, site, gates[site])
        kept = gates[site] > 0
        if first.value_residual:  # the first layer has the values of the same head
            kept[:] = kept.any(0)
        N = max(1, kept.sum(1).max())
        for layer, attention in enumerate(about.attentions):
            chosen = np.sort(np.argsort(~kept[layer], stable=True)[:N])
            slice_heads(attention, chosen, is_kept=gates[site][layer, chosen] > 0)
        section = config.model[f"{site}_attention"]
        if site in learned:
            section.gate, section.gate_penalty = "none", 0.0
        section.num_heads = section.num_kv_heads = int(N)
        section.head_dim = first.query.shape[-1]
        section.value_dim = first.value.shape[-1]
    return config, nnx.split(model)[1]


def fold_learned(model, gates: dict[str, np.ndarray]) -> set[str]:
    """Multiply learned gates into the merge kernels; those that are 0 close `gates`.

    Returns:
        The sites that had learned gates; now they have none.
    """
    found = set()
    for site, about in model.sites().items():
        for layer, attention in enumerate(about.attentions):
            learned = attention.learned_gates()
            if learned is not None:
                kernel = attention.merge["kernel"]
                kernel[...] = kernel[...] * learned[:, None, None]
                gates[site][layer] *= np.asarray(learned) > 0
                attention.output_gate = None
                found.add(site)
    return found


def shapes(gates: dict) -> dict:
    """Return layers and heads by site."""
    return {site: own.shape for site, own in gates.items()}


def check(attention, site: str, gates: np.ndarray) -> None:
    """Raise a ValueError for heads that can't be removed one by one."""
    if not np.isin(gates, (0, 1)).all():
        raise ValueError(f"The gates of {site} must be 0 or 1 for removal.")
    if attention.merge_rule not in REMOVABLE_RULES:
        raise ValueError(
            f"The merge rule {attention.merge_rule!r} of {site} is not a sum of "
            f"heads with kernels of their own; heads can be removed with "
            f"{', '.join(REMOVABLE_RULES)}."
        )
    for name, is_on in (
        ("latent_dim", attention.latent is not None),
        ("differential", attention.difference is not None),
    ):
        if is_on:
            raise ValueError(
                f"The heads of {site} share more than keys and values ({name}); they "
                f"can't be removed one by one."
            )
    if attention.key.shape[1] != attention.query.shape[1]:
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


def parameters(attention) -> list[tuple[tuple, nnx.Param]]:
    """Return the parameters of a layer with their paths."""
    nodes = nnx.iter_graph(attention)
    return [(path, node) for path, node in nodes if isinstance(node, nnx.Param)]


def slice_heads(attention, chosen: np.ndarray, is_kept: np.ndarray) -> None:
    """Keep some heads of an attention layer, and make those not kept add nothing."""
    for _, param in parameters(attention):
        for axis, letter in enumerate(param.axes.split()):
            if letter in ("N", "K", "heads"):
                param.set_value(jnp.take(param[...], chosen, axis))
    kernel = attention.merge["kernel"]
    kernel[...] = kernel[...] * is_kept[:, None, None]


def write_smaller(
    run: Run, workdir: Path, to: Path, trial: int, removed: list[tuple[str, int, int]]
) -> dict[str, int]:
    """Write a run of the smaller model; return its parameters and heads, and before.

    Raises:
        ValueError: the folder is not empty; or see `smaller`.
    """
    with new_folder(to) as folder:
        config, params = smaller(run, trial, removed)
        tokenizers.copy(workdir / "tokenizer", folder / "tokenizer")
        params = jax.tree.map(lambda leaf: np.asarray(leaf)[None], params)
        zero, step = np.zeros(1, np.int32), np.array([run.step[trial]], np.int32)
        checkpoints = Checkpoints(folder, 1)
        checkpoints.save(
            int(step[0]),
            params=params,
            trials={"step": step, "diverged_at": zero, "stopped_at": zero},
            best={"params": params, "score": np.zeros(1), "step": step},
        )
        checkpoints.wait()
        checkpoints.close()
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        before = sum(leaf[0].size for leaf in jax.tree.leaves(run.params))
        settings = {
            key: value
            for key, value in run.trials[trial].items()
            if not key.startswith("head_gates.")
        }
        facts = {"num_parameters": count, **environment()}
        record(folder, config.to_dict(), [settings], facts)
        set_status(folder, "finished")
        (folder / "metrics.jsonl").touch()
        make_task(config, folder / "tokenizer")  # the smaller config is a valid one
    return {"parameters": count, "before": before}
