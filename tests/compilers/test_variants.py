"""A training step of every variant of heads through the TPU's and GPU's compilers."""

import pytest

from headcount.configs import shakespeare
from headcount.configs.validation import flat
from headcount.configs.variants import VARIANTS
from headcount.tasks import make_task
from headcount.training import dry_run
from headcount.training.trials import hyperparameters

pytestmark = pytest.mark.usefixtures("compile_fast")
TARGETS = "v5e:2x2", "h200:1"
# A compilation takes ten seconds, so variants are compiled together; a model has one
# form of gate. Each variant that is not listed has a model of its own.
TOGETHER = (
    ("gate, elementwise", "exclusive", "knocking", "shared and routed", "sink"),
    ("gate", "differential", "QK norm"),
    ("gate on values", "value residual"),
    ("gate, shared", "knocking, MLP"),
    ("gate, from 1", "talking heads"),
    ("gate, 12 features", "latent"),
    ("gate, no input", "QK clip"),
)
LISTED = {name for names in TOGETHER for name in names}
GROUPS = [*TOGETHER, *((name,) for name in VARIANTS if name not in LISTED)]


def base_of(names):
    """One layer; two where the second looks at the first."""
    config = shakespeare.get_config("short")
    config.model.num_decoder_layers = 2 if "value residual" in names else 1
    config.model.positions, config.data.tokenizer = "rotary", "characters"
    config.data.batch_tokens = 4 * config.data.max_length
    return config


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("names", GROUPS, ids=" + ".join)
def test_a_step_of_every_variant_compiles(names, target):
    """It fits, and where data is divided sends gradients alone."""
    config = base_of(names)
    for name in names:
        config.update_from_flattened_dict(VARIANTS[name].settings(base_of(names)))
    arrays = hyperparameters(flat(config.to_dict()), [{"seed": 0}])
    plan = dry_run.plan(config, make_task(config), arrays, target)
    assert plan.fits and plan.parameters > 0
    assert set(plan.collectives) == (set() if target == "h200:1" else {"all-reduce"})
