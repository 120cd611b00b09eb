"""Print what a config's model is made of, and what each part costs.

    python -m headcount.models.describe --config=configs/presets.py:bert_base

Each row is a part of all layers of a stack, with the shapes of its arrays, parameters
and multiply-adds per token. A second table has the parameters per attention head.
(`flax.nnx.tabulate` lists modules; it shows neither head shapes nor the work of a merge
rule.)
"""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import config_flags
from rich.console import Console
from rich.table import Table

from headcount.configs.commandline import fail, one_sentence, run
from headcount.configs.validation import check_values, flat
from headcount.data import tokenizers
from headcount.data.batches import batch_spec
from headcount.models.attention import Attention
from headcount.models.cost import (
    LENGTH,
    abstract,
    multiply_adds,
    parameters,
    plain,
    products_of,
)
from headcount.models.linear import project
from headcount.models.transformer import Transformer

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file.", lock_config=True
)
SITES = ("encoder.self_attention", "decoder.self_attention", "decoder.cross_attention")
ORDER = (
    *("embedding", "source_embedding", "types"),
    *("encoder_positions", "encoder_embedding_norm", "encoder", "encoder_norm"),
    *("decoder_positions", "decoder_embedding_norm", "decoder", "decoder_norm"),
    *("pooler", "output", "classifier"),
)
WITHIN = ("self_attention", "cross_attention", "mlp", "norms")
OF_HEADS = ("query", "key", "value", "latent", "maps", "merge")


class Part(NamedTuple):
    """All parameters of one kind, in all layers of a stack."""

    name: str
    layers: int
    shapes: list[tuple[int, ...]]  # of one layer's arrays, without biases and norms
    parameters: int
    multiply_adds: int  # per example


def parts(model: Transformer, S: int = LENGTH, T: int = LENGTH) -> list[Part]:
    """Return the parts of a model in order; they sum to the whole.

    A pooler that the logits do not depend on has no multiply-adds.

    Args:
        model: may be abstract.
        S, T: number of tokens of the encoder's and the decoder's input.
    """
    work = products_by_part(plain(model), S, T)
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        name = name.removesuffix(".value")
        arrays.setdefault(part_of(name), []).append((name, leaf))
    rows = []
    for name in sorted(arrays | work, key=place):
        named = arrays.get(name, [])
        kernels = {x.shape for path, x in named if x.ndim > 1 and path[-4:] != "bias"}
        stack = name.split(".")[0]
        layers = len(getattr(model, stack)) if stack in ("encoder", "decoder") else 1
        count = parameters([leaf for _, leaf in named])
        rows.append(Part(name, layers, sorted(kernels), count, work.get(name, 0)))
    return rows


def part_of(path: str) -> str:
    """Return a parameter's part, such as decoder.cross_attention.key."""
    first, *inner = path.split(".")
    if first.startswith("output"):
        return "output"
    if first not in ("encoder", "decoder"):
        return first
    inside = inner[1]
    if inside.endswith("attention"):
        head = re.sub("_(bias|norm)", "", inner[2])
        head = head if head in OF_HEADS else "maps"  # parameters of variants
        return f"{first}.{inside}.{head}"
    return f"{first}.{'norms' if inside.endswith('norm') else inside}"


def place(name: str) -> list[int]:
    """Return a part's sort key in the table."""
    levels = zip(name.split("."), (ORDER, WITHIN, OF_HEADS), strict=False)
    return [names.index(part) for part, names in levels]


def products_by_part(model: Transformer, S: int, T: int) -> dict[str, int]:
    """Count multiply-adds per example of a `plain` model by part."""
    D = model.width
    work = {}

    def like(*shape):
        return jax.ShapeDtypeStruct((1, *shape), jnp.float32)

    for stack, length in (("encoder", S), ("decoder", T)):
        layers = getattr(model, stack)
        if not layers:
            continue
        layer, count = layers[0], len(layers)
        of_layer = {"mlp": products_of(layer.mlp, like(length, D))}
        for site in ("self_attention", "cross_attention"):
            attention = getattr(layer, site)
            if attention is not None:
                memory = [like(S, D)] if site == "cross_attention" else []
                by_part = of_attention(attention, like(length, D), *memory)
                of_layer |= {f"{site}.{name}": n for name, n in by_part.items()}
        work |= {f"{stack}.{name}": count * n for name, n in of_layer.items()}
    hidden = like(T if model.decoder else S, D)
    if model.classifier:
        ids = jax.ShapeDtypeStruct((1, S), jnp.int32)
        classes = products_of(model, hidden, ids, method=Transformer.classes)
        return work | {"classifier": classes}
    return work | {"output": products_of(model, hidden, method=Transformer.logits)}


