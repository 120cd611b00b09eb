"""What a program that JAX has traced is made of."""

from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """Every equation, those of inner programs too, but for those inside kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)


def shapes(jaxpr):
    """The shape of every value."""
    for equation in equations(jaxpr):
        yield from (value.aval.shape for value in equation.outvars)
