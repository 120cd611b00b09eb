"""The kernels of TPU and GPU, interpreted: every feature, against the reference."""

import pytest
from attention_cases import FEATURES, check, everything, expected, make

REFUSED = ("bias of B N T S", "bias of N T S", "bias of B T")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_values_gradients_and_statistics(kind, feature):
    def found():
        return everything(f"pallas_{kind}_interpret", *make(feature))

    if feature in REFUSED:
        with pytest.raises(NotImplementedError, match="bias"):
            found()
    else:
        check(found(), expected(feature))
