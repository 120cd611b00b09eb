"""Export a trained run to another library, with a README.md that says how to load it.

The formats are in `FORMATS`. An imported run is exported to Hugging Face as the files
from which it was imported, with bit-identical float32 tensors.
"""

import importlib.util
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from headcount.data.tokenizers import MarianTokenizer, marian_order, pair_vocab_sizes
from headcount.decoding.search import DEFAULT_VOCABULARY
from headcount.exchange import (
    ctranslate2_format,
    folding,
    huggingface,
    huggingface_export,
    stablehlo,
    tokenizer_json,
    usage_examples,
)
from headcount.exchange.files import (
    GENERATION,
    ORIGINAL,
    TOKENIZER_FILES,
    read_object,
    save_tensors,
)
from headcount.exchange.importing import load_model
from headcount.exchange.marian import (
    to_marian_order,
    vocabulary_order,
    with_marian_ids,
    write_marian_tokenizer,
)
from headcount.exchange.model_card import model_card
from headcount.runtime.files import new_folder
from headcount.runtime.logging import say
from headcount.runtime.workdir import read_json, status_of, write_json
from headcount.tasks import Run
from headcount.training.run import load, read_config


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
    status = status_of(workdir)
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
        use = usage_examples.section(usage, facts)
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
    """Return the values of the placeholders in `usage_examples`."""
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
    is_per_text = task.config.task.name == "classification"
    types = fields["source_types"][0].tolist() if "source_types" in fields else []
    return fields["source"][0].tolist(), [0] if is_per_text else firsts[0], types


def has_pairs(run: Run) -> bool:
    """Return whether the model is an encoder-decoder, from a source to a target."""
    model = run.config.model
    return model.num_encoder_layers > 0 and model.num_decoder_layers > 0


def has_marian_ids(run: Run) -> bool:
    """Return whether a translator has the vocabulary of an imported Marian."""
    return has_pairs(run) and isinstance(run.task.tokenizers[0], MarianTokenizer)


def to_ctranslate2(
    run: Run, trial: int, folder: Path, quantization: str | None = None
) -> str:
    """Write a run for CTranslate2; return its key in `usage_examples.USAGES`."""
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
    """Write a run for transformers; return its key in `usage_examples.USAGES`."""
    family = huggingface_export.family_of(run.config)
    params, _ = parameters_of(run, trial)
    labels = run.task.classes if family == "bert" else None
    settings, generation, tensors = huggingface_export.convert(
        run.config, family, params, labels
    )
    is_imported = has_marian_ids(run)  # imported, then trained further or pruned
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


def to_stablehlo(run: Run, trial: int, folder: Path) -> str:
    """Write a run as StableHLO programs; return its key in `usage_examples.USAGES`."""
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
    for key, actual, value in (
        ("task.name", config.task.name, "masked_language_model"),
        ("data.tokenizer", config.data.tokenizer, "affixes"),
    ):
        if actual == value:
            raise NotImplementedError(
                f"stablehlo has no program for {key}={value}: its programs read token "
                f"ids alone and give tokens or classes."
            )


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy a run's tokenizer files."""
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, folder / "tokenizer")


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
    if (generation_file := workdir / ("original_" + GENERATION)).exists():
        shutil.copyfile(generation_file, folder / GENERATION)
    save_tensors(tensors, folder)
