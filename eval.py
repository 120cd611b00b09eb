"""Score a trained run on a split, or translate text with it.

python eval.py --workdir=runs/multi30k --split=test_2016_flickr --beam_size=5
python eval.py --workdir=runs/multi30k --translate < source.txt > translations.txt
"""

import contextlib
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from configs.commandline import fail, flat, one_sentence, run
from training import cluster, platform
from training.metrics import say, show_log
from training.workdir import read_json, write_json

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of train.py.")
SPLIT = flags.DEFINE_string(
    "split", None, "Split to score: val, test, ...; or several: val,test"
)
TRANSLATE = flags.DEFINE_bool(
    "translate", False, "Translate standard input, a sentence a line."
)
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint",
    "best",
    ["best", "last", "average"],
    "Parameters of the best evaluation by train.best_metric, of the last checkpoint, "
    "or the mean of the checkpoints kept (train.keep_checkpoints).",
)
BEAM_SIZE = flags.DEFINE_integer("beam_size", 5, "Hypotheses; 1: greedy.", 1, 2**16)
LENGTH_PENALTY = flags.DEFINE_float(
    "length_penalty", 0.6, "Alpha of ((5 + n) / 6)^alpha, Wu et al. 2016.", 0.0, 10.0
)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Above 0: sample instead of beam search.", 0.0
)
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k likeliest; 0: all.", 0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample within this probability.", 0.0, 1.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the samples.", 0, 2**31 - 1)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 128, "Hypotheses at a time, beam_size a sentence.", 1, 2**31
)
DIRECTORY = flags.DEFINE_string(
    "directory", None, "Folder of local data files; default: the run's."
)
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "File to write the translations to; SPLIT in it stands for the split's name.",
)
SHOW = flags.DEFINE_integer("show", 0, "Translations of the split to print.", 0)
PLOT = flags.DEFINE_string(
    "plot", None, "PNG file: the cross-attention of the split's first sentence."
)
HEADS = flags.DEFINE_bool("heads", False, "Also tell what each head sees and adds.")
TRIAL = flags.DEFINE_integer("trial", 0, "Trial to translate, plot or tell of.", 0)


class Trained(NamedTuple):
    """A run that can translate."""

    config: Any
    graph: Any  # nnx.GraphDef
    params: Any  # nnx.State, leaves with the trial axis R
    trials: list[dict]  # what each differs in
    head_gates: dict  # of every trial, R L N, where one has other gates than 1
    step: list[int]  # of every trial's parameters
    diverged_at: list[int | None]
    tokenizers: tuple

    def of(self, trial: int) -> tuple:
        """The parameters and the head gates of a trial."""
        import jax

        return jax.tree.map(lambda leaf: leaf[trial], (self.params, self.head_gates))


def main():
    """Check the flags, then score or translate."""
    if WORKDIR.value is None or (SPLIT.value is None) != TRANSLATE.value:
        fail(
            "--workdir and either --split or --translate are needed, as in python "
            "eval.py --workdir=runs/numbers --split=test"
        )
    if cluster.COORDINATOR.value and (TRANSLATE.value or PLOT.value or HEADS.value):
        fail("--translate, --plot and --heads take one process, not a --coordinator.")
    if TRANSLATE.value and HEADS.value:
        fail("--heads needs the references of a --split, and --translate has none.")
    platform.setup()
    show_log()
    from training import hosts

    with contextlib.ExitStack() as stack:
        stack.enter_context(hosts.at_once())
        with one_sentence(), hosts.given_up():
            options = decoding_options()
            named = [] if SPLIT.value is None else splits()
            check_files(named)
            cluster.connect()
            trained = load(Path(WORKDIR.value), CHECKPOINT.value)
            trial_of(trained)  # or it would be refused after all was decoded
            if TRANSLATE.value:
                translate_lines(trained, options)
                return
            with hosts.together():
                pairs = {split: read_split(trained, split) for split in named}
            for split in named:
                evaluate(Path(WORKDIR.value), trained, split, *pairs[split], options)


def splits() -> list[str]:
    """The splits that --split names.

    Raises:
        ValueError: one has no name, or there are several, and --output names one file
            for all.
    """
    found = SPLIT.value.split(",")
    if "" in found:
        raise ValueError(
            f"--split={SPLIT.value} must name splits with commas between them, as in "
            f"--split=val,test"
        )
    if len(found) > 1 and OUTPUT.value is not None and "SPLIT" not in OUTPUT.value:
        raise ValueError(
            f"--output={OUTPUT.value} would hold the last of {len(found)} splits; "
            f"write SPLIT where a split's name is to stand, as in --output=SPLIT.txt"
        )
    return found


