"""Weights in and out: Hugging Face Marian, BERT and GPT-2, in a local folder.

python weights.py --from=opus-mt-en-de --workdir=runs/opus
python predict.py --workdir=runs/opus < source.txt
python weights.py --workdir=runs/opus --to=FOLDER

The folder holds config.json and model.safetensors, Marian's also source.spm, target.spm
and vocab.json. In the workdir lies then what a run of train.py leaves; what comes out
again are the same files with the same bits, float32.
"""

import contextlib
import shutil
from functools import partial
from pathlib import Path

from absl import flags

from headcount.configs.commandline import fail, flat, one_sentence, path_of, run
from headcount.runtime import platform
from headcount.runtime.logging import say, show_log
from headcount.runtime.workdir import parsed, write_json

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run: to make, or to read.")
FROM = flags.DEFINE_string("from", None, "Folder of a Hugging Face checkpoint to read.")
TO = flags.DEFINE_string("to", None, "Folder to write a Hugging Face checkpoint to.")
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint", "best", ["best", "last", "average"], "Which parameters go --to."
)

ORIGINAL = "huggingface.json"  # in the workdir: the config.json that came in
TOKENIZER = {  # in the workdir's tokenizer/, and in the folder
    "source.model": "source.spm",
    "target.model": "target.spm",
    "vocab.json": "vocab.json",
}


def main():
    """Check the flags, then read or write."""
    if WORKDIR.value is None or (FROM.value is None) == (TO.value is None):
        fail(
            "--workdir and either --from or --to are needed, as in "
            "python weights.py --from=opus-mt-en-de --workdir=runs/opus"
        )
    platform.setup()
    show_log()
    with one_sentence():
        if FROM.value is not None:
            bring_in(path_of(FROM), path_of(WORKDIR))
        else:
            take_out(path_of(WORKDIR), path_of(TO), CHECKPOINT.value)


def bring_in(folder: Path, workdir: Path) -> None:
    """Make a run of a Hugging Face checkpoint.

    Raises:
        ValueError, OSError: the folder lacks a file, holds what ours can't be, or there
            is a run in the workdir already.
    """
    import jax
    import numpy as np

    from headcount.configs.validation import check_counts
    from headcount.models import huggingface
    from headcount.models.huggingface_config import settings_of
    from headcount.runtime.workdir import environment
    from headcount.training.checkpoint import Checkpoints

    if (workdir / "config.json").exists():
        raise ValueError(f"{workdir} holds a run already; choose another --workdir.")
    original = read_json(folder / "config.json")
    settings = settings_of(original)
    family = original["model_type"]
    with named_file(folder / "model.safetensors"):
        tensors = huggingface.full_names(family, read_tensors(folder))
        tensors, left_out = huggingface.leave_out(family, tensors)
        settings |= huggingface.settings_of(family, tensors)
    with named_file(folder / "config.json"):
        config = config_of(settings)
        check_counts(flat(config.to_dict()))
        abstract = split(config)[1]
    with named_file(folder / "model.safetensors"):
        if family == "marian":
            order = order_of(folder / "vocab.json", original)
            tensors = to_our_order(tensors, order)
        like = huggingface.named(abstract)
        arrays = huggingface.from_huggingface(family, tensors, like)
    params = huggingface.unnamed(arrays, abstract)
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[None], params)  # the trial axis

    workdir.mkdir(parents=True, exist_ok=True)
    if family == "marian":
        (workdir / "tokenizer").mkdir(exist_ok=True)
        for ours, theirs in TOKENIZER.items():
            shutil.copyfile(folder / theirs, workdir / "tokenizer" / ours)
    marks = {"step": np.zeros(1, np.int32)}
    checkpoints = Checkpoints(workdir, 1)
    checkpoints.save(
        0,
        params=params,
        trials=marks | {"diverged_at": marks["step"], "stopped_at": marks["step"]},
        best={"params": params, "score": np.zeros(1), **marks},
    )
    checkpoints.wait()
    checkpoints.close()
    count = sum(array.size for array in arrays.values())
    write_json(workdir / ORIGINAL, original)
    write_json(workdir / "trials.json", [{"seed": config.seed}])
    write_json(workdir / "run.json", {"num_parameters": count, **environment()})
    # a run that train.py must not take for a start that failed
    (workdir / "metrics.jsonl").touch()
    write_json(workdir / "config.json", config.to_dict())
    if left_out:
        say(f"Left out, for our model has no place for it: {', '.join(left_out)}.")
    say(f"{workdir} holds {family} now: {count:,} parameters of {folder}.")


