"""Import a local folder of Marian, BERT or GPT-2 as a run.

It has config.json and model.safetensors and, for Marian, source.spm, target.spm and
vocab.json. The resulting workdir is like that of train.py.
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from headcount.configs.base import get_config
from headcount.configs.run import load_config
from headcount.configs.validation import check_values, flat
from headcount.data.encoder_tokenizers import WordPieceTokenizer, wordpiece_of
from headcount.data.tokenizers import ByteLevelBPE
from headcount.exchange import huggingface
from headcount.exchange.files import (
    GENERATION,
    ORIGINAL,
    TOKENIZER_FILES,
    name_file,
    read_object,
    read_tensors,
)
from headcount.exchange.huggingface_config import settings_of
from headcount.exchange.marian import to_our_order, vocabulary_order
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer
from headcount.runtime.files import new_folder
from headcount.runtime.logging import say
from headcount.runtime.workdir import write_json
from headcount.tasks import make_task
from headcount.tasks.classes import CLASSES
from headcount.training.restore import restore_parameters
from headcount.training.run import write_finished

JSON_TOKENIZERS = {"gpt2": ByteLevelBPE, "bert": WordPieceTokenizer}


def import_checkpoint(folder: Path, workdir: Path) -> None:
    """Import a Hugging Face checkpoint as a run.

    Raises:
        ValueError, OSError: the folder lacks a file, its model is not supported, or the
            workdir already holds a run.
    """
    if not folder.is_dir():
        raise ValueError(
            f"--from={folder} is not a folder; download the model first, as in hf "
            f"download openai-community/gpt2 --local-dir gpt2"
        )
    if (workdir / "config.json").exists():
        raise ValueError(f"{workdir} holds a run already; choose another --workdir.")
    original = read_object(folder / "config.json")
    settings = settings_of(original)
    family = original["model_type"]
    with name_file(folder / "model.safetensors"):
        tensors = huggingface.full_names(family, read_tensors(folder))
        tensors, left_out = huggingface.leave_out(family, tensors)
        named = original.get("architectures") or ()
        is_tagger = "BertForTokenClassification" in named
        settings |= huggingface.settings_of(family, tensors, is_tagger)
    with name_file(folder / "config.json"):
        config = config_of(settings)
        check_values(flat(config.to_dict()))
        params = split(config)[1]
    with name_file(folder / "model.safetensors"):
        if family == "marian":
            order = vocabulary_order(folder / "vocab.json", original)
            tensors = to_our_order(tensors, order)
        expected = huggingface.named(params)
        arrays = huggingface.from_huggingface(family, tensors, expected)
    params = huggingface.unnamed(arrays, params)

    if family in JSON_TOKENIZERS and (folder / "tokenizer.json").exists():
        check_tokenizer(family, folder / "tokenizer.json", config.data.vocab_size)

    with new_folder(workdir) as part:
        for ours, theirs in TOKENIZER_FILES[family].items():
            if family == "marian" or (folder / theirs).exists():
                (part / "tokenizer").mkdir(exist_ok=True)
                shutil.copyfile(folder / theirs, part / "tokenizer" / ours)
        if family == "bert":
            write_bert_files(folder, part / "tokenizer", config, original)
        if (folder / GENERATION).exists():
            shutil.copyfile(folder / GENERATION, part / ("original_" + GENERATION))
        write_json(part / ORIGINAL, original)
        settings = {"seed": config.seed}
        count = write_finished(part, config.to_dict(), settings, params)
    if left_out:
        say(f"Left out, because our model has no such part: {', '.join(left_out)}.")
    say(f"Imported {count:,} parameters of {folder} ({family}) into {workdir}.")


def check_tokenizer(family: str, path: Path, rows: int) -> None:
    """Raise a ValueError unless a tokenizer has a token for each embedding."""
    count = JSON_TOKENIZERS[family](path).vocab_size
    if count != rows:
        raise ValueError(
            f"{path} has {count} tokens, but the embedding has {rows} rows. If "
            f"the other rows are padding, remove them: in transformers, "
            f"model.resize_token_embeddings({count})."
        )


def write_bert_files(folder: Path, to: Path, config, original: dict) -> None:
    """Write the classes of a fine-tuned BERT, and convert a vocab.txt to a tokenizer.

    The vocab.txt is converted only if there is no tokenizer.json.

    Raises:
        ValueError, OSError: config.json does not name each class.
    """
    if config.task.name in ("tagging", "classification"):
        names = original.get("id2label")
        numbers = range(config.data.num_classes)
        names = names or {str(i): f"LABEL_{i}" for i in numbers}
        if sorted(names) != sorted(map(str, numbers)):
            raise ValueError(
                f"{folder / 'config.json'}: id2label must name the {len(numbers)} "
                f"classes of the weights, got {', '.join(map(str, names))}."
            )
        to.mkdir(exist_ok=True)
        write_json(to / CLASSES, [names[str(i)] for i in numbers])
    if (folder / "vocab.txt").exists() and not (folder / "tokenizer.json").exists():
        tokenizer_config = folder / "tokenizer_config.json"
        lowercase = (
            read_object(tokenizer_config).get("do_lower_case")
            if tokenizer_config.exists()
            else None
        )
        content = wordpiece_of(folder / "vocab.txt", lowercase is not False)
        to.mkdir(exist_ok=True)
        (to / "wordpiece.json").write_text(content)


def load_model(workdir: Path, which: str = "best") -> Transformer:
    """Load the model of an imported run, with its parameters."""
    graph, params = split(load_config(workdir / "config.json"))
    params, *_ = restore_parameters(workdir, which, 1, params)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), params))


def config_of(settings: dict):
    """Return the base config, updated with flattened settings."""
    config = get_config()
    config.update_from_flattened_dict(settings)
    return config


def split(config):
    """Return the graph and the abstract parameters of a config's model.

    The vocabulary has `data.vocab_size` tokens.
    """
    return nnx.split(abstract(make_task(config).build))
