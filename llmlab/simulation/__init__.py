"""The GPU memory of a PyTorch step, computed on a machine without a GPU: the real code, on fake tensors.

`lab.simulate` calls simulation/report.py; `lab.simulator` is simulation/simulator.py.
"""

import os

FOLDER = os.path.dirname(__file__)  # frames of files in it are ours, not the user's
