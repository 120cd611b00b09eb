"""Convert weights from and to Hugging Face Marian, BERT, GPT-2, Llama and Qwen 3.

Each family has a table of rows: their tensor, our parameter (or several, concatenated
in the tensor), and its form. `{i}` is the layer's index. The forms are:

    vector   flat, such as a bias or a norm's scale
    table    the same array, such as an embedding
    row      a vector as a matrix with one row
    kernel   a matrix whose inputs are our first axis: D to heads, D to F
    merge    a matrix whose outputs are our last axis: heads to D

Their matrices are outputs × inputs, as in torch.nn.Linear, except in GPT-2, where they
are inputs × outputs. Arrays are NumPy arrays by name.
"""

import math
import re
from typing import NamedTuple

import jax
import numpy as np


class Row(NamedTuple):
    """A Hugging Face tensor, and the parameters of ours that it holds."""

    theirs: str
    ours: str | tuple[str, ...]
    form: str


def attention(ours: str, theirs: str, query: str, key: str, value: str, out: str):
    """Return the rows of an attention whose four projections have these names."""
    names = {"query": query, "key": key, "value": value}
    return [
        row
        for name, other in names.items()
        for row in (
            Row(f"{theirs}.{other}.weight", f"{ours}.{name}", "kernel"),
            Row(f"{theirs}.{other}.bias", f"{ours}.{name}_bias", "vector"),
        )
    ] + [
        Row(f"{theirs}{out}.weight", f"{ours}.merge.kernel", "merge"),
        Row(f"{theirs}{out}.bias", f"{ours}.merge_bias", "vector"),
    ]


def linear(ours: str, theirs: str):
    """Return the rows of a linear map."""
    return [
        Row(f"{theirs}.weight", f"{ours}.kernel", "kernel"),
        Row(f"{theirs}.bias", f"{ours}.bias", "vector"),
    ]


def norm(ours: str, theirs: str):
    """Return the rows of a layer norm."""
    return [
        Row(f"{theirs}.weight", f"{ours}.scale", "vector"),
        Row(f"{theirs}.bias", f"{ours}.bias", "vector"),
    ]


def marian_layer(side: str):
    """Return the rows of an encoder's or a decoder's layers."""
    ours, theirs = f"{side}.{{i}}", f"model.{side}.layers.{{i}}"
    names = ("q_proj", "k_proj", "v_proj", ".out_proj")
    rows = [
        *attention(f"{ours}.self_attention", f"{theirs}.self_attn", *names),
        *norm(f"{ours}.self_norm", f"{theirs}.self_attn_layer_norm"),
        *linear(f"{ours}.mlp.up", f"{theirs}.fc1"),
        *linear(f"{ours}.mlp.down", f"{theirs}.fc2"),
        *norm(f"{ours}.mlp_norm", f"{theirs}.final_layer_norm"),
    ]
    if side == "decoder":
        rows += attention(f"{ours}.cross_attention", f"{theirs}.encoder_attn", *names)
        rows += norm(f"{ours}.cross_norm", f"{theirs}.encoder_attn_layer_norm")
    return rows


MARIAN = [
    Row("model.shared.weight", "embedding", "table"),
    Row("final_logits_bias", "output_bias", "row"),
    *marian_layer("encoder"),
    *marian_layer("decoder"),
]

