"""Convert a trained model to a Hugging Face model: family, config.json and tensors.

Translation models become Marian, taggers become BERT, and language models become GPT-2
or, with rotary positions, Llama (Qwen 3 if queries and keys are normalised). A setting
that the family can't express raises a ValueError that names the config key.
"""

import re

import numpy as np

from headcount.configs.sites import layers_of
from headcount.data.tokenizers import BOS, EOS, PAD
from headcount.exchange import folding
from headcount.exchange.huggingface import to_huggingface
from headcount.exchange.huggingface_config import ACTIVATIONS

POSITION_ROWS = 1024  # minimum for computed position tables; longer texts fail
MARIAN_EPSILON = 1e-5  # PyTorch's default, which Marian's layer norms use
NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
PLAIN = ("max_positions", "activation", "scale_embeddings", "use_bias")
NORMS = ("norm", "norm_type", "norm_epsilon", "positions", "mlp")
TABLES = ("sinusoidal", "sinusoidal_paper", "none")  # positions, added as a table
LAYERS = {"norm_type": ("layer_norm",), "mlp": ("plain",)}
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


def family_of(config) -> str:
    """Return the family of a config's model, after checking that it fits.

    Raises:
        ValueError: the family lacks a setting of the model.
    """
    model = config.model
    if model.num_encoder_layers and model.num_decoder_layers:
        family, title = "marian", "Hugging Face's Marian"
        folding.check_plain(config, title, (*PLAIN, *NORMS, "output_bias"), SHAPE)
        folding.require(config, title, positions=TABLES, norm=("post",), **LAYERS)
        if not config.data.joint_vocabulary:
            folding.refuse(title, "data.joint_vocabulary", True, False)
    elif model.num_encoder_layers:
        family, title = "bert", "Hugging Face's BERT"
        folding.check_plain(config, title, (*PLAIN, *NORMS, *BERT_KEYS), SHAPE)
        required = {"positions": ("learned", *TABLES), "norm": ("post",), **LAYERS}
        folding.require(config, title, **required, embedding_norm=(True,))
        if config.task.name != "tagging":
            folding.refuse(title, "task.name", "tagging", config.task.name)
        if config.data.tokenizer == "affixes":
            folding.refuse(title, "data.tokenizer", "one without features", "affixes")
    elif model.positions == "rotary":
        of = folding.site_settings(config, "decoder")
        family = "qwen3" if of["qk_norm"] else "llama"
        title = f"Hugging Face's {'Qwen 3' if of['qk_norm'] else 'Llama'}"
        keys = (*PLAIN, *NORMS, "tie_embeddings")
        folding.check_plain(config, title, keys, (*SHAPE, "qk_norm"))
        required = {"norm": ("pre",), "norm_type": ("rms_norm",), "mlp": ("gated",)}
        folding.require(config, title, **required)
        if family == "qwen3":
            folding.require(config, title, use_bias=(False,))
    else:
        family, title = "gpt2", "Hugging Face's GPT-2"
        folding.check_plain(config, title, (*PLAIN, *NORMS, "tie_embeddings"), SHAPE)
        required = {"positions": ("learned", *TABLES), "norm": ("pre",), **LAYERS}
        folding.require(config, title, **required)
    for site in layers_of(config.model):
        check_shape(config, site, title, free=family in ("llama", "qwen3"))
    return family


SHAPE = ("head_dim", "value_dim", "num_kv_heads")
UNUSED = ("pooler", "output_transform", "output_bias")  # by a tagger
BERT_KEYS = ("embedding_norm", "token_types", *UNUSED)


def check_shape(config, site: str, title: str, free: bool) -> None:
    """Raise a ValueError if the family does not support the heads' sizes."""
    N, K, H, V = folding.head_sizes(config, site)
    path = folding.site_settings(config, site)["path"]
    size = config.model.width // N
    if V != H:
        folding.refuse(title, f"{path}.value_dim", f"head_dim = {H}", V)
    if not free and size != H:
        folding.refuse(title, f"{path}.head_dim", f"width / num_heads = {size}", H)
    if not free and K != N:
        folding.refuse(title, f"{path}.num_kv_heads", f"num_heads = {N}", K)
    if site == "cross":
        decoder_heads = folding.head_sizes(config, "decoder")[0]
        if decoder_heads != N:
            folding.refuse(
                title, f"{path}.num_heads", f"the decoder's {decoder_heads}", N
            )


