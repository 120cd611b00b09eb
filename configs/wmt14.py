"""WMT14 English to German with Transformer-base or -big (Vaswani et al. 2017).

    python train.py --config=configs/wmt14.py --workdir=runs/wmt14
    python eval.py --workdir=runs/wmt14 --split=test --checkpoint=average \\
      --beam_size=4 --length_penalty=0.6

`:big` is the big model. The data come from TFDS (wmt14_translate/de-en, 4.5 million
pairs), which needs a network. The published scores are 27.3 and 28.4 BLEU (tokenised,
with split compounds, which is about 0.5 to 1 above sacreBLEU). Neither model has been
trained here. To estimate what a step needs on chips that are not available:

    python train.py --config=configs/wmt14.py --dry_run=v5e:16x16 --config.seeds=16

Differences from the paper: a batch has 32,768 tokens per side, which mesh.data divides
well, rather than about 25,000; the vocabulary is a SentencePiece model of plain text;
pairs with more than 128 tokens are dropped; and the length limit of a translation is
twice its source plus 16 tokens, rather than 50 more than the source.
"""

from headcount.configs import base


def get_config(model: str = "base"):
    """Return the recipes of the paper's section 5; rows pack several sentences."""
    if model not in ("base", "big"):
        raise ValueError(f"configs/wmt14.py has :base and :big, not :{model}")
    config = base.get_config()
    config.data.name = "wmt14_translate/de-en"
    config.data.vocab_size = 37_000
    config.data.batch_tokens = 32_768  # about 25,000 per side in the paper
    config.model.width = 512
    config.model.num_encoder_layers = 6
    config.model.num_decoder_layers = 6
    config.model.mlp_dim = 2048
    config.model.attention.num_heads = 8
    config.model.dropout = 0.1
    config.optimizer.schedule = "noam"
    config.optimizer.learning_rate = 1.0
    config.optimizer.warmup_steps = 4000
    config.optimizer.clip_norm = 0.0
    config.train.num_steps = 100_000
    config.train.log_every_steps = 100
    config.train.eval_every_steps = 5000
    config.train.checkpoint_every_steps = 1500  # ten minutes apart in the paper
    config.train.keep_checkpoints = 5
    if model == "big":
        config.model.width = 1024
        config.model.mlp_dim = 4096
        config.model.attention.num_heads = 16
        config.model.dropout = 0.3
        config.train.num_steps = 300_000
        config.train.checkpoint_every_steps = 600  # ten minutes at 1 s per step
        config.train.keep_checkpoints = 20
    return config