def take_out(workdir: Path, folder: Path, which: str) -> None:
    """Write a run that came from a Hugging Face checkpoint as one again.

    Raises:
        ValueError, OSError: the workdir came from none, or the folder holds one.
    """
    import jax
    from flax import nnx
    from safetensors.numpy import save_file

    from headcount.models import huggingface

    if not (workdir / ORIGINAL).exists():
        raise ValueError(
            f"{workdir} has no {ORIGINAL}: only what weights.py --from made can go out."
        )
    if (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} holds a checkpoint already; choose another --to.")
    original = read_json(workdir / ORIGINAL)
    family = original["model_type"]
    params = nnx.split(load(workdir, which))[1]
    params = jax.device_get(huggingface.named(params))
    tensors = huggingface.to_huggingface(family, params)
    folder.mkdir(parents=True, exist_ok=True)
    if family == "marian":
        order = order_of(workdir / "tokenizer" / "vocab.json", original)
        tensors = to_their_order(tensors, order)
        for ours, theirs in TOKENIZER.items():
            shutil.copyfile(workdir / "tokenizer" / ours, folder / theirs)
    write_json(folder / "config.json", original)
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})  # transformers asks for it
    part.replace(folder / "model.safetensors")
    say(f"{folder} holds {len(tensors)} tensors of {workdir}.")


def load(workdir: Path, which: str = "best"):
    """The model, with its parameters, of a workdir that `bring_in` made."""
    import jax
    import jax.numpy as jnp
    import ml_collections
    from flax import nnx

    from headcount.training.restore import restore

    config = ml_collections.ConfigDict(read_json(workdir / "config.json"))
    graph, abstract = split(config)
    params, *_ = restore(workdir, which, 1, abstract)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), params))


def config_of(settings: dict):
    """The config with these settings."""
    from headcount.configs.base import get_config

    config = get_config()
    config.update_from_flattened_dict(settings)
    return config


def split(config):
    """The graph of a config's model, and its parameters without numbers.

    The vocabulary has `data.vocab_size` pieces.
    """
    from flax import nnx

    from headcount.models.cost import abstract
    from headcount.models.transformer import Transformer

    settings = config.model.to_dict()
    return nnx.split(abstract(partial(Transformer, config.data.vocab_size, **settings)))


def read_json(path: Path) -> dict:
    """The object that a JSON file holds."""
    try:
        found = parsed(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}.")
    return found


def read_tensors(folder: Path) -> dict:
    """The tensors of a folder's model.safetensors, by name."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / "model.safetensors"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} must hold model.safetensors, and does not; transformers writes "
            f"it by save_pretrained."
        )
    try:
        return load_file(path)
    except (SafetensorError, AttributeError) as error:  # NumPy lacks some types
        raise ValueError(f"it can't be read: {error}.") from None


@contextlib.contextmanager
def named_file(path: Path):
    """Let a ValueError name the file that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def order_of(path: Path, original: dict) -> list[int]:
    """Marian's ids in the order of our ids from 1 on, by its vocab.json."""
    from headcount.data.tokenizers import marian_order

    vocabulary = read_json(path)
    order = marian_order(vocabulary)
    for key, piece in (("pad_token_id", "<pad>"), ("eos_token_id", "</s>")):
        if vocabulary[piece] != original.get(key):
            raise ValueError(
                f"{key} must be {vocabulary[piece]}, the number of {piece} in "
                f"vocab.json, got {original.get(key)} in config.json."
            )
    if len(order) != original["vocab_size"]:
        raise ValueError(
            f"vocab.json must hold the {original['vocab_size']} pieces of vocab_size "
            f"in config.json, got {len(order)}."
        )
    return order


TABLE, BIAS = "model.shared.weight", "final_logits_bias"  # what pieces have in Marian
UNLIKELY = -100.0  # logit of our padding, which Marian does not have: e^-100 is nothing


def to_our_order(tensors: dict, order: list[int]) -> dict:
    """Marian's tensors with the rows of the vocabulary in our order, padding first."""
    import numpy as np

    changed = dict(tensors)
    for name, axis, value in ((TABLE, 0, 0.0), (BIAS, 1, UNLIKELY)):
        if name in tensors and tensors[name].shape[axis] == len(order):
            rows = np.take(tensors[name], order, axis)
            padding = np.full_like(np.take(rows, [0], axis), value)
            changed[name] = np.concatenate([padding, rows], axis)
    return changed


def to_their_order(tensors: dict, order: list[int]) -> dict:
    """The inverse of `to_our_order`."""
    import numpy as np

    back = 1 + np.argsort(order)
    changed = {TABLE: np.take(tensors[TABLE], back, 0)}
    changed |= {BIAS: np.take(tensors[BIAS], back, 1)}
    return tensors | changed


if __name__ == "__main__":
    run(main)