BERT_LAYER = "bert.encoder.layer.{i}"
BERT = [
    Row("bert.embeddings.word_embeddings.weight", "embedding", "table"),
    Row("bert.embeddings.position_embeddings.weight", "encoder_positions", "table"),
    Row("bert.embeddings.token_type_embeddings.weight", "types", "table"),
    *norm("encoder_embedding_norm", "bert.embeddings.LayerNorm"),
    *attention(
        "encoder.{i}.self_attention",
        f"{BERT_LAYER}.attention",
        *("self.query", "self.key", "self.value", ".output.dense"),
    ),
    *norm("encoder.{i}.self_norm", f"{BERT_LAYER}.attention.output.LayerNorm"),
    *linear("encoder.{i}.mlp.up", f"{BERT_LAYER}.intermediate.dense"),
    *linear("encoder.{i}.mlp.down", f"{BERT_LAYER}.output.dense"),
    *norm("encoder.{i}.mlp_norm", f"{BERT_LAYER}.output.LayerNorm"),
    *linear("pooler.linear", "bert.pooler.dense"),
    *linear("output_transform.linear", "cls.predictions.transform.dense"),
    *norm("output_transform.norm", "cls.predictions.transform.LayerNorm"),
    Row("cls.predictions.bias", "output_bias", "vector"),
    *linear("classifier.linear", "classifier"),
]

GPT2_LAYER = "transformer.h.{i}"
GPT2_SELF = "decoder.{i}.self_attention"
GPT2 = [
    Row("transformer.wte.weight", "embedding", "table"),
    Row("transformer.wpe.weight", "decoder_positions", "table"),
    *norm("decoder.{i}.self_norm", f"{GPT2_LAYER}.ln_1"),
    Row(
        f"{GPT2_LAYER}.attn.c_attn.weight",
        tuple(f"{GPT2_SELF}.{name}" for name in ("query", "key", "value")),
        "kernel",
    ),
    Row(
        f"{GPT2_LAYER}.attn.c_attn.bias",
        tuple(f"{GPT2_SELF}.{name}_bias" for name in ("query", "key", "value")),
        "vector",
    ),
    Row(f"{GPT2_LAYER}.attn.c_proj.weight", f"{GPT2_SELF}.merge.kernel", "merge"),
    Row(f"{GPT2_LAYER}.attn.c_proj.bias", f"{GPT2_SELF}.merge_bias", "vector"),
    *norm("decoder.{i}.mlp_norm", f"{GPT2_LAYER}.ln_2"),
    *linear("decoder.{i}.mlp.up", f"{GPT2_LAYER}.mlp.c_fc"),
    *linear("decoder.{i}.mlp.down", f"{GPT2_LAYER}.mlp.c_proj"),
    *norm("decoder_norm", "transformer.ln_f"),
    Row("lm_head.weight", "output_table", "table"),
]

LLAMA_LAYER = "model.layers.{i}"
LLAMA = [  # also Qwen 3, which normalises queries and keys
    Row("model.embed_tokens.weight", "embedding", "table"),
    Row("lm_head.weight", "output_table", "table"),
    *norm("decoder.{i}.self_norm", f"{LLAMA_LAYER}.input_layernorm"),
    *attention(
        GPT2_SELF,
        f"{LLAMA_LAYER}.self_attn",
        *("q_proj", "k_proj", "v_proj", ".o_proj"),
    ),
    Row(
        f"{LLAMA_LAYER}.self_attn.q_norm.weight",
        f"{GPT2_SELF}.query_norm.scale",
        "vector",
    ),
    Row(
        f"{LLAMA_LAYER}.self_attn.k_norm.weight",
        f"{GPT2_SELF}.key_norm.scale",
        "vector",
    ),
    *norm("decoder.{i}.mlp_norm", f"{LLAMA_LAYER}.post_attention_layernorm"),
    *linear("decoder.{i}.mlp.gate", f"{LLAMA_LAYER}.mlp.gate_proj"),
    *linear("decoder.{i}.mlp.up", f"{LLAMA_LAYER}.mlp.up_proj"),
    *linear("decoder.{i}.mlp.down", f"{LLAMA_LAYER}.mlp.down_proj"),
    *norm("decoder_norm", "model.norm"),
]


class Family(NamedTuple):
    """A family's checkpoint format."""

    rows: list[Row]
    outputs_first: bool  # whether matrices are outputs × inputs
    prefix: str  # of all tensors but the output head's; may be missing
    tied: dict[str, str]  # names of tensors that repeat another one
    no_weights: str  # pattern of names of computed tensors
    left_out: str = "(?!)"  # pattern of weights that our model doesn't have


