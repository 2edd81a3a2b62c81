"""An import before that of a library which imports torchvision."""

from same_work import declare_operators

declare_operators()
