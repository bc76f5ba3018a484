"""ResNet backbones with layer attention, registered in each framework that is installed."""
from kcla_mm.frameworks import check_needed, import_installed

check_needed()  # before anything imports what may be missing

from .mixin import LayerAttentionMixin  # noqa: E402

__all__ = ['FRAMEWORKS', 'LayerAttentionMixin']

FRAMEWORKS = import_installed(__name__)  # those that have our backbones