FAMILIES = {
    "marian": Family(
        MARIAN,
        outputs_first=True,
        prefix="model.",
        tied={
            "lm_head.weight": "model.shared.weight",
            "model.encoder.embed_tokens.weight": "model.shared.weight",
            "model.decoder.embed_tokens.weight": "model.shared.weight",
        },
        no_weights=r"model\.(en|de)coder\.embed_positions\.weight",  # sinusoids
    ),
    "bert": Family(
        BERT,
        outputs_first=True,
        prefix="bert.",
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        no_weights=r"bert\.embeddings\.position_ids",
        left_out=r"cls\.seq_relationship\..*",  # next-sentence prediction
    ),
    "gpt2": Family(
        GPT2,
        outputs_first=False,
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.wte.weight"},
        no_weights=r"transformer\.h\.\d+\.attn\.(masked_)?bias",  # causal masks
    ),
    "llama": Family(
        LLAMA,
        outputs_first=True,
        prefix="model.",
        tied={},
        no_weights=r".*\.rotary_emb\.inv_freq",
    ),
}
FAMILIES["qwen3"] = FAMILIES["llama"]
# Prefixes of output heads, which have no family prefix.
HEADS = ("lm_head.", "cls.", "classifier.", "final_logits_bias")


def rows_of(family: str, ours) -> list[tuple[str, tuple[str, ...], str]]:
    """Return rows (their name, our names, form) for a model with these parameters."""
    layers = {int(n) for name in ours for n in re.findall(r"coder\.(\d+)\.", name)}
    rows = []
    for theirs, names, form in FAMILIES[family].rows:
        names = (names,) if isinstance(names, str) else names
        for i in sorted(layers) if "{i}" in theirs else [0]:
            mine = tuple(name.format(i=i) for name in names)
            if mine[0] in ours:
                rows.append((theirs.format(i=i), mine, form))
    return rows


