"""Files of Hugging Face checkpoints."""

import contextlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headcount.runtime.workdir import parse_json

ORIGINAL = "huggingface.json"  # in the workdir: the config.json that was imported
GENERATION = "generation_config.json"  # transformers' options of `generate`
TOKENIZER_FILES = {  # file in the workdir's tokenizer/ -> file of the checkpoint
    "marian": {
        "source.model": "source.spm",
        "target.model": "target.spm",
        "vocab.json": "vocab.json",
    },
    "gpt2": {"tokenizer.json": "tokenizer.json"},
    "bert": {"wordpiece.json": "tokenizer.json"},
}


def read_object(path: Path) -> dict:
    """Read a JSON file that must contain an object.

    Raises:
        ValueError, OSError: there is no such file, or it does not contain an object.
    """
    try:
        content = parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}.")
    return content


def read_tensors(folder: Path) -> dict:
    """Read the tensors of a folder's model.safetensors, by name."""
    path = folder / "model.safetensors"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} must hold model.safetensors, and does not; transformers writes "
            f"it by save_pretrained."
        )
    try:
        return load_file(path)
    # NumPy lacks some dtypes, which raises an AttributeError
    except (SafetensorError, AttributeError) as error:
        raise ValueError(f"it can't be read: {error}.") from None


def save_tensors(tensors: dict, folder: Path) -> None:
    """Write tensors to model.safetensors."""
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})  # transformers requires it


@contextlib.contextmanager
def name_file(path: Path):
    """Prefix ValueErrors with the path of the file that caused them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
