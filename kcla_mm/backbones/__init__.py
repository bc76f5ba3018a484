"""ResNet backbones with layer attention, registered in each framework that is installed."""
from kcla_mm.frameworks import import_installed

from .mixin import LayerAttentionMixin

__all__ = ['LayerAttentionMixin']

import_installed(__name__)
