"""Number phrases, English to German: the embedded default, no download.

python train.py --config=configs/numbers.py --workdir=runs/numbers
python eval.py --workdir=runs/numbers --split=test
"""

from configs import base


def get_config():
    """A small Transformer that learns to say numbers."""
    config = base.get_config()
    config.data.name = "numbers"
    config.data.vocab_size = 200
    config.model.attention.num_heads = 4
    config.train.num_steps = 400
    config.train.eval_every_steps = 100
    config.train.checkpoint_every_steps = 100
    config.train.best_metric = "dev_exact_match"  # a number is often a single word
    return config
