"""Emerging entities: the posts of WNUT-17 (Derczynski et al. 2017), BIO tags.

    python train.py --config=configs/wnut17.py --workdir=runs/wnut17 \\
      --config.data.directory=FOLDER
    python eval.py --workdir=runs/wnut17 --split=test

FOLDER holds wnut17train.conll, emerging.dev.conll and emerging.test.annotated of
github.com/leondz/emerging_entities_17 (CC BY 4.0). Five seeds scored an entity F1 of
17.93 ± 1.86% on test and 28.90 ± 1.27% on dev (two cores of an Intel Xeon, 2026-11-25,
docs/benchmarks/tagging.md).
"""

from headcount.configs import base


def get_config():
    """Return two layers of four heads, on words represented by their affixes."""
    config = base.get_config()
    config.task.name = "tagging"
    config.task.entities = True
    config.task.token_dropout = 0.3
    config.data.name = "conll"
    config.data.tokenizer = "affixes"
    config.data.num_classes = 13
    config.data.vocab_size = 20000
    config.data.max_length = 128
    config.data.batch_tokens = 2048
    config.model.width = 128
    config.model.mlp_dim = 256
    config.model.num_encoder_layers = 2
    config.model.num_decoder_layers = 0
    config.model.dropout = 0.3
    config.model.positions = "relative"
    config.model.norm = "pre"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.schedule = "cosine"
    config.train.num_steps = 500
    config.train.eval_every_steps = 50
    config.train.checkpoint_every_steps = 250
    return config