def convert(config, family: str, params: dict, labels: list[str] | None = None):
    """Return config.json, generation_config.json (or None), and the tensors by name.

    Args:
        config: the run's config.
        family: the result of `family_of`.
        params: parameters by path, from `folding.plain_heads`.
        labels: the classes of a tagger.
    """
    rows = max(POSITION_ROWS, 2 * config.data.max_length + 16)
    tables = folding.position_tables(config, params, rows)
    params = dict(params)
    if family == "marian":
        return marian(config, params, tables)
    if family == "bert":
        return bert(config, params, tables, labels)
    untie(config, params)
    if family == "gpt2":
        params["decoder_positions"] = tables["decoder"]
    return (gpt2 if family == "gpt2" else llama)(config, family, params)


def untie(config, params: dict) -> None:
    """Fold the scale of embeddings into the embedding, and untie the output's table."""
    if config.model.scale_embeddings:
        params.setdefault("output_table", params["embedding"])
        scale = np.float32(config.model.width**0.5)
        params["embedding"] = params["embedding"] * scale


def marian(config, params: dict, tables: dict):
    """Convert to Marian, whose layer norms have an epsilon of 1e-5: see `rescaled`."""
    model = config.model
    size, width = params["embedding"].shape
    params.setdefault("output_bias", np.zeros(size, np.float32))
    fill(params)
    factor = (MARIAN_EPSILON / model.norm_epsilon) ** 0.5
    last = model.num_decoder_layers - 1
    params = rescaled(params, factor, f"decoder.{last}.mlp_norm")
    tensors = to_huggingface("marian", params)
    for side, table in tables.items():
        wide = table.astype(np.float64) * factor
        name = f"model.{side}.embed_positions.weight"
        tensors[name] = wide.astype(np.float32)
    heads = folding.head_sizes
    settings = {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "vocab_size": size,
        "decoder_vocab_size": size,
        "d_model": width,
        "encoder_layers": model.num_encoder_layers,
        "decoder_layers": model.num_decoder_layers,
        "encoder_attention_heads": heads(config, "encoder")[0],
        "decoder_attention_heads": heads(config, "decoder")[0],
        "encoder_ffn_dim": model.mlp_dim,
        "decoder_ffn_dim": model.mlp_dim,
        "activation_function": NAMES[model.activation],
        "max_position_embeddings": len(tables["encoder"]),
        "scale_embedding": bool(model.scale_embeddings),
        "dropout": model.dropout,
        "attention_dropout": model.attention.dropout,
        "activation_dropout": 0.0,
        "normalize_before": False,
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "decoder_start_token_id": model.bos,
        "forced_eos_token_id": None,
        "norm_epsilon_before_rescaling": model.norm_epsilon,
        **SPECIAL,
    }
    generation = {
        "decoder_start_token_id": model.bos,
        "suppress_tokens": [0, 1],  # padding and BOS, as in our search
        "max_length": len(tables["decoder"]),
        "num_beams": 1,
        **SPECIAL,
    }
    return settings, generation, tensors


def rescaled(params: dict, factor: float, last_norm: str) -> dict:
    """Return equivalent post-norm parameters for another norm epsilon.

    A layer norm of c · x with epsilon c² · e equals that of x with epsilon e. So scale
    the residual stream by c: multiply parameters that write to it by c, and divide
    those that read from it. The last norm is divided, because its output only meets the
    embedding, which is multiplied.
    """
    if factor == 1:
        return params
    written = r"embedding|.*\.(merge\.kernel|merge_bias|mlp\.down\.\w+|\w+_norm\.\w+)"
    reads = r".*\.(query|key|value|mlp\.up\.kernel)"
    scaled = {}
    for name, array in params.items():
        wide = array.astype(np.float64)
        if name.startswith(last_norm) or re.fullmatch(reads, name):
            wide = wide / factor
        elif re.fullmatch(written, name):
            wide = wide * factor
        scaled[name] = wide.astype(np.float32)
    return scaled


