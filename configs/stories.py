"""Generated stories with known links between words, to study what heads learn.

    python train.py --config=configs/stories.py --workdir=runs/stories
    python heads.py roles --workdir=runs/stories

Verbs agree with a subject several words before them. Pronouns and repeated names
determine which of two things a sentence mentions (see data/stories.py). Eight seeds
had a test loss of 1.5440 ± 0.0046 (two cores of an Intel Xeon, 2026-11-24,
results/roles_stories).
"""

from headcount.configs import base


def get_config():
    """Return two layers of four heads, on stories of about 45 words."""
    config = base.get_config()
    config.task.name = "language_model"
    config.data.name = "stories"
    config.data.tokenizer = "words"
    config.data.vocab_size = 93  # 89 words, four special tokens
    config.data.max_length = 96
    config.data.cross_documents = False  # names are used differently in each story
    config.data.batch_tokens = 32 * 96
    config.model.width = 64
    config.model.mlp_dim = 128
    config.model.num_encoder_layers = 0
    config.model.num_decoder_layers = 2
    config.model.attention.num_heads = 4
    config.model.dropout = 0.0
    config.model.positions = "learned"
    config.model.max_positions = 96
    config.model.norm = "pre"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 100
    config.optimizer.label_smoothing = 0.0
    config.train.num_steps = 1000
    config.train.eval_every_steps = 200
    config.train.checkpoint_every_steps = 500
    return config