def to_huggingface(family: str, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert our parameters by path to Hugging Face tensors by name.

    Raises:
        ValueError: the family lacks one of the parameters.
    """
    outputs_first = FAMILIES[family].outputs_first
    tensors, used = {}, set()
    for theirs, names, form in rows_of(family, params):
        parts = [flat(params[name], form) for name in names]
        tensor = np.concatenate(parts, axis=-1)
        if form in ("kernel", "merge") and outputs_first:
            tensor = tensor.T
        tensors[theirs] = np.ascontiguousarray(tensor)
        used |= set(names)
    for name in params:
        if name not in used:
            raise ValueError(f"{name} has no place in a {family} checkpoint.")
    return tensors


def from_huggingface(
    family: str, tensors: dict[str, np.ndarray], expected: dict
) -> dict[str, np.ndarray]:
    """Convert Hugging Face tensors to our parameters by path, float32.

    Args:
        family: a name in `FAMILIES`.
        tensors: tensors by name, from `full_names`.
        expected: the expected parameters by path, or their shapes.

    Raises:
        ValueError: a tensor is missing, has another shape, or the model lacks it.
    """
    outputs_first = FAMILIES[family].outputs_first
    params, used = {}, set()
    for theirs, names, form in rows_of(family, expected):
        if theirs not in tensors:
            raise ValueError(f"the checkpoint has no {theirs}: it is not of {family}.")
        shapes = [flat_shape(expected[name].shape, form) for name in names]
        *leading, _ = shapes[0]
        tensor_shape = (*leading, sum(shape[-1] for shape in shapes))
        matrix = form in ("kernel", "merge")
        tensor_shape = tensor_shape[::-1] if matrix and outputs_first else tensor_shape
        tensor = tensors[theirs]
        if tensor.shape != tensor_shape:
            raise ValueError(
                f"{theirs} must have the shape {tensor_shape} by its config.json, got "
                f"{tensor.shape}."
            )
        tensor = tensor.T if matrix and outputs_first else tensor
        ends = np.cumsum([shape[-1] for shape in shapes])[:-1]
        for name, part in zip(names, np.split(tensor, ends, axis=-1), strict=True):
            part = part.reshape(expected[name].shape)
            params[name] = np.ascontiguousarray(part, dtype=np.float32)
        used.add(theirs)
    for theirs in tensors:
        if theirs not in used:
            raise ValueError(f"{theirs} has no place in a {family} model of ours.")
    return params


def leave_out(family: str, tensors: dict) -> tuple[dict, list[str]]:
    """Split tensors into those that our model has, and names of those it lacks."""
    left_out = [x for x in tensors if re.fullmatch(FAMILIES[family].left_out, x)]
    return {x: y for x, y in tensors.items() if x not in left_out}, left_out


def settings_of(family: str, tensors: dict, is_tagger: bool = False) -> dict:
    """Return settings that depend on which tensors there are: the output heads.

    Args:
        family: a name in `FAMILIES`.
        tensors: by their full names.
        is_tagger: whether config.json names a token classifier. Old ones have a pooler,
            which they don't use.
    """
    if family != "bert":
        return {}
    transform = "cls.predictions.transform.dense.weight" in tensors
    settings = {
        "model.pooler": "bert.pooler.dense.weight" in tensors,
        "model.output_transform": transform,
        "model.output_bias": transform,
    }
    if "classifier.weight" in tensors:
        # a text classifier reads the pooler's output; a token classifier has no pooler
        settings |= {"task.name": "tagging", "data.name": "conll"}
        if settings["model.pooler"] and not is_tagger:
            settings |= {"task.name": "classification", "task.pooling": "first"}
            settings["data.name"] = "labelled"
        settings["data.num_classes"] = len(tensors["classifier.weight"])
        if settings["data.num_classes"] < 2:
            raise ValueError(
                "classifier.weight has one row: models that predict a number are not "
                "supported."
            )
    return settings


def named(params) -> dict:
    """Return a model's parameters (from `nnx.split`) by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(path): leaf for path, leaf in leaves}


def unnamed(arrays: dict, like):
    """Invert `named`; the result has the tree structure of `like`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: arrays[path_name(path)], like
    )


def path_name(path) -> str:
    """Return a parameter's path, without the variable's field `value`."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value")


def flat(array: np.ndarray, form: str) -> np.ndarray:
    """Reshape a parameter to its form; matrices are inputs × outputs."""
    return array.reshape(flat_shape(array.shape, form))


def flat_shape(shape: tuple[int, ...], form: str) -> tuple[int, ...]:
    """Return a parameter's shape in its form; matrices are inputs × outputs."""
    size = math.prod(shape)
    return {
        "vector": (size,),
        "row": (1, size),
        "table": shape,
        "kernel": (shape[0], size // shape[0]),
        "merge": (size // shape[-1], shape[-1]),
    }[form]


def full_names(family: str, tensors: dict) -> dict:
    """Rename tensors as in the family's table, and drop computed and tied ones.

    Checkpoints of models without an output head lack the prefix, old checkpoints use
    the names gamma and beta, and some repeat the embedding.

    Raises:
        ValueError: a tensor that must repeat another differs from it.
    """
    prefix, tied = FAMILIES[family].prefix, FAMILIES[family].tied
    bare = not any(name.startswith(prefix) for name in tensors)
    named = {}
    for name, tensor in tensors.items():
        if bare and not name.startswith(HEADS):
            name = prefix + name
        name = re.sub(r"\bgamma$", "weight", re.sub(r"\bbeta$", "bias", name))
        named[name] = tensor
    for name, other in tied.items():
        if name not in named:
            continue
        if other not in named:
            named[other] = named[name]
        elif not np.array_equal(named[name], named[other]):
            raise ValueError(
                f"{name} must be equal to {other}, because our models tie them."
            )
        del named[name]
    return {
        name: tensor
        for name, tensor in named.items()
        if not re.fullmatch(FAMILIES[family].no_weights, name)
    }
