"""The configs that are called a recipe of the literature have its numbers."""

import pytest

from headcount.configs import iwslt14, multi30k, wmt14
from headcount.configs.commandline import flat

ADAM = {"optimizer.beta1": 0.9, "optimizer.beta2": 0.98}
SMOOTHED = {"optimizer.label_smoothing": 0.1}
# Vaswani et al. 2017, sections 5 and 6.1, and table 3
VASWANI = ADAM | SMOOTHED
VASWANI |= {"data.vocab_size": 37_000, "model.norm": "post", "model.activation": "relu"}
VASWANI |= {"model.num_encoder_layers": 6, "model.num_decoder_layers": 6}
VASWANI |= {"optimizer.schedule": "noam", "optimizer.learning_rate": 1.0}
VASWANI |= {"optimizer.warmup_steps": 4000, "optimizer.epsilon": 1e-9}
VASWANI |= {"optimizer.clip_norm": 0.0, "optimizer.weight_decay": 0.0}
BASE = {"model.width": 512, "model.mlp_dim": 2048, "model.attention.num_heads": 8}
BIG = {"model.width": 1024, "model.mlp_dim": 4096, "model.attention.num_heads": 16}
# fairseq, examples/translation/README.md and transformer_iwslt_de_en
IWSLT14 = ADAM | SMOOTHED
IWSLT14 |= {"model.width": 512, "model.mlp_dim": 1024, "model.attention.num_heads": 4}
IWSLT14 |= {"model.num_encoder_layers": 6, "model.num_decoder_layers": 6}
IWSLT14 |= {"optimizer.schedule": "inverse_sqrt", "optimizer.learning_rate": 5e-4}
IWSLT14 |= {"optimizer.warmup_steps": 4000, "optimizer.weight_decay": 1e-4}
IWSLT14 |= {"optimizer.clip_norm": 0.0, "optimizer.epsilon": 1e-8}
IWSLT14 |= {"model.dropout": 0.3}
# Wu et al. 2021, LividWo/Revisit-MMT, README-baseline.md
TINY = ADAM | SMOOTHED
TINY |= {"model.width": 128, "model.mlp_dim": 256, "model.attention.num_heads": 4}
TINY |= {"model.num_encoder_layers": 4, "model.num_decoder_layers": 4}
TINY |= {"optimizer.schedule": "inverse_sqrt", "optimizer.learning_rate": 0.005}
TINY |= {"optimizer.warmup_steps": 2000, "optimizer.weight_decay": 0.0}
TINY |= {"model.dropout": 0.3, "data.vocab_size": 10_000, "data.batch_tokens": 8192}
TINY |= {"train.num_steps": 8000, "train.keep_checkpoints": 10}


@pytest.mark.parametrize(
    "config, published",
    [
        (wmt14.get_config(), VASWANI | BASE | {"model.dropout": 0.1}),
        (wmt14.get_config("big"), VASWANI | BIG | {"model.dropout": 0.3}),
        (iwslt14.get_config(), IWSLT14),
        (multi30k.get_config(), TINY),
    ],
)
def test_a_recipe_has_the_numbers_that_are_published(config, published):
    ours = flat(config.to_dict())
    assert {key: ours[key] for key in published} == published


@pytest.mark.parametrize(
    "name, steps, seconds, kept", [("base", 100_000, 0.4, 5), ("big", 300_000, 1.0, 20)]
)
def test_checkpoints_are_ten_minutes_apart_as_the_paper_averaged_them(
    name, steps, seconds, kept
):
    train = wmt14.get_config(name).train
    assert (train.num_steps, train.keep_checkpoints) == (steps, kept)
    assert train.checkpoint_every_steps * seconds == pytest.approx(600)
