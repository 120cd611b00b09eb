"""Export a trained run to other libraries, and import Hugging Face weights.

    python weights.py --workdir=runs/numbers --to=ctranslate2:FOLDER
    python weights.py --workdir=runs/numbers --to=huggingface:FOLDER
    python weights.py --workdir=runs/numbers --to=stablehlo:FOLDER

    python weights.py --from=opus-mt-en-de --workdir=runs/opus
    python predict.py --workdir=runs/opus < source.txt
    python weights.py --workdir=runs/numbers --prune=runs/pruned --heads=cross.0.2

An export has a README.md that describes the model and how to load it. An import reads a
local folder of Marian, BERT or GPT-2 with config.json and model.safetensors and, for
Marian, source.spm, target.spm and vocab.json. The resulting workdir is like that of
train.py. Exporting an imported run to huggingface writes the same files, with
bit-identical float32 tensors. --prune writes a smaller run without some heads. Its
outputs equal those of the run in which the gates of these heads are 0.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import contextlib
import importlib.util
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
from tokenizers import Tokenizer

from headcount.analysis import export_usage
from headcount.analysis.model_card import model_card
from headcount.analysis.removal import write_smaller
from headcount.configs.base import get_config
from headcount.configs.commandline import (
    TASK_FILE,
    WORKDIR,
    fail,
    one_sentence,
    path_of,
    run,
)
from headcount.configs.run import load_config
from headcount.configs.validation import check_values, flat
from headcount.data import tokenizer_json
from headcount.data.encoder_tokenizers import WordPieceTokenizer, wordpiece_of
from headcount.data.tokenizers import (
    ByteLevelBPE,
    MarianTokenizer,
    marian_order,
    pair_vocab_sizes,
)
from headcount.decoding import stablehlo
from headcount.decoding.search import DEFAULT_VOCABULARY
from headcount.models import (
    ctranslate2_format,
    folding,
    huggingface,
    huggingface_export,
)
from headcount.models.cost import abstract
from headcount.models.huggingface_config import settings_of
from headcount.models.transformer import Transformer
from headcount.runtime.files import new_folder
from headcount.runtime.logging import say, show_log
from headcount.runtime.workdir import parse_json, read_json, write_json
from headcount.tasks import Run, import_file, make_task
from headcount.tasks.classes import CLASSES
from headcount.training.restore import restore_parameters
from headcount.training.run import (
    CHECKPOINT,
    choose_trial,
    load,
    read_config,
    write_finished,
)

FROM = flags.DEFINE_string("from", None, "Folder of a Hugging Face checkpoint to read.")
TO = flags.DEFINE_string(
    "to",
    None,
    "FORMAT:FOLDER to export to; the formats are ctranslate2, ctranslate2_int8, "
    "huggingface, stablehlo.",
)
TRIAL = flags.DEFINE_integer(
    "trial", 0, "Which trial to export (needed if there are several) or prune.", 0
)
PRUNE = flags.DEFINE_string(
    "prune", None, "Folder for the smaller run, without the removed heads."
)
HEADS = flags.DEFINE_list(
    "heads",
    [],
    "--prune: heads to remove, as SITE.LAYER.HEAD, besides those with a gate of 0.",
)

ORIGINAL = "huggingface.json"  # in the workdir: the config.json that was imported
GENERATION = "generation_config.json"  # transformers' options of `generate`
JSON_TOKENIZERS = {"gpt2": ByteLevelBPE, "bert": WordPieceTokenizer}
TOKENIZER_FILES = {  # file in the workdir's tokenizer/ -> file of the checkpoint
    "marian": {
        "source.model": "source.spm",
        "target.model": "target.spm",
        "vocab.json": "vocab.json",
    },
    "gpt2": {"tokenizer.json": "tokenizer.json"},
    "bert": {"wordpiece.json": "tokenizer.json"},
}


def main():
    """Check the flags, then import, export or prune."""
    given = [flag.value is not None for flag in (FROM, TO, PRUNE)]
    if WORKDIR.value is None or sum(given) != 1:
        fail(
            "--workdir and one of --from, --to and --prune are needed, as in "
            "python weights.py --from=opus-mt-en-de --workdir=runs/opus"
        )
    show_log()
    with one_sentence():
        check_flags()
        if TASK_FILE.value is not None:
            import_file(path_of(TASK_FILE))
        if PRUNE.value is not None:
            prune(path_of(WORKDIR), path_of(PRUNE), CHECKPOINT.value)
        elif FROM.value is not None:
            import_checkpoint(path_of(FROM), path_of(WORKDIR))
        else:
            kind, folder = parse_target(TO.value)
            which = CHECKPOINT.value if CHECKPOINT.present else None
            trial = TRIAL.value if TRIAL.present else None
            export(path_of(WORKDIR), kind, folder, which, trial)


def check_flags() -> None:
    """Raise a ValueError for a flag that would be ignored."""
    for flag, is_used, which in (
        (HEADS, PRUNE.value is not None, "--prune"),
        (TRIAL, FROM.value is None, "--to and --prune"),
        (CHECKPOINT, FROM.value is None, "--to and --prune"),
    ):
        if flag.present and not is_used:
            raise ValueError(f"--{flag.name} has no meaning here; it is for {which}.")


def prune(workdir: Path, folder: Path, which: str) -> None:
    """Write a trial of a run without its removed heads as a new run.

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
        like = huggingface.named(params)
        arrays = huggingface.from_huggingface(family, tensors, like)
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
        about = folder / "tokenizer_config.json"
        lowercase = read_object(about).get("do_lower_case") if about.exists() else None
        content = wordpiece_of(folder / "vocab.txt", lowercase is not False)
        to.mkdir(exist_ok=True)
        (to / "wordpiece.json").write_text(content)


