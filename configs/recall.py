"""Multi-query associative recall (Arora et al. 2023): look up values in the context.

    python train.py --config=configs/recall.py --workdir=runs/recall
    python eval.py --workdir=runs/recall --split=test

A document has 8 key-value pairs, then the 8 keys in another order, after each of which
the model must predict its value. Two layers suffice: one head attends to the previous
token, and a head in the next layer finds the match (an induction head). All of five
seeds recalled 100% of the test values (AMD EPYC, 2026-11-25). To compare with
controls, one layer with as many parameters and a model without positions:

    python sweep.py run --config=configs/recall.py \\
      --ablation=configs/recall.py:controls --seeds=5 --workdir=runs/controls
"""

from headcount.configs import base


def get_config():
    """Return two layers of four heads on documents of 32 words."""
    config = base.get_config()
    config.task.name = "language_model"
    config.data.name = "recall"
    config.data.tokenizer = "words"
    config.data.vocab_size = 36  # 16 keys, 16 values, four special tokens
    config.data.max_length = 32
    config.data.batch_tokens = 64 * 64
    config.model.width = 64
    config.model.mlp_dim = 128
    config.model.num_encoder_layers = 0
    config.model.num_decoder_layers = 2
    config.model.attention.num_heads = 4
    config.model.dropout = 0.0
    config.model.positions = "learned"
    config.model.max_positions = 32
    config.model.norm = "pre"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 100
    config.optimizer.label_smoothing = 0.0
    config.train.num_steps = 1500
    config.train.eval_every_steps = 100
    config.train.checkpoint_every_steps = 500
    config.train.best_metric = "recall"
    return config


def controls(config) -> list[dict]:
    """Does recall need two layers, and positions?

    Scientific: model.num_decoder_layers, with the parameters of two; model.positions.
    Nuisance: optimizer.learning_rate.
    Fixed: the rest.
    """
    del config
    return [
        {},
        {"model.num_decoder_layers": 1, "match": "parameters"},
        {"model.positions": "none"},
    ]
