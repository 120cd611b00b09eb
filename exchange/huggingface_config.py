"""Convert config.json of Hugging Face Marian, BERT and GPT-2 to our settings.

Settings are a dict from config key to value. Keys that are missing have the defaults of
configs/base.py.
"""

from functools import partial

from headcount.configs.validation import check_value, choose

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

# By family: keys of config.json, and the value that our models need. It is also
# transformers' default, for which the key may be missing or null.
REQUIRED = {
    "marian": {
        "normalize_before": False,
        "normalize_embedding": False,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "static_position_embeddings": True,
    },
    "bert": {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "problem_type": "single_label_classification",
    },
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
}


def settings_of(theirs: dict) -> dict:
    """Convert a config.json to settings, except those that depend on the tensors.

    Raises:
        ValueError: the family or a setting is not supported, or a key is missing.
    """
    family = str(theirs.get("model_type"))
    if family not in READERS:
        raise ValueError(
            f"config.json must be of model_type {', '.join(READERS)}, got {family!r}."
        )
    for key, required in REQUIRED[family].items():
        if theirs.get(key) not in (required, None):
            raise ValueError(
                f"config.json: {key} must be {required!r} for {family} here, got "
                f"{theirs[key]!r}."
            )
    try:
        return READERS[family](theirs)
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}.") from None


def read(theirs: dict, kind: type, key: str, *default):
    """Return a key's value after checking its type."""
    value = theirs[key] if not default else theirs.get(key, *default)
    check_value(f"config.json: {key}", value, kind, is_optional=False)
    return kind(value)


def activation(theirs: dict, key: str) -> str:
    """Return our name for an activation."""
    name = str(theirs[key])  # whatever it is
    choose(f"config.json: {key}", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def marian(theirs: dict) -> dict:
    """Convert Marian: encoder and decoder, post-norm, with the paper's sinusoids."""
    size = partial(read, theirs, int)
    if theirs["encoder_ffn_dim"] != theirs["decoder_ffn_dim"]:
        raise ValueError(
            f"config.json: encoder_ffn_dim and decoder_ffn_dim must be the same here, "
            f"got {theirs['encoder_ffn_dim']} and {theirs['decoder_ffn_dim']}."
        )
    pad, start = theirs["pad_token_id"], theirs["decoder_start_token_id"]
    if pad != start:
        raise ValueError(
            f"config.json: decoder_start_token_id must be pad_token_id = {pad}, got "
            f"{start}."
        )
    return {
        "data.vocab_size": size("vocab_size") + 1,  # we add a row for padding
        "data.max_length": size("max_position_embeddings"),
        "model.width": size("d_model"),
        "model.num_encoder_layers": size("encoder_layers"),
        "model.num_decoder_layers": size("decoder_layers"),
        "model.mlp_dim": size("decoder_ffn_dim"),
        "model.dropout": read(theirs, float, "dropout", 0.1),
        "model.attention.dropout": read(theirs, float, "attention_dropout", 0.0),
        "model.positions": "sinusoidal_paper",
        "model.norm_epsilon": 1e-5,
        "model.activation": activation(theirs, "activation_function"),
        "model.scale_embeddings": read(theirs, bool, "scale_embedding"),
        "model.output_bias": True,
        "model.attention.num_heads": size("decoder_attention_heads"),
        "model.encoder_attention.num_heads": size("encoder_attention_heads"),
    }


def bert(theirs: dict) -> dict:
    """Convert BERT: encoder-only, post-norm."""
    size = partial(read, theirs, int)
    return {
        "task.name": "masked_language_model",
        "data.name": "text",
        "data.tokenizer": "wordpiece",
        "data.vocab_size": size("vocab_size"),
        "data.max_length": size("max_position_embeddings"),
        "model.width": size("hidden_size"),
        "model.num_encoder_layers": size("num_hidden_layers"),
        "model.num_decoder_layers": 0,
        "model.mlp_dim": size("intermediate_size"),
        "model.dropout": read(theirs, float, "hidden_dropout_prob", 0.1),
        "model.attention.dropout": read(
            theirs, float, "attention_probs_dropout_prob", 0.1
        ),
        "model.positions": "learned",
        "model.max_positions": size("max_position_embeddings"),
        "model.norm_epsilon": read(theirs, float, "layer_norm_eps", 1e-12),
        "model.activation": activation(theirs, "hidden_act"),
        "model.scale_embeddings": False,
        "model.embedding_norm": True,
        "model.token_types": size("type_vocab_size"),
        "model.attention.num_heads": size("num_attention_heads"),
    }


def gpt2(theirs: dict) -> dict:
    """Convert GPT-2: decoder-only, pre-norm."""
    size = partial(read, theirs, int)
    inner = "n_inner" if theirs.get("n_inner") else None
    bos = "bos_token_id" if theirs.get("bos_token_id") is not None else None
    return {
        "task.name": "language_model",
        "data.name": "text",
        "data.tokenizer": "gpt2",
        "data.vocab_size": size("vocab_size"),
        "data.max_length": size("n_positions"),
        "model.width": size("n_embd"),
        "model.num_encoder_layers": 0,
        "model.num_decoder_layers": size("n_layer"),
        "model.mlp_dim": size(inner) if inner else 4 * size("n_embd"),
        "model.dropout": read(theirs, float, "resid_pdrop", 0.1),
        "model.attention.dropout": read(theirs, float, "attn_pdrop", 0.1),
        "model.positions": "learned",
        "model.max_positions": size("n_positions"),
        "model.norm": "pre",
        "model.norm_epsilon": read(theirs, float, "layer_norm_epsilon", 1e-5),
        "model.activation": activation(theirs, "activation_function"),
        "model.scale_embeddings": False,
        "model.bos": size(bos) if bos else size("vocab_size") - 1,
        "model.attention.num_heads": size("n_head"),
    }


READERS = {"marian": marian, "bert": bert, "gpt2": gpt2}
