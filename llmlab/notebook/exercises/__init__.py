"""Facts that must hold of the functions that readers build: a module for each file of book/yours, a name per function.

The pages check a reader's function with them, and so do the tests in book/yours.
"""