def parse_target(text: str) -> tuple[str, Path]:
    """Parse FORMAT:FOLDER; return the format and the folder."""
    kind, colon, folder = text.partition(":")
    if not colon or not folder or kind not in FORMATS:
        raise ValueError(
            f"--to must be FORMAT:FOLDER with a format of {', '.join(FORMATS)}, got "
            f"{text!r}."
        )
    return kind, Path(folder).expanduser()


def export(
    workdir: Path,
    kind: str,
    folder: Path,
    which: str | None = None,
    trial: int | None = None,
) -> None:
    """Write a trial of a run in another library's format, with a model card.

    Args:
        workdir: the run's folder.
        kind: a name in `FORMATS`.
        folder: folder to create; it may exist if it is empty.
        which: "best", "last" or "average"; None: "best", which requires a finished run.
        trial: index of the trial; None requires a run with a single trial.

    Raises:
        ValueError, OSError, NotImplementedError: the format does not support a setting
            (the message names it), the folder is not empty, or the run does not have
            this trial or checkpoint. In these cases nothing is written.
    """
    config = read_config(workdir)
    status = read_json(workdir / "run.json")["status"]
    if status != "finished" and which is None:
        raise ValueError(
            f"{workdir} is not finished (its status is {status}); add "
            f"--checkpoint=last to export it as it is."
        )
    count = len(read_json(workdir / "trials.json"))
    if trial is None and count > 1:
        raise ValueError(
            f"{workdir} has {count} trials; choose one with --trial, from 0 to "
            f"{count - 1}."
        )
    trial = trial or 0
    if trial >= count:
        raise ValueError(f"--trial must be below {count}, got {trial}.")
    with new_folder(folder) as part:
        if kind == "huggingface" and (workdir / ORIGINAL).exists():
            export_imported(workdir, part, which or "best")
            usage, facts = "imported", {}
        else:
            run = load(workdir, which or "best")
            usage = FORMATS[kind](run, trial, part)
            facts = facts_of(run)
        use = export_usage.section(usage, facts)
        card = model_card(workdir, config, trial, which or "best", use)
        (part / "README.md").write_text(card)
    say(f"Exported {workdir} to {folder} ({kind}); see {folder / 'README.md'}.")


def parameters_of(run: Run, trial: int, folded: bool = True) -> tuple[dict, dict]:
    """Return a trial's parameters by path, in float32, and its head gates.

    Args:
        run: a run from `training.run.load`.
        trial: index of the trial.
        folded: whether to fold merge rules and gates into the output kernels; see
            `folding`.
    """
    params, gates = jax.device_get(run.of(trial))
    params = {
        name: np.asarray(leaf, np.float32)
        for name, leaf in huggingface.named(params).items()
    }
    gates = {site: np.asarray(gate) for site, gate in gates.items()}
    if folded:
        params = folding.plain_heads(run.config, params, gates)
    return params, gates


