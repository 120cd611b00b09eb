"""Import this before JAX, in scripts: it sets what JAX reads when it is imported."""

from headcount.runtime import platform

platform.check_environment()
platform.setup()
