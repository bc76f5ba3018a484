"""ResNet backbones with Key-Correlated Layer Attention for MMDetection, MMSegmentation and MMPretrain.

Importing this package registers its backbones in each framework that is installed, which
``custom_imports = dict(imports=['kcla_mm'])`` does from a config. Without any OpenMMLab package there still is
`kcla_mm.layer_attention`, in plain PyTorch.
"""
from importlib.util import find_spec

from .version import __version__

__all__ = ['__version__']

if find_spec('mmengine'):
    from . import analysis, backbones
    from .configs import config_path, register_configs

    __all__ += ['analysis', 'backbones', 'config_path']
    register_configs()
    if 'mmseg' in backbones.FRAMEWORKS:
        from . import segmentation

        __all__ += ['segmentation']