def of_attention(attention: Attention, x, memory=None) -> dict[str, int]:
    """Count multiply-adds of an attention's parts; "maps" is the remainder.

    Args:
        x, memory: its inputs; `memory` is that of cross-attention.
    """
    inputs = (x,) if memory is None else (x, memory)
    memory = inputs[-1]

    def projected(name, x):
        def method(attention, x):
            return project(x, getattr(attention, name), None)

        if getattr(attention, name) is None:  # latent attention has no such kernel
            return 0
        return products_of(attention, x, method=method)

    def latent(attention, memory):
        return attention.latent.keys_values(attention.latent.compressed(memory, None))

    sizes = attention.num_merged_heads, attention.sizes()[3]
    heads = jax.ShapeDtypeStruct((*x.shape[:2], *sizes), x.dtype)
    counts = {
        "query": projected("query", x),
        "key": projected("key", memory),
        "value": projected("value", memory),
        "merge": products_of(attention, heads, x, method=Attention.merged),
    }
    if attention.latent is not None:
        counts["latent"] = products_of(attention, memory, method=latent)
    total = products_of(attention, *inputs)
    return counts | {"maps": total - sum(counts.values())}


def print_parts(model: Transformer) -> None:
    """Print the table of the parts."""
    rows = parts(model)
    total = parameters(model)
    work = multiply_adds(model, spec_of(model, LENGTH, LENGTH))
    table = Table(
        *("part", "layers", "kernels per layer", "parameters", "share"),
        *("multiply-adds per token", "share"),
        caption=f"Multiply-adds of the matrix products of a forward pass, up to the "
        f"logits, per token (of each side), at {LENGTH} tokens.",
    )
    for column in table.columns[3:]:
        column.justify = "right"

    def columns(count, adds):
        return (
            *(f"{count:,}", f"{count / total:.1%}"),
            *(f"{adds / LENGTH:,.0f}", f"{adds / work:.1%}"),
        )

    for row in rows:
        shapes = ", ".join("×".join(map(str, shape)) for shape in row.shapes)
        is_tied = row.name == "output" and model.output_table is None
        name = f"{row.name} (tied to the embedding)" if is_tied else row.name
        number = str(row.layers) if "." in row.name else ""
        table.add_row(name, number, shapes, *columns(row.parameters, row.multiply_adds))
    table.add_section()
    table.add_row("all", "", "", *columns(total, work))
    show(table)


def print_heads(model: Transformer) -> None:
    """Print the shape of the heads, and their parameters per layer."""
    table = Table(
        *("attention", "merge", "N", "K", "H", "V"),
        *("parameters per head", "with the merge"),
        caption="Per layer: N heads, K key and value heads, sizes H and V.",
    )
    for site in SITES:
        stack, name = site.split(".")
        layers = getattr(model, stack)
        attention = getattr(layers[0], name) if layers else None
        if attention is None:
            continue
        N, K, H, V = attention.sizes()
        with_merge = parameters(attention)
        merge = dict(attention.merge), attention.merge_bias
        without = with_merge - parameters(merge)
        counts = (f"{count / N:,.0f}" for count in (without, with_merge))
        table.add_row(site, attention.merge_rule, *map(str, (N, K, H, V)), *counts)
    show(table)


def spec_of(model: Transformer, S: int, T: int) -> dict:
    """Return a batch spec for one example with these lengths."""
    lengths = {"source": S, "target": T}
    fields = {f: None for site in model.sites().values() for f in site[1:3]}
    return batch_spec(fields, 1, {field: lengths[field] for field in fields})


def show(table: Table) -> None:
    """Print a table; 120 columns wide if output is not a terminal."""
    console = Console(highlight=False, markup=False)
    console.width = console.width if console.is_terminal else 120
    console.print(table)


def main():
    """Check the flags, then print the tables."""
    if CONFIG.value is None:
        fail(
            "--config is needed, as in "
            "python -m headcount.models.describe --config=configs/presets.py:bert_base"
        )
    with one_sentence():
        check_values(flat(CONFIG.value.to_dict()))
        data, task = CONFIG.value.data, CONFIG.value.task
        settings = CONFIG.value.model.to_dict()
        has_pairs = settings["num_encoder_layers"] and settings["num_decoder_layers"]
        is_one = data.joint_vocabulary or not has_pairs
        size = tokenizers.max_vocab_size(data)
        sizes = (size,) * (1 if is_one else 2)
        if task.name in ("tagging", "classification"):
            pooling = task.pooling if task.name == "classification" else None
            settings |= {"num_classes": data.num_classes, "pooling": pooling}
        model = abstract(partial(Transformer, *sizes, **settings))
        print_parts(model)
        print_heads(model)


if __name__ == "__main__":
    run(main)
