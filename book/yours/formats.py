"""Number formats."""

# ---- chapter 4


def decoded(pattern, exponent, mantissa):
    raise NotImplementedError