def decoding_options() -> dict:
    """The flags that say how to decode, as `models.decoding.translate` takes them.

    Raises:
        ValueError: one is not finite, or there are some of sampling without a
            temperature, or of beam search with one.
    """
    for flag in (LENGTH_PENALTY, TEMPERATURE, TOP_P):
        if not math.isfinite(flag.value):
            raise ValueError(f"--{flag.name} must be finite, got {flag.value}.")
    if TEMPERATURE.value == 0 and (TOP_K.value or TOP_P.value < 1):
        raise ValueError(
            "--top_k and --top_p say what to sample from, and nothing is sampled at "
            "--temperature=0; set it too, as in --temperature=1"
        )
    if TEMPERATURE.value > 0:
        for flag in (BEAM_SIZE, LENGTH_PENALTY):
            if flag.present:
                raise ValueError(
                    f"--{flag.name} is of beam search, and --temperature="
                    f"{TEMPERATURE.value:g} samples instead; leave one of them out."
                )
        return {
            "temperature": TEMPERATURE.value,
            "top_k": TOP_K.value,
            "top_p": TOP_P.value,
            "seed": SEED.value,
        }
    return {"beam_size": BEAM_SIZE.value, "length_penalty": LENGTH_PENALTY.value}


def check_files(named: list[str]) -> None:
    """Raise a ValueError where --output or --plot can't be written, before decoding."""
    outputs = [output_path(split) for split in named if OUTPUT.value is not None]
    plots = [] if PLOT.value is None else [Path(PLOT.value)]
    for flag, path in [(OUTPUT, o) for o in outputs] + [(PLOT, p) for p in plots]:
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(
                f"--{flag.name}={flag.value} must be a file in a folder that is there."
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--{flag.name}={flag.value}: {path} can't be written.")
    if PLOT.value is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        from models.checks import choose

        formats = [f".{name}" for name in FigureCanvasBase.filetypes]
        choose("The suffix of --plot", Path(PLOT.value).suffix.lower(), formats)


def load(workdir: Path, which: str) -> Trained:
    """The model of a run with its best, last or averaged parameters.

    Raises:
        ValueError, OSError: no run there, no checkpoint yet, or a damaged one.
    """
    from functools import partial

    import jax
    import ml_collections
    from flax import nnx

    from data import tokenizer
    from models.checks import check_encoder_decoder
    from models.counting import abstract
    from models.transformer import Transformer
    from training import sharding
    from training.restore import restore
    from training.trials import head_gates

    path = workdir / "config.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{workdir} holds no run (there is no config.json in it); "
            f"train one with {shlex.join(['train.py', f'--workdir={workdir}'])}"
        )
    config = ml_collections.ConfigDict(read_json(path))
    check_encoder_decoder(config.model.to_dict())
    tokenizers = tokenizer.load(workdir / "tokenizer")
    sizes = tokenizer.vocab_sizes(tokenizers)
    build = partial(Transformer, *sizes, **config.model.to_dict())
    graph, like = nnx.split(abstract(build))
    trials = read_json(workdir / "trials.json")
    params, steps, diverged_at = restore(workdir, which, len(trials), like)
    every = {"trial": None, "data": -1, "model": 1}
    mesh = sharding.make_mesh(every, len(trials), jax.device_count())
    jax.set_mesh(mesh)
    where = sharding.named(mesh, "trial")
    return Trained(
        config,
        graph,
        jax.tree.map(lambda leaf: sharding.put(leaf, where), params),
        trials,
        head_gates(flat(config.to_dict()), trials),
        [int(step) for step in steps],
        [int(step) or None for step in diverged_at],
        tokenizers,
    )


def read_split(trained: Trained, split: str) -> tuple:
    """The pairs of a split, and its references as published, None where there are none.

    Raises:
        ValueError, OSError: there is no such split, or it can't be read.
    """
    from data import corpora

    data = trained.config.data
    directory = DIRECTORY.value or data.directory
    pairs = corpora.load(data.name, data.source, data.target, split, directory)
    if data.name != "multi30k":
        return *pairs, None
    tokenized = corpora.tokenized_references(data.name, data.target, split, directory)
    return *pairs, tokenized


