"""hvdtrain: data-parallel training of PyTorch models on Horovod, with gradients that are proven."""

__version__ = "0.1.0"