def facts_of(run: Run) -> dict:
    """Return the values of the placeholders in `analysis.export_usage`."""
    task, bos = run.task, run.config.model.bos
    vocabulary = getattr(task, "vocabulary", DEFAULT_VOCABULARY)
    joint = (task.folder / "joint.model").exists()
    try:
        (text, *_) = next(iter(task.read("val").values()))
    except (ValueError, OSError, NotImplementedError):  # the data isn't available here
        text = "a text"
    text = text.replace("\\", "").replace('"', "")  # it stands in Python code
    room = run.config.model.max_positions
    size = min(60, room // 4)
    parts = [" ".join(part.split())[:size] for part in text.split("\t")[:2]]
    facts = {
        "example": " ".join(parts),
        "new_tokens": min(50, room // 2),
        "source": "joint" if joint else "source",
        "target": "joint" if joint else "target",
        "bos": bos,
        "eos": vocabulary.eos,
        "banned": list(vocabulary.banned),
        "separator": "",
        "cache": "",
        "prefix": "",
    }
    if has_pairs(run):
        prefix = run.config.data.prefix
        facts["prefix"] = f"{prefix!r} + " if prefix else ""
    else:
        (facts["separator"],) = task.tokenizer.pieces([bos])
    if run.config.model.num_decoder_layers:
        facts["cache"] = cache_shapes(run)
    else:
        special = task.special
        facts |= {"bos": special.bos, "eos": special.eos, "unk": special.unk}
        facts["ids"], facts["places"], types = class_tokens(task, "\t".join(parts))
        uses_types = run.config.model.token_types > 0
        facts["types"] = f", np.array([{types}], np.int32)" if uses_types else ""
    return facts


def cache_shapes(run: Run) -> str:
    """Return, as Python code in B and L, the shapes of each decoder layer's cache."""
    model = nnx.merge(run.graph, run.of(0)[0])
    B, L = 1_000_001, 1_000_002  # sizes that no model has
    cache = jax.eval_shape(
        lambda slots: stablehlo.empty_cache(lambda _: model, None, slots),
        jax.ShapeDtypeStruct((B, L), jnp.int32),
    )
    code = str([[array.shape for array in layer] for layer in cache])
    return code.replace(str(B), "B").replace(str(L), "L")


def class_tokens(task, text: str) -> tuple[list[int], list[int], list[int]]:
    """Return a text's token ids, positions of tokens with a class, and token types."""
    parts = task.parts_of_text(text)
    fields, firsts = task.encode_parts("input", [parts])
    whole = task.config.task.name == "classification"
    types = fields["source_types"][0].tolist() if "source_types" in fields else []
    return fields["source"][0].tolist(), [0] if whole else firsts[0], types


def has_pairs(run: Run) -> bool:
    """Return whether the model is an encoder-decoder, from a source to a target."""
    model = run.config.model
    return model.num_encoder_layers > 0 and model.num_decoder_layers > 0


def to_ctranslate2(
    run: Run, trial: int, folder: Path, quantization: str | None = None
) -> str:
    """Write a run for CTranslate2; return its key in `export_usage.USAGES`."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise NotImplementedError(
            "--to=ctranslate2 needs the package ctranslate2; install it with pip "
            "install -r requirements-peers.txt."
        )
    ctranslate2_format.check(run.config)
    params, _ = parameters_of(run, trial)
    copy_tokenizer(run.task.folder, folder)
    if has_pairs(run):
        pair = run.task.tokenizers
        sides = pair[::-1][: len(pair_vocab_sizes(pair))]  # target first
        vocabularies = [side.pieces(range(side.vocab_size)) for side in sides]
    else:
        tokenizer = run.task.tokenizer
        text = tokenizer_json.tokenizer_json(tokenizer)
        (folder / "tokenizer.json").write_text(text)
        # prompts consist of the library's names of tokens, not of decoded pieces
        names = Tokenizer.from_str(text).id_to_token
        vocabularies = [list(map(names, range(tokenizer.vocab_size)))]
    ctranslate2_format.write(run.config, params, vocabularies, folder, quantization)
    return "ctranslate2_pairs" if has_pairs(run) else "ctranslate2_texts"


def to_huggingface(run: Run, trial: int, folder: Path) -> str:
    """Write a run for transformers; return its key in `export_usage.USAGES`."""
    family = huggingface_export.family_of(run.config)
    params, _ = parameters_of(run, trial)
    labels = run.task.classes if family == "bert" else None
    settings, generation, tensors = huggingface_export.convert(
        run.config, family, params, labels
    )
    is_imported = has_marian_ids(run)  # and trained further, or pruned
    if is_imported:
        ids = run.task.tokenizers[0].vocabulary
        tensors = to_marian_order(tensors, marian_order(ids))
        settings, generation = with_marian_ids(ids, settings, generation)
    bos = run.config.model.bos
    if family == "bert":  # imported vocabularies have these tokens elsewhere
        bos = run.task.tokenizer.bos
        settings |= {"bos_token_id": bos, "eos_token_id": run.task.tokenizer.eos}
    write_json(folder / "config.json", settings)
    if generation is not None:
        write_json(folder / GENERATION, generation)
    save_tensors(tensors, folder)
    if is_imported:
        for ours, theirs in TOKENIZER_FILES["marian"].items():
            shutil.copyfile(run.task.folder / ours, folder / theirs)
        return "marian"
    if family == "marian":
        write_marian_tokenizer(run.task, folder)
        return "marian"
    tokenizer = run.task.tokenizer
    (folder / "tokenizer.json").write_text(tokenizer_json.tokenizer_json(tokenizer))
    (separator,) = tokenizer.pieces([bos])
    settings = tokenizer_json.configuration(separator, family != "bert")
    (folder / "tokenizer_config.json").write_text(settings)
    return "bert" if family == "bert" else "causal"


def has_marian_ids(run: Run) -> bool:
    """Return whether a translator has the vocabulary of an imported Marian."""
    return has_pairs(run) and isinstance(run.task.tokenizers[0], MarianTokenizer)


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
    for each in (settings, generation):
        each.pop("bos_token_id", None)
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


def to_stablehlo(run: Run, trial: int, folder: Path) -> str:
    """Write a run as StableHLO programs; return its key in `export_usage.USAGES`."""
    check_stablehlo(run.config)
    if has_marian_ids(run):
        raise NotImplementedError(
            "stablehlo has no tokenizer for a model that was imported from Marian; "
            "export it with --to=huggingface:FOLDER."
        )
    params, gates = parameters_of(run, trial, folded=False)
    pooling = getattr(run.task, "pooling", None)
    programs, params = stablehlo.programs(run.config, params, gates, pooling)
    for name, content in programs.items():
        (folder / f"{name}.stablehlo").write_bytes(content)
    save_tensors(params, folder)
    copy_tokenizer(run.task.folder, folder)
    if not run.config.model.num_decoder_layers:
        return "stablehlo_classes"
    if has_pairs(run):
        return "stablehlo_pairs"
    text = tokenizer_json.tokenizer_json(run.task.tokenizer)
    (folder / "tokenizer.json").write_text(text)
    return "stablehlo_texts"


def check_stablehlo(config) -> None:
    """Raise a NotImplementedError unless a model maps tokens to tokens or classes."""
    for key, own, value in (
        ("task.name", config.task.name, "masked_language_model"),
        ("data.tokenizer", config.data.tokenizer, "affixes"),
    ):
        if own == value:
            raise NotImplementedError(
                f"stablehlo has no program for {key}={value}: its programs read token "
                f"ids alone and give tokens or classes."
            )


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy a run's tokenizer files."""
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, folder / "tokenizer")


def save_tensors(tensors: dict, folder: Path) -> None:
    """Write tensors to model.safetensors."""
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})  # transformers requires it


