"""MMDetection's ResNets with layer attention, in its registry."""
from functools import reduce
from math import gcd

from mmdet.models.backbones import RegNet, Res2Net, ResNeSt, ResNet, ResNetV1d, ResNeXt
from mmdet.models.backbones.resnext import Bottleneck
from mmdet.registry import MODELS

from .mixin import LayerAttentionMixin

__all__ = ['KCLAResNet', 'KCLAResNetV1d', 'KCLAResNeXt', 'KCLARes2Net', 'KCLAResNeSt', 'KCLARegNet']


@MODELS.register_module()
class KCLAResNet(LayerAttentionMixin, ResNet):
    """MMDetection's ResNet with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNetV1d(LayerAttentionMixin, ResNetV1d):
    """MMDetection's ResNetV1d with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNeXt(LayerAttentionMixin, ResNeXt):
    """MMDetection's ResNeXt with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLARes2Net(LayerAttentionMixin, Res2Net):
    """MMDetection's Res2Net with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNeSt(LayerAttentionMixin, ResNeSt):
    """MMDetection's ResNeSt with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLARegNet(LayerAttentionMixin, RegNet):
    """MMDetection's RegNet with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`.

    Few RegNets have stages of multiples of 64 channels: ``head_channels`` of the attention defaults to the largest
    width, up to its usual one, that divides them all, such as 48 for ``regnetx_3.2gf`` with KCLA.
    """

    def __init__(self, *args, **kwargs):
        expansion = Bottleneck.expansion
        try:
            super().__init__(*args, **kwargs)
        finally:
            Bottleneck.expansion = expansion  # RegNet changes the class while it builds, and leaves it so on an error

    def default_head_channels(self, cls):
        common = reduce(gcd, self.stage_widths)
        return max(d for d in range(1, super().default_head_channels(cls) + 1) if common % d == 0)
