"""Models of the literature: `--config=configs/presets.py:bert_base`, and so on.

    python -m models.describe --config=configs/presets.py:gpt2_small
    python train.py --config=configs/presets.py:transformer_base --workdir=runs/base

bert_base, bert_large: an encoder alone, with pooler (Devlin et al. 2019); 109,482,240
    and 335,141,888 parameters.
gpt2_small, gpt2_medium: a decoder alone (Radford et al. 2019); 124,439,808 and
    354,823,168 parameters.
transformer_base, transformer_big: translation as Vaswani et al. 2017, Table 3 and
    section 5: WMT14 English to German, 25,000 target tokens an update, 100,000 and
    300,000 updates. For many accelerators; not run here.
transformer_tiny: Multi30k as Wu et al. 2021; the same as configs/multi30k.py.

train.py trains the translation models; weights.py reads the weights of the others.
"""

from configs import base, multi30k


def get_config(name: str = ""):
    """The preset of that name."""
    if name not in PRESETS:
        raise ValueError(f"configs/presets.py has :{', :'.join(PRESETS)}, not :{name}")
    make, *sizes = PRESETS[name]
    return make(*sizes)


def sized(config, num_layers: dict, width: int, num_heads: int):
    """Set the sizes; the feed-forward is four times as wide as the model."""
    config.model.width = width
    config.model.mlp_dim = 4 * width
    config.model.attention.num_heads = num_heads
    for side in ("encoder", "decoder"):
        config.model[f"num_{side}_layers"] = num_layers.get(side, 0)
    return config


def bert(num_layers: int, width: int, num_heads: int):
    """An encoder alone: post-norm, learned positions, GELU."""
    config = sized(base.get_config(), {"encoder": num_layers}, width, num_heads)
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
    """A decoder alone: pre-norm, learned positions, the tanh form of GELU."""
    config = sized(base.get_config(), {"decoder": num_layers}, width, num_heads)
    config.data.vocab_size = 50_257
    config.model.positions = "learned"
    config.model.max_positions = 1024
    config.model.norm = "pre"
    config.model.norm_epsilon = 1e-5
    config.model.activation = "gelu_tanh"
    config.model.scale_embeddings = False
    config.model.bos = 50_256  # <|endoftext|>
    return config


def transformer(width: int, num_heads: int, dropout: float, num_steps: int):
    """Encoder and decoder of six layers, and how they were trained."""
    layers = {"encoder": 6, "decoder": 6}
    config = sized(base.get_config(), layers, width, num_heads)
    config.data.name = "wmt14_translate/de-en"
    config.data.vocab_size = 37_000
    config.data.batch_tokens = 25_000
    config.model.dropout = dropout
    config.optimizer.schedule = "noam"
    config.optimizer.learning_rate = 1.0
    config.optimizer.warmup_steps = 4000
    config.train.num_steps = num_steps
    config.train.eval_every_steps = 5000
    config.train.checkpoint_every_steps = 1000
    return config


PRESETS = {
    "bert_base": (bert, 12, 768, 12),
    "bert_large": (bert, 24, 1024, 16),
    "gpt2_small": (gpt2, 12, 768, 12),
    "gpt2_medium": (gpt2, 24, 1024, 16),
    "transformer_base": (transformer, 512, 8, 0.1, 100_000),
    "transformer_big": (transformer, 1024, 16, 0.3, 300_000),
    "transformer_tiny": (multi30k.get_config,),
}