FORMATS = {
    "ctranslate2": to_ctranslate2,
    "ctranslate2_int8": partial(to_ctranslate2, quantization="int8"),
    "huggingface": to_huggingface,
    "stablehlo": to_stablehlo,
}


def export_imported(workdir: Path, folder: Path, which: str) -> None:
    """Write an imported run as the files from which it was imported.

    Raises:
        ValueError, OSError: a file of the run is missing or damaged.
    """
    original = read_object(workdir / ORIGINAL)
    family = original["model_type"]
    params = nnx.split(load_model(workdir, which))[1]
    params = jax.device_get(huggingface.named(params))
    tensors = huggingface.to_huggingface(family, params)
    if family == "marian":
        order = vocabulary_order(workdir / "tokenizer" / "vocab.json", original)
        tensors = to_marian_order(tensors, order)
    for ours, theirs in TOKENIZER_FILES[family].items():
        if (workdir / "tokenizer" / ours).exists():
            shutil.copyfile(workdir / "tokenizer" / ours, folder / theirs)
    write_json(folder / "config.json", original)
    if (kept := workdir / ("original_" + GENERATION)).exists():
        shutil.copyfile(kept, folder / GENERATION)
    save_tensors(tensors, folder)


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


def read_object(path: Path) -> dict:
    """Read a JSON file that must contain an object.

    Raises:
        ValueError, OSError: there is no such file, or it does not contain an object.
    """
    try:
        found = parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}.")
    return found


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


@contextlib.contextmanager
def name_file(path: Path):
    """Prefix ValueErrors with the path of the file that caused them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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


EMBEDDING, BIAS = "model.shared.weight", "final_logits_bias"  # have a vocabulary axis
UNLIKELY = -100.0  # logit bias of our padding, which Marian lacks: e^-100 is negligible


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


def cli():
    """Run as a script."""
    run(main)


if __name__ == "__main__":
    cli()
