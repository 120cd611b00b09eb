"""IWSLT14 German to English with fairseq's recipe (transformer_iwslt_de_en).

    python train.py --config=configs/iwslt14.py --workdir=runs/iwslt14 \\
      --config.data.directory=FOLDER
    python eval.py --workdir=runs/iwslt14 --split=test --checkpoint=average

FOLDER holds train.de, train.en, val.de, val.en, test.de and test.en, with one sentence
per line (160,000 training pairs; TFDS does not have this corpus). The published score
of this recipe is 34.5 to 35 BLEU, tokenised and lowercased, beam 5. It has not been run
here.

To obtain this text, run fairseq's prepare-iwslt14.sh and use its files in tmp/, with
valid.* renamed to val.*. Differences from fairseq: both languages share a vocabulary
and an embedding; training ends after about 50 epochs; and the last ten checkpoints are
averaged, whereas fairseq's page translates with the best one and divides a hypothesis's
log-probability by its length (eval.py: --length_penalty).
"""

from headcount.configs import base


def get_config():
    """Return the recipe of fairseq's examples/translation."""
    config = base.get_config()
    config.data.name = "text"
    config.data.source = "de"
    config.data.target = "en"
    config.data.vocab_size = 10_000
    config.data.max_length = 175
    config.data.batch_tokens = 4224  # 24 rows of 176, where fairseq has 4096 tokens
    config.model.width = 512
    config.model.num_encoder_layers = 6
    config.model.num_decoder_layers = 6
    config.model.mlp_dim = 1024
    config.model.attention.num_heads = 4
    config.model.dropout = 0.3
    config.optimizer.learning_rate = 5e-4
    config.optimizer.warmup_steps = 4000
    config.optimizer.epsilon = 1e-8
    config.optimizer.weight_decay = 1e-4
    config.optimizer.clip_norm = 0.0
    config.train.num_steps = 50_000
    config.train.log_every_steps = 100
    config.train.eval_every_steps = 1000
    config.train.checkpoint_every_steps = 1000
    config.train.keep_checkpoints = 10
    return config
