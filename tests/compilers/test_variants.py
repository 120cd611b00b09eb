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
TOGETHER = "gate, elementwise", "exclusive", "knocking", "shared and routed", "sink"


def base_of(name):
    """One layer; two where the second looks at the first."""
    config = shakespeare.get_config("short")
    config.model.num_decoder_layers = 2 if name == "value residual" else 1
    config.model.positions, config.data.tokenizer = "rotary", "characters"
    config.data.batch_tokens = 4 * config.data.max_length
    return config


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["together", *VARIANTS])
def test_a_step_of_every_variant_compiles(name, target):
    """It fits, and where data is divided sends gradients alone.

    "together" is all of `TOGETHER` in one model.
    """
    config = base_of(name)
    for one in TOGETHER if name == "together" else (name,):
        config.update_from_flattened_dict(VARIANTS[one].settings(base_of(name)))
    arrays = hyperparameters(flat(config.to_dict()), [{"seed": 0}])
    plan = dry_run.plan(config, make_task(config), arrays, target)
    assert plan.fits and plan.parameters > 0
    assert set(plan.collectives) == (set() if target == "h200:1" else {"all-reduce"})
