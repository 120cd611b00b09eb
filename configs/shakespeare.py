"""Character-level Shakespeare with nanoGPT's recipes.

    python train.py --config=configs/shakespeare.py:short --workdir=runs/shakespeare
    python eval.py --workdir=runs/shakespeare --split=val

The full recipe (6 layers, 6 heads, width 384, context 256, batch 64, 5,000 steps,
dropout 0.2) is for a GPU or an overnight run. nanoGPT's README reports a loss of
1.4697; three seeds here had 1.4651 ± 0.0033 (one NVIDIA H200, 2026-11-27,
results/shakespeare). `:short` (4 layers, 4 heads, width 128, context 64, batch 12,
2,000 steps, no dropout) is its recipe for a laptop's CPU. Its README reports 1.88; five
seeds here had 1.798 ± 0.012 (two cores of an AMD EPYC, 2026-11-27,
results/shakespeare_short). The validation split is the last 10% of the text, in windows
that do not overlap.

A sweep that tunes settings also needs a test split, on which they are not chosen:
--config.data.test_share=0.5 makes the second half of the last 10% the test split.
"""

from headcount.configs import base


def get_config(recipe: str = "full"):
    """Return nanoGPT's config/train_shakespeare_char.py, or its CPU variant."""
    if recipe not in ("full", "short"):
        raise ValueError(f"configs/shakespeare.py has :full and :short, not :{recipe}")
    config = base.get_config()
    config.task.name = "language_model"
    config.data.name = "shakespeare"
    config.data.tokenizer = "characters"
    # 65 characters, 4 special tokens; once read, the text decides
    config.data.vocab_size = 69
    config.data.max_length = 256
    config.data.batch_tokens = 64 * 256
    config.model.width = 384
    config.model.mlp_dim = 4 * 384
    config.model.num_encoder_layers = 0
    config.model.num_decoder_layers = 6
    config.model.attention.num_heads = 6
    config.model.attention.use_bias = False
    config.model.use_bias = False
    config.model.dropout = 0.2
    config.model.attention.dropout = 0.2
    config.model.positions = "learned"
    config.model.max_positions = 256
    config.model.norm = "pre"
    config.model.norm_epsilon = 1e-5
    config.model.activation = "gelu"
    config.model.scale_embeddings = False
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.beta2 = 0.99
    config.optimizer.epsilon = 1e-8
    config.optimizer.weight_decay = 0.1
    config.optimizer.label_smoothing = 0.0
    config.train.num_steps = 5000
    config.train.eval_every_steps = 250
    config.train.checkpoint_every_steps = 250
    if recipe == "short":
        config.data.max_length = 64
        config.data.batch_tokens = 12 * 64
        config.model.width = 128
        config.model.mlp_dim = 4 * 128
        config.model.num_decoder_layers = 4
        config.model.attention.num_heads = 4
        config.model.dropout = 0.0
        config.model.attention.dropout = 0.0
        config.model.max_positions = 64
        config.train.num_steps = 2000
    return config
