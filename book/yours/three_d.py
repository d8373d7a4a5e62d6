"""Your mesh of ranks: where a rank is, which ranks form a group, and over which of them a gradient is averaged."""

# ---- chapter 16


def place_of(rank, sizes):
    """Return the coordinate of `rank` along each axis, as a dict.

    `sizes` are the degrees of the axes, with the innermost first.
    place_of(5, {"tp": 2, "dp": 2, "pp": 2}) is {"tp": 1, "dp": 0, "pp": 1}.
    """
    raise NotImplementedError


def groups_over(sizes, axes):
    """Return the groups of ranks that differ only along `axes`, as a list of lists.

    `sizes` are the degrees of all axes, with the innermost first.
    groups_over({"tp": 2, "dp": 2}, ["dp"]) is [[0, 2], [1, 3]].
    """
    raise NotImplementedError


def average_over_mesh(parameters, sizes, sequence_parallel, all_reduce):
    """Make each gradient that of the mean loss over all tokens of the batch.

    `parameters` are pairs (parameter, split). If `split`, each tensor-parallel rank has a
    different part of the parameter, and otherwise all have the same one. The loss of a rank
    is the mean over the tokens of its dp and cp coordinates. `sizes` are the degrees.
    all_reduce(tensor, axes) sums a tensor, in place, over the ranks that differ only along
    `axes`. Call it at most once per gradient.
    """
    raise NotImplementedError
