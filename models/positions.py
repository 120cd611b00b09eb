"""Where a token stands: what is added to its embedding."""

import numpy as np
from jaxtyping import Float


def sinusoidal(num_positions: int, width: int) -> Float[np.ndarray, "P D"]:
    """Sines in the first half of the width, cosines in the second, as Tensor2Tensor.

    Wavelengths run geometrically from 2π to 10000·2π (Vaswani et al. 2017, 3.5).
    """
    half = width // 2
    rates = 10_000.0 ** -(np.arange(half) / max(half - 1, 1))
    angles = np.arange(num_positions)[:, None] * rates
    table = np.zeros((num_positions, width), np.float32)
    table[:, :half] = np.sin(angles)
    table[:, half : 2 * half] = np.cos(angles)
    return table


POSITIONS = {"sinusoidal": sinusoidal}
