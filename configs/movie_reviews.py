"""Polarity of movie reviews: sentences of Pang and Lee (2005), with an encoder.

    python train.py --config=configs/movie_reviews.py --workdir=runs/reviews \\
      --config.data.directory=FOLDER
    python eval.py --workdir=runs/reviews --split=test

FOLDER holds rt-polarity.pos and rt-polarity.neg. On the tenth that is the test split,
five seeds scored an accuracy of 76.46 ± 0.72% (two cores of an Intel Xeon, 2026-11-25,
docs/benchmarks/tagging.md). Kim (2014) reports 76.1% by ten folds, for a CNN that
starts from random vectors.
"""

from headcount.configs import base


def get_config():
    """Return one layer of sixteen heads over words."""
    config = base.get_config()
    config.task.name = "classification"
    config.task.pooling = "mean"
    config.task.token_dropout = 0.3
    config.data.name = "movie_reviews"
    config.data.tokenizer = "affixes"
    config.data.num_classes = 2
    config.data.vocab_size = 20000
    config.data.max_length = 128
    config.data.batch_tokens = 2048
    config.model.width = 128
    config.model.mlp_dim = 256
    config.model.num_encoder_layers = 1
    config.model.num_decoder_layers = 0
    config.model.attention.num_heads = 16
    config.model.dropout = 0.5
    config.model.positions = "relative"
    config.model.norm = "pre"
    config.optimizer.learning_rate = 8e-3
    config.optimizer.warmup_steps = 50
    config.optimizer.schedule = "cosine"
    config.train.num_steps = 250
    config.train.eval_every_steps = 50
    config.train.checkpoint_every_steps = 250
    return config
