"""The TPU kernels, interpreted: every feature, against the reference."""

import pytest
from attention_cases import KERNEL_FEATURES, check, everything, expected, make

UNSUPPORTED = ("bias of B N T S", "bias of N T S", "bias of B T")


@pytest.mark.parametrize("feature", KERNEL_FEATURES)
def test_values_gradients_and_statistics(feature):
    def found():
        return everything("tpu_interpret", *make(feature))

    if feature in UNSUPPORTED:
        with pytest.raises(NotImplementedError, match="bias"):
            found()
    else:
        check(found(), expected(feature))
