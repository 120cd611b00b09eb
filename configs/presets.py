"""Models from the literature, such as `--config=configs/presets.py:bert_base`.

    python -m headcount.models.describe --config=configs/presets.py:gpt2_small
    python train.py --config=configs/presets.py:transformer_base --workdir=runs/base

bert_base, bert_large: encoder-only, with pooler (Devlin et al. 2019); 109,482,240 and
    335,141,888 parameters.
gpt2_small, gpt2_medium: decoder-only (Radford et al. 2019); 124,439,808 and 354,823,168
    parameters.
transformer_base, transformer_big: WMT14 English to German (Vaswani et al. 2017); the
    same as configs/wmt14.py and its `:big`.
transformer_tiny: Multi30k (Wu et al. 2021); the same as configs/multi30k.py.

train.py trains the translation models, and BERT on documents in data.directory.
weights.py imports the weights of BERT and GPT-2.
"""

from headcount.configs import base, multi30k, wmt14


def get_config(name: str = ""):
    """Return the preset with this name."""
    if name not in PRESETS:
        raise ValueError(f"configs/presets.py has :{', :'.join(PRESETS)}, not :{name}")
    make, *sizes = PRESETS[name]
    return make(*sizes)


def one_stack(side: str, num_layers: int, width: int, num_heads: int):
    """Return an encoder or a decoder whose feed-forward is four times the width."""
    config = base.get_config()
    config.model.width = width
    config.model.mlp_dim = 4 * width
    config.model.attention.num_heads = num_heads
    config.model.num_encoder_layers = config.model.num_decoder_layers = 0
    config.model[f"num_{side}_layers"] = num_layers
    return config


def bert(num_layers: int, width: int, num_heads: int):
    """Return an encoder-only model: post-norm, learned positions, GELU."""
    config = one_stack("encoder", num_layers, width, num_heads)
    config.task.name = "masked_language_model"
    config.data.name = "text"
    config.data.vocab_size = 30_522
    config.model.positions = "learned"
    config.model.max_positions = 512
    config.model.norm_epsilon = 1e-12
    config.model.activation = "gelu"
    config.model.scale_embeddings = False
    config.model.embedding_norm = True
    config.model.token_types = 2
    config.model.pooler = True
    return config


def gpt2(num_layers: int, width: int, num_heads: int):
    """Return a decoder-only model: pre-norm, learned positions, tanh GELU."""
    config = one_stack("decoder", num_layers, width, num_heads)
    config.task.name = "language_model"
    config.data.name = "text"
    config.data.vocab_size = 50_257
    config.model.positions = "learned"
    config.model.max_positions = 1024
    config.model.norm = "pre"
    config.model.norm_epsilon = 1e-5
    config.model.activation = "gelu_tanh"
    config.model.scale_embeddings = False
    config.model.bos = 50_256  # <|endoftext|>
    return config


PRESETS = {
    "bert_base": (bert, 12, 768, 12),
    "bert_large": (bert, 24, 1024, 16),
    "gpt2_small": (gpt2, 12, 768, 12),
    "gpt2_medium": (gpt2, 24, 1024, 16),
    "transformer_base": (wmt14.get_config, "base"),
    "transformer_big": (wmt14.get_config, "big"),
    "transformer_tiny": (multi30k.get_config,),
}
