"""Facts that must hold of the functions that readers build: a function in book/yours has its facts under its own name,
in the module of its file. `launch` has those of a chapter whose functions are not kept.

The pages check a reader's function with them, and so do the tests in book/yours.
"""