def evaluate(
    workdir: Path, trained: Trained, split: str, sources, references, tokenized, options
) -> None:
    """Score every trial, print a table, and write result-SPLIT.json."""
    from analysis.evaluation import losses, sentences, translations
    from analysis.scores import published_scores, scores
    from analysis.table import print_scores
    from training import hosts

    data = trained.config.data
    source, target = trained.tokenizers
    encoded = source.encode(sources)
    model = trained.graph, trained.params, trained.head_gates
    loss = losses(*model, encoded, target.encode(references), data.batch_tokens)
    found = translations(
        *model,
        sentences(encoded),
        range(len(trained.step)),
        batch_size=BATCH_SIZE.value,
        **options,
    )
    if not hosts.is_first():
        return
    rows = []
    for trial, step in enumerate(trained.step):
        hypotheses = target.decode_many(found[trial])
        row = {"trial": trial, **trained.trials[trial], "split": split}
        row |= {"checkpoint": CHECKPOINT.value, "step": step}
        row |= {"diverged_at": trained.diverged_at[trial]}
        row |= {"loss": float(loss[trial])} | scores(hypotheses, references)
        if tokenized is not None:
            row |= published_scores(hypotheses, tokenized, data.target)
        row |= {"decoding": options, "sentences": len(sources)}
        rows.append(row)
        if trial == trial_of(trained):
            chosen = hypotheses
        write_output(hypotheses, split, trial, len(trained.step))
    path = workdir / f"result-{split}.json"
    write_json(path, rows)
    print_scores(rows, list(trained.trials[0]), path)
    show(sources, references, chosen)
    if PLOT.value:
        plot(trained, sources[0], found[trial_of(trained)][0])
    if HEADS.value:
        tell_heads(trained, split, encoded, target.encode(references), workdir)


def output_path(split: str) -> Path:
    """The file that --output names for a split."""
    path = Path(OUTPUT.value)
    return path.with_name(path.name.replace("SPLIT", split))


def write_output(
    hypotheses: list[str], split: str, trial: int, num_trials: int
) -> None:
    """Write the translations to --output; of many trials each to a file of its own."""
    if OUTPUT.value is None:
        return
    path = output_path(split)
    if num_trials > 1:
        path = path.with_name(f"{path.stem}-{trial}{path.suffix}")
    path.write_text("".join(line + "\n" for line in hypotheses))


def translate_lines(trained: Trained, options: dict) -> None:
    """Translate standard input line by line, in batches of what is there already."""
    from analysis.evaluation import sentences
    from data.lines import lines_at_hand
    from models.decoding import translate

    params, gates = trained.of(trial_of(trained))
    source, target = trained.tokenizers
    longest, number = trained.config.data.max_length, 0
    for lines in lines_at_hand(sys.stdin.fileno(), BATCH_SIZE.value):
        encoded = sentences(source.encode(lines))
        for index, ids in enumerate(encoded):
            if len(ids) > longest:
                say(
                    f"Line {number + index + 1} has {len(ids)} tokens, more than the "
                    f"{longest} of the longest in training: expect little of it."
                )
        # a line of nothing but eos stays empty, so that line numbers agree
        full = [index for index, ids in enumerate(encoded) if len(ids) > 1]
        chosen = [encoded[index] for index in full]
        options["batch_size"] = BATCH_SIZE.value
        options["sample_numbers"] = [number + index for index in full]
        out, _ = translate(trained.graph, params, chosen, head_gates=gates, **options)
        number += len(lines)
        translations = dict(zip(full, target.decode_many(out), strict=True))
        for index in range(len(lines)):
            print(translations.get(index, ""))
        sys.stdout.flush()


def trial_of(trained: Trained) -> int:
    """The trial that --trial names."""
    if not 0 <= TRIAL.value < len(trained.step):
        raise ValueError(
            f"--trial must be below {len(trained.step)}, the number of trials in the "
            f"run, got {TRIAL.value}."
        )
    return TRIAL.value


def show(sources, references, hypotheses) -> None:
    """Print the first translations beside their sources and references."""
    for index in range(min(SHOW.value, len(sources))):
        print(f"\nsource       {sources[index]}")
        print(f"reference    {references[index]}")
        print(f"translation  {hypotheses[index]}")


def plot(trained: Trained, source: str, translation: list[int]) -> None:
    """Save the cross-attention of a sentence and its translation, every head's."""
    from analysis.plots import cross_attention, plot_cross_attention
    from data.tokenizer import EOS

    params, gates = trained.of(trial_of(trained))
    ids = trained.tokenizers[0].encode([source])[0].tolist()
    translation = [*translation, EOS]
    maps = cross_attention(trained.graph, params, gates, ids, translation)
    pieces = [
        trained.tokenizers[side].pieces(tokens)
        for side, tokens in enumerate((ids, translation))
    ]
    plot_cross_attention(maps, *pieces, Path(PLOT.value))
    print(f"\nThe cross-attention of the first sentence: {PLOT.value}")


def tell_heads(trained: Trained, split: str, source, target, workdir: Path) -> None:
    """Write heads-SPLIT.json, a row a head, and print it."""
    from analysis.heads import measure
    from analysis.table import print_heads

    model = trained.graph, *trained.of(trial_of(trained))
    found = measure(*model, source, target, trained.config.data.batch_tokens)
    rows = [{"trial": TRIAL.value} | row for row in found]
    path = workdir / f"heads-{split}.json"
    write_json(path, rows)
    print_heads(rows, split, path)


if __name__ == "__main__":
    run(main)
