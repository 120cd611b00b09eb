"""Import and export weights: Hugging Face Marian, BERT and GPT-2, in a local folder.

python weights.py --from=opus-mt-en-de --workdir=runs/opus
python predict.py --workdir=runs/opus < source.txt
python weights.py --workdir=runs/opus --to=FOLDER
python weights.py --workdir=runs/numbers --prune=runs/pruned --heads=cross.0.2

The folder holds config.json and model.safetensors, and for Marian source.spm,
target.spm and vocab.json. The workdir is then like one of train.py. Exporting an
imported run writes the same files with the same bits, float32. `--prune` writes a run
without some heads, smaller, whose outputs equal those of the gated one.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import contextlib
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headcount.analysis.removal import write_smaller
from headcount.configs.base import get_config
from headcount.configs.commandline import (
    WORKDIR,
    fail,
    flat,
    one_sentence,
    path_of,
    run,
)
from headcount.configs.run import load_config
from headcount.configs.validation import check_values
from headcount.data.tokenizers import marian_order
from headcount.models import huggingface
from headcount.models.cost import abstract
from headcount.models.huggingface_config import settings_of
from headcount.models.transformer import Transformer
from headcount.runtime.logging import say, show_log
from headcount.runtime.workdir import (
    environment,
    parse_json,
    record,
    set_status,
    write_json,
)
from headcount.training.checkpoint import Checkpoints
from headcount.training.restore import restore_parameters
from headcount.training.run import CHECKPOINT, choose_trial, load

FROM = flags.DEFINE_string("from", None, "Folder of a Hugging Face checkpoint to read.")
TO = flags.DEFINE_string("to", None, "Folder to write a Hugging Face checkpoint to.")
PRUNE = flags.DEFINE_string(
    "prune", None, "Folder to write the run without its removed heads to."
)
HEADS = flags.DEFINE_list(
    "heads",
    [],
    "prune: heads to remove besides those whose gate is 0: SITE.LAYER.HEAD.",
)
TRIAL = flags.DEFINE_integer("trial", 0, "prune: the trial to write.", 0)
for flag in (WORKDIR, CHECKPOINT):
    flags.declare_key_flag(flag.name)  # so that --help lists it

ORIGINAL = "huggingface.json"  # in the workdir: the config.json that was imported
TOKENIZER_FILES = {  # in the workdir's tokenizer/, and in the checkpoint's folder
    "marian": {
        "source.model": "source.spm",
        "target.model": "target.spm",
        "vocab.json": "vocab.json",
    },
    "gpt2": {"tokenizer.json": "tokenizer.json"},
    "bert": {},
}
REQUIRED_FILES = ("source.spm", "target.spm", "vocab.json")


def main():
    """Check the flags, then import or export."""
    given = [flag.value is not None for flag in (FROM, TO, PRUNE)]
    if WORKDIR.value is None or sum(given) != 1:
        fail(
            "--workdir and one of --from, --to and --prune are needed, as in "
            "python weights.py --from=opus-mt-en-de --workdir=runs/opus"
        )
    show_log()
    with one_sentence():
        if PRUNE.value is not None:
            prune(path_of(WORKDIR), path_of(PRUNE), CHECKPOINT.value)
        elif FROM.value is not None:
            import_checkpoint(path_of(FROM), path_of(WORKDIR))
        else:
            export_checkpoint(path_of(WORKDIR), path_of(TO), CHECKPOINT.value)


def prune(workdir: Path, folder: Path, which: str) -> None:
    """Write a trial of a run without its removed heads, as a run of its own.

    Raises:
        ValueError, OSError: see `analysis.removal.write_smaller`.
    """
    found = load(workdir, which)
    trial, heads = choose_trial(found, TRIAL), []
    for name in HEADS.value:
        parts = name.split(".")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
            raise ValueError(
                f"--heads must be SITE.LAYER.HEAD, as in cross.0.2, got {name!r}."
            )
        heads.append((parts[0], int(parts[1]), int(parts[2])))
    sizes = write_smaller(found, workdir, folder, trial, heads)
    say(
        f"Wrote {sizes['parameters']:,} of {sizes['before']:,} parameters of trial "
        f"{trial} to {folder}."
    )


def import_checkpoint(folder: Path, workdir: Path) -> None:
    """Make a run of a Hugging Face checkpoint.

    Raises:
        ValueError, OSError: the folder lacks a file or holds a model that ours can't
            be, or the workdir holds a run already.
    """
    if (workdir / "config.json").exists():
        raise ValueError(f"{workdir} holds a run already; choose another --workdir.")
    original = read_object(folder / "config.json")
    settings = settings_of(original)
    family = original["model_type"]
    with name_file(folder / "model.safetensors"):
        tensors = huggingface.full_names(family, read_tensors(folder))
        tensors, left_out = huggingface.leave_out(family, tensors)
        settings |= huggingface.settings_of(family, tensors)
    with name_file(folder / "config.json"):
        config = config_of(settings)
        check_values(flat(config.to_dict()))
        params = split(config)[1]
    with name_file(folder / "model.safetensors"):
        if family == "marian":
            order = vocabulary_order(folder / "vocab.json", original)
            tensors = to_our_order(tensors, order)
        like = huggingface.named(params)
        arrays = huggingface.from_huggingface(family, tensors, like)
    params = huggingface.unnamed(arrays, params)
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[None], params)  # the trial axis

    workdir.mkdir(parents=True, exist_ok=True)
    for ours, theirs in TOKENIZER_FILES[family].items():
        if theirs in REQUIRED_FILES or (folder / theirs).exists():
            (workdir / "tokenizer").mkdir(exist_ok=True)
            shutil.copyfile(folder / theirs, workdir / "tokenizer" / ours)
    zero = np.zeros(1, np.int32)
    checkpoints = Checkpoints(workdir, 1)
    checkpoints.save(
        0,
        params=params,
        trials={"step": zero, "diverged_at": zero, "stopped_at": zero},
        best={"params": params, "score": np.zeros(1), "step": zero},
    )
    checkpoints.wait()
    checkpoints.close()
    count = sum(array.size for array in arrays.values())
    write_json(workdir / ORIGINAL, original)
    facts = {"num_parameters": count, **environment()}
    record(workdir, config.to_dict(), [{"seed": config.seed}], facts)
    set_status(workdir, "finished")
    # train.py takes a workdir without metrics for a start that failed
    (workdir / "metrics.jsonl").touch()
    if left_out:
        say(f"Left out, because our model has no such part: {', '.join(left_out)}.")
    say(f"Imported {count:,} parameters of {folder} ({family}) into {workdir}.")


def export_checkpoint(workdir: Path, folder: Path, which: str) -> None:
    """Write an imported run as a Hugging Face checkpoint.

    Raises:
        ValueError, OSError: the run was not imported, or the folder holds a checkpoint.
    """
    if not (workdir / ORIGINAL).exists():
        raise ValueError(
            f"{workdir} has no {ORIGINAL}: only runs that weights.py --from has made "
            f"can be exported."
        )
    if (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} holds a checkpoint already; choose another --to.")
    original = read_object(workdir / ORIGINAL)
    family = original["model_type"]
    params = nnx.split(load_model(workdir, which))[1]
    params = jax.device_get(huggingface.named(params))
    tensors = huggingface.to_huggingface(family, params)
    folder.mkdir(parents=True, exist_ok=True)
    if family == "marian":
        order = vocabulary_order(workdir / "tokenizer" / "vocab.json", original)
        tensors = to_marian_order(tensors, order)
    for ours, theirs in TOKENIZER_FILES[family].items():
        if (workdir / "tokenizer" / ours).exists():
            shutil.copyfile(workdir / "tokenizer" / ours, folder / theirs)
    write_json(folder / "config.json", original)
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})  # transformers requires it
    part.replace(folder / "model.safetensors")
    say(f"Exported {len(tensors)} tensors of {workdir} to {folder}.")


def load_model(workdir: Path, which: str = "best") -> Transformer:
    """Return the model of an imported run, with its parameters."""
    graph, params = split(load_config(workdir / "config.json"))
    params, *_ = restore_parameters(workdir, which, 1, params)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), params))


def config_of(settings: dict):
    """Return the config with these settings."""
    config = get_config()
    config.update_from_flattened_dict(settings)
    return config


def split(config):
    """Return the graph of a config's model, and its parameters as shapes.

    The vocabulary has `data.vocab_size` tokens.
    """
    settings = config.model.to_dict()
    return nnx.split(abstract(partial(Transformer, config.data.vocab_size, **settings)))


def read_object(path: Path) -> dict:
    """Return the object of a JSON file; ValueError or OSError if it has none."""
    try:
        found = parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}.")
    return found


def read_tensors(folder: Path) -> dict:
    """Return the tensors of a folder's model.safetensors, by name."""
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
def name_file(path: Path):
    """Prefix a ValueError with the file that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def vocabulary_order(path: Path, original: dict) -> list[int]:
    """Return Marian's ids in the order of our ids from 1 on, by its vocab.json."""
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


EMBEDDING, BIAS = "model.shared.weight", "final_logits_bias"  # with a vocabulary axis
UNLIKELY = -100.0  # logit of our padding, which Marian does not have: e^-100 is nothing


def to_our_order(tensors: dict, order: list[int]) -> dict:
    """Return Marian's tensors with the vocabulary in our order, padding first."""
    changed = dict(tensors)
    for name, axis, value in ((EMBEDDING, 0, 0.0), (BIAS, 1, UNLIKELY)):
        if name in tensors and tensors[name].shape[axis] == len(order):
            rows = np.take(tensors[name], order, axis)
            padding = np.full_like(np.take(rows, [0], axis), value)
            changed[name] = np.concatenate([padding, rows], axis)
    return changed


def to_marian_order(tensors: dict, order: list[int]) -> dict:
    """Invert `to_our_order`."""
    back = 1 + np.argsort(order)
    changed = {EMBEDDING: np.take(tensors[EMBEDDING], back, 0)}
    changed |= {BIAS: np.take(tensors[BIAS], back, 1)}
    return tensors | changed


def cli():
    """Run as a script."""
    run(main)


if __name__ == "__main__":
    cli()
