"""MMPretrain's ResNets with layer attention, in its registry."""
from mmpretrain.models.backbones import ResNet, ResNet_CIFAR, ResNetV1c, ResNetV1d, ResNeXt, SEResNet
from mmpretrain.models.backbones.resnet import Bottleneck
from mmpretrain.registry import MODELS

from kcla_mm.layer_attention import KCLA

from .mixin import LayerAttentionMixin

__all__ = ['KCLAResNet', 'KCLAResNetV1c', 'KCLAResNetV1d', 'KCLAResNeXt', 'KCLASEResNet', 'KCLAResNet_CIFAR']


@MODELS.register_module()
class KCLAResNet(LayerAttentionMixin, ResNet):
    """MMPretrain's ResNet with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNetV1c(LayerAttentionMixin, ResNetV1c):
    """MMPretrain's ResNetV1c with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNetV1d(LayerAttentionMixin, ResNetV1d):
    """MMPretrain's ResNetV1d with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNeXt(LayerAttentionMixin, ResNeXt):
    """MMPretrain's ResNeXt with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLASEResNet(LayerAttentionMixin, SEResNet):
    """MMPretrain's SEResNet with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNet_CIFAR(LayerAttentionMixin, ResNet_CIFAR):
    """The narrow ResNets for CIFAR of He et al., arXiv 1512.03385, section 4.2, with bottlenecks and layer attention.

    A 3 x 3 convolution to 16 channels at full resolution, then three stages of n bottlenecks with 64, 128 and 256
    channels: depth 9n + 2. Images of (N, 3, 32, 32) give (N, 256, 8, 8). MMPretrain's ``ResNet_CIFAR`` is another
    network, a wide one of four stages; ``class MyNet(LayerAttentionMixin, ResNet_CIFAR)`` gives that layer attention.

    Args:
        depth (int): 9n + 2, such as 20, 56 or 110.
        stem_channels (int): Channels of the stem. Defaults to 16.
        base_channels (int): A quarter of the channels of the first stage. Defaults to 16.
        strides, dilations, out_indices: As MMPretrain's, of three stages. Default to ``(1, 2, 2)``, ``(1, 1, 1)`` and
            ``(2, )``.
        **kwargs: ``attention`` of `LayerAttentionMixin`, heads of KCLA default to 16 channels, and other arguments
            of MMPretrain's ResNet. ``attention=None`` is the plain network.

    Raises:
        ValueError: If ``depth`` is not 9n + 2, or ``num_stages`` not 3.
    """

    def __init__(self, depth, stem_channels=16, base_channels=16, num_stages=3, strides=(1, 2, 2),
                 dilations=(1, 1, 1), out_indices=(2, ), **kwargs):
        if not isinstance(depth, int) or depth < 11 or (depth - 2) % 9:
            raise ValueError('depth of KCLAResNet_CIFAR must be 9n + 2, for n bottlenecks in each of its three stages, '
                             f'such as 20, 56 or 110, got {depth!r}')
        if num_stages != 3:
            raise ValueError(f'num_stages of KCLAResNet_CIFAR must be 3, got {num_stages!r}')
        self.arch_settings = {depth: (Bottleneck, (depth // 9, ) * 3)}
        super().__init__(depth, stem_channels=stem_channels, base_channels=base_channels, num_stages=num_stages,
                         strides=strides, dilations=dilations, out_indices=out_indices, **kwargs)

    def default_head_channels(self, cls):
        return 16 if issubclass(cls, KCLA) else super().default_head_channels(cls)
