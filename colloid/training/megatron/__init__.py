"""The trainer on Megatron-Core, unpatched from PyPI.

Importing this package on a machine without CUDA installs `cpu/` first: megatron.core reads `torch.cuda` while it is
being imported. Where CUDA is present nothing is installed.
"""

from colloid.training.megatron import cpu

cpu.install()