def fill(params: dict) -> None:
    """Add zero biases where the model has none."""
    stacks = {name.rsplit(".", 1)[0] for name in params}
    for name in stacks:
        if f"{name}.query" in params:
            for part in ("query", "key", "value"):
                shape = params[f"{name}.{part}"].shape[1:]
                params.setdefault(f"{name}.{part}_bias", np.zeros(shape, np.float32))
            width = params[f"{name}.query"].shape[0]
            params.setdefault(f"{name}.merge_bias", np.zeros(width, np.float32))
        kernel, scale = params.get(f"{name}.kernel"), params.get(f"{name}.scale")
        if kernel is not None and kernel.ndim == 2 and ".mlp." in name:
            zeros = np.zeros(kernel.shape[1], np.float32)
            params.setdefault(f"{name}.bias", zeros)
        if scale is not None and name.endswith("norm"):
            params.setdefault(f"{name}.bias", np.zeros_like(scale))


def gpt2(config, family: str, params: dict):
    """Convert to GPT-2."""
    model = config.model
    fill(params)
    size, width = params["embedding"].shape
    settings = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": size,
        "n_embd": width,
        "n_layer": model.num_decoder_layers,
        "n_head": folding.head_sizes(config, "decoder")[0],
        "n_positions": len(params["decoder_positions"]),
        "n_inner": model.mlp_dim,
        "activation_function": NAMES[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": folding.site_settings(config, "decoder")["dropout"],
        "tie_word_embeddings": "output_table" not in params,
    }
    return finished(config, settings, family, params)


def llama(config, family: str, params: dict):
    """Convert to Llama or Qwen 3."""
    model = config.model
    size, width = params["embedding"].shape
    N, K, H, _ = folding.head_sizes(config, "decoder")
    of = folding.site_settings(config, "decoder")
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    settings = {
        "model_type": family,
        "architectures": [name],
        "vocab_size": size,
        "hidden_size": width,
        "intermediate_size": model.mlp_dim,
        "num_hidden_layers": model.num_decoder_layers,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "hidden_act": NAMES[model.activation],
        "max_position_embeddings": max(POSITION_ROWS, 2 * config.data.max_length),
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": 10000.0,
        "attention_bias": bool(of["use_bias"]),
        "attention_dropout": of["dropout"],
        "mlp_bias": bool(model.use_bias),
        "tie_word_embeddings": "output_table" not in params,
    }
    return finished(config, settings, family, params)


def finished(config, settings: dict, family: str, params: dict):
    """Add special tokens: the separator of documents is both BOS and EOS."""
    separator = config.model.bos
    special = {"bos_token_id": separator, "eos_token_id": separator}
    generation = dict(special)
    if config.data.tokenizer != "gpt2":
        special["pad_token_id"] = 0
        banned = [i for i in range(4) if i != separator]
        generation |= {"pad_token_id": 0, "suppress_tokens": banned}
    return settings | special, generation, to_huggingface(family, params)


def bert(config, params: dict, tables: dict, labels: list[str] | None):
    """Convert to BERT for token classification."""
    model, of = config.model, folding.site_settings(config, "encoder")
    params = {k: v for k, v in params.items() if k.split(".")[0] not in UNUSED}
    fill(params)
    size, width = params["embedding"].shape
    if model.scale_embeddings:
        scale = np.float32(width**0.5)
        params["embedding"] = params["embedding"] * scale
    params["encoder_positions"] = tables["encoder"]
    params.setdefault("types", np.zeros((1, width), np.float32))
    settings = {
        "model_type": "bert",
        "architectures": ["BertForTokenClassification"],
        "vocab_size": size,
        "hidden_size": width,
        "num_hidden_layers": model.num_encoder_layers,
        "num_attention_heads": folding.head_sizes(config, "encoder")[0],
        "intermediate_size": model.mlp_dim,
        "hidden_act": NAMES[model.activation],
        "max_position_embeddings": len(tables["encoder"]),
        "type_vocab_size": len(params["types"]),
        "layer_norm_eps": model.norm_epsilon,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": of["dropout"],
        "id2label": {str(i): label for i, label in enumerate(labels or [])},
        "label2id": {label: i for i, label in enumerate(labels or [])},
        **SPECIAL,
    }
    return settings, None, to_huggingface("bert", params)
