"""Convert between Marian's token ids and ours, which put special tokens first."""

from pathlib import Path

import numpy as np

from headcount.data.tokenizers import marian_order
from headcount.exchange.files import read_object
from headcount.runtime.workdir import write_json

EMBEDDING, BIAS = "model.shared.weight", "final_logits_bias"  # have a vocabulary axis
UNLIKELY = -100.0  # logit bias of our padding, which Marian lacks: e^-100 is negligible


def vocabulary_order(path: Path, original: dict) -> list[int]:
    """Return Marian's ids in the order of ours, from our id 1 on (0 is padding).

    Raises:
        ValueError, OSError: vocab.json is missing or does not match config.json.
    """
    vocabulary = read_object(path)
    order = marian_order(vocabulary)
    for key, token in (("pad_token_id", "<pad>"), ("eos_token_id", "</s>")):
        if vocabulary[token] != original.get(key):
            raise ValueError(
                f"{key} must be {vocabulary[token]}, the id of {token} in vocab.json, "
                f"got {original.get(key)} in config.json."
            )
    if len(order) != original["vocab_size"]:
        raise ValueError(
            f"vocab.json must hold vocab_size = {original['vocab_size']} tokens by "
            f"config.json, got {len(order)}."
        )
    return order


def to_our_order(tensors: dict, order: list[int]) -> dict:
    """Reorder the vocabulary axes of Marian's tensors to our ids; add our padding."""
    changed = dict(tensors)
    for name, axis, value in ((EMBEDDING, 0, 0.0), (BIAS, 1, UNLIKELY)):
        if name in tensors and tensors[name].shape[axis] == len(order):
            rows = np.take(tensors[name], order, axis)
            padding = np.full_like(np.take(rows, [0], axis), value)
            changed[name] = np.concatenate([padding, rows], axis)
    return changed


def to_marian_order(tensors: dict, order: list[int]) -> dict:
    """Undo `to_our_order`."""
    back = 1 + np.argsort(order)
    changed = {EMBEDDING: np.take(tensors[EMBEDDING], back, 0)}
    changed |= {BIAS: np.take(tensors[BIAS], back, 1)}
    return tensors | changed


def with_marian_ids(ids: dict[str, int], settings: dict, generation: dict):
    """Replace our special tokens' ids in config.json and generation_config.json.

    Args:
        ids: Marian's ids by token; it has no BOS.
    """
    pad = ids["<pad>"]
    special = {"pad_token_id": pad, "eos_token_id": ids["</s>"]}
    special["decoder_start_token_id"] = pad
    sizes = {"vocab_size": len(ids), "decoder_vocab_size": len(ids)}
    settings = settings | sizes | special
    generation = generation | special | {"suppress_tokens": [pad]}
    for config in (settings, generation):
        config.pop("bos_token_id", None)
    return settings, generation


def write_marian_tokenizer(task, folder: Path) -> None:
    """Write a joint SentencePiece model as Marian's three files with the same ids."""
    tokenizer = task.tokenizers[0]
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(tokenizer.vocabulary)
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    write_json(folder / "vocab.json", {piece: i for i, piece in enumerate(pieces)})
    data = task.config.data
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": data.source,
        "target_lang": data.target,
        "model_max_length": data.max_length,
    }
    write_json(folder / "tokenizer_config.json", settings)
