"""The configs that are called a recipe of the literature have its numbers."""

import pytest

from headcount.configs import gpt2, iwslt14, modern, multi30k, shakespeare, wmt14
from headcount.configs.validation import flat

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
# nanoGPT, train.py, model.py, config/train_shakespeare_char.py and train_gpt2.py
NANOGPT = {"optimizer.schedule": "cosine", "optimizer.weight_decay": 0.1}
NANOGPT |= {"optimizer.beta1": 0.9, "optimizer.clip_norm": 1.0}
NANOGPT |= {"optimizer.final_share": 0.1, "optimizer.label_smoothing": 0.0}
NANOGPT |= {"optimizer.epsilon": 1e-8, "model.norm": "pre", "model.norm_epsilon": 1e-5}
NANOGPT |= {"model.positions": "learned", "model.tie_embeddings": True}
CHARACTERS = NANOGPT | {"optimizer.learning_rate": 1e-3, "optimizer.beta2": 0.99}
CHARACTERS |= {"optimizer.warmup_steps": 100, "model.activation": "gelu"}
CHARACTERS |= {"model.use_bias": False, "model.attention.use_bias": False}
FULL = {"model.num_decoder_layers": 6, "model.attention.num_heads": 6}
FULL |= {"model.width": 384, "model.mlp_dim": 1536, "model.dropout": 0.2}
FULL |= {"model.attention.dropout": 0.2}
FULL |= {"data.max_length": 256, "data.batch_tokens": 64 * 256, "train.num_steps": 5000}
SHORT = {"model.num_decoder_layers": 4, "model.attention.num_heads": 4}
SHORT |= {"model.width": 128, "model.mlp_dim": 512, "model.dropout": 0.0}
SHORT |= {"data.max_length": 64, "data.batch_tokens": 12 * 64, "train.num_steps": 2000}
GPT2 = NANOGPT | {"optimizer.beta2": 0.95, "optimizer.warmup_steps": 2000}
GPT2 |= {"data.max_length": 1024, "train.num_steps": 600_000, "model.dropout": 0.0}


@pytest.mark.parametrize(
    "config, published",
    [
        (wmt14.get_config(), VASWANI | BASE | {"model.dropout": 0.1}),
        (wmt14.get_config("big"), VASWANI | BIG | {"model.dropout": 0.3}),
        (iwslt14.get_config(), IWSLT14),
        (multi30k.get_config(), TINY),
        (shakespeare.get_config(), CHARACTERS | FULL),
        (shakespeare.get_config("short"), CHARACTERS | SHORT),
        (gpt2.get_config("small"), GPT2 | {"optimizer.learning_rate": 6e-4}),
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


@pytest.mark.parametrize("recipe", ["full", "short"])
def test_the_modern_block_has_the_feed_forward_parameters_of_gpt2s(recipe):
    """And differs from Shakespeare's in the block alone."""
    ours, plain = (
        flat(module.get_config(recipe).to_dict()) for module in (modern, shakespeare)
    )
    changed = {key for key in ours if ours[key] != plain[key]}
    assert all(key.startswith("model.") for key in changed)
    F = ours["model.mlp_dim"], plain["model.mlp_dim"]
    assert 3 * F[0] == pytest.approx(2 * F[1], rel=0.01)
