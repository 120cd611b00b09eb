"""A sweep of a task of one's own, in one file, without a change anywhere else."""

import json
import os
import signal
import sys

from sweep_cases import end, finish, rows, start, wait_for

# Is the number of ones among the tokens even? An encoder reads it off its first token.
TASK = '''
"""The parity of a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.configs import base
from headcount.data.batches import batch_spec
from headcount.data.examples import Examples, Ragged
from headcount.models.transformer import Transformer
from headcount.tasks import TASKS
from headcount.tasks.base import LOSS, Metric, Task
from headcount.tasks.heldout_loss import heldout_loss

LENGTH = 6
BITS = Metric("bits", "surprise", "bits per sequence", False, ".3f", margin=0.01)


class Parity(Task):
    metrics = (BITS, LOSS)

    def read(self, split):
        if split not in ("train", "val", "test"):
            raise ValueError(f"There is no split {split}.")
        count = {"train": 64}.get(split, 16)
        rng = np.random.default_rng(sum(map(ord, split)))
        bits = rng.integers(0, 2, (count, LENGTH))
        return {"source": [" ".join(map(str, row)) for row in bits]}

    def load(self, split):
        text = self.read(split)
        ids = [[4 + int(bit) for bit in line.split()] for line in text["source"]]
        return Examples(split, {"source": Ragged.of(ids)}, text)

    def spec(self, rows=None, length=None):
        rows, length = rows or 16, length or LENGTH
        return batch_spec(("source",), rows, {"source": length})

    def build(self, *, rngs):
        return Transformer(6, **self.config.model.to_dict(), rngs=rngs)

    def loss(self, model, batch, label_smoothing=0.0, **options):
        logits = model.logits(model.hidden(batch, **options))[..., 4:6]
        log_probs = jax.nn.log_softmax(logits)
        first = (batch["source_positions"] == 0) & (batch["source_segments"] > 0)
        same = batch["source_segments"][:, :, None] == batch["source_segments"][:, None]
        ones = (same * (batch["source"] == 5)[:, None]).sum(-1)
        picked = jnp.take_along_axis(log_probs, (ones % 2)[..., None], -1)[..., 0]
        return -(picked * first).sum(), first.sum().astype(jnp.float32)

    def evaluate(self, run, examples, trials=None, quick=False, **options):
        loss = heldout_loss(run, self.evaluation_batches(examples))
        trials = range(len(run.trials)) if trials is None else trials
        return [
            {"bits": float(loss[i] / np.log(2)), "loss": float(loss[i])} for i in trials
        ]


TASKS["parity"] = Parity


def get_config():
    config = base.get_config()
    config.task.name = "parity"
    config.data.batch_tokens = 16 * LENGTH
    config.data.max_length = LENGTH
    config.model.width = 16
    config.model.mlp_dim = 16
    config.model.num_encoder_layers = 1
    config.model.num_decoder_layers = 0
    config.train.num_steps = 60
    config.train.log_every_steps = 1
    config.train.eval_every_steps = 20
    config.train.checkpoint_every_steps = 10
    return config


def two(base):
    """One head or two?

    Scientific: model.attention.num_heads.
    Nuisance: optimizer.learning_rate.
    Fixed: the rest.
    """
    for heads in (1, 2):
        yield {"model.attention.num_heads": heads}
'''


def command(verb, *flags):
    return [sys.executable, "sweep.py", verb, *flags]


def test_a_task_of_ones_own_is_swept_killed_resumed_and_reported(tmp_path):
    file, workdir = tmp_path / "parity.py", tmp_path / "sweep"
    file.write_text(TASK)
    whole = (f"--config={file}", f"--ablation={file}:two", "--seeds=3")
    first = start(command("run", *whole, f"--workdir={workdir}"))
    wait_for(lambda: list(workdir.glob("groups/*/metrics.jsonl")), first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()

    alone = f"--workdir={workdir}"
    printed = finish(command("status", alone), code=2)  # nothing in it is executed
    last = printed.strip().splitlines()[-1]
    assert "task.name" in last and "--task_file" in last
    flag = f"--task_file={file}"
    assert "Everything is done" in end(start(command("run", alone, flag)))

    found = rows(workdir)
    assert len(found) == 6 and {row["status"] for row in found} == {"done"}
    assert all(row["test_bits"] is not None and "test_bleu" not in row for row in found)

    finish(command("report", alone, flag))
    markdown = (workdir / "report.md").read_text()
    heading = "### surprise, bits per sequence (lower is better)"
    assert markdown.index("### loss") < markdown.index(heading)
    assert "seeds to see 0.01 bits per sequence of surprise" in markdown
    assert "## Examples" not in markdown and "bootstrap" not in markdown
    settings = json.loads((workdir / "sweep.json").read_text())
    assert "task_file" not in settings
