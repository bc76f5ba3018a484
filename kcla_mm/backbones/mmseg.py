"""MMSegmentation's ResNets with layer attention, in its registry."""
from mmcv.cnn import build_conv_layer, build_norm_layer
from mmseg.models.backbones import ResNeSt, ResNet, ResNetV1c, ResNetV1d, ResNeXt
from mmseg.registry import MODELS
from torch import nn

from kcla_mm.layer_attention import KCLA

from .mixin import LayerAttentionMixin

__all__ = ['KCLAResNet', 'KCLAResNetV1c', 'KCLAResNetV1d', 'KCLAResNeXt', 'KCLAResNeSt', 'KCLAResNetUNet']


@MODELS.register_module()
class KCLAResNet(LayerAttentionMixin, ResNet):
    """MMSegmentation's ResNet with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNetV1c(LayerAttentionMixin, ResNetV1c):
    """MMSegmentation's ResNetV1c with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNetV1d(LayerAttentionMixin, ResNetV1d):
    """MMSegmentation's ResNetV1d with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNeXt(LayerAttentionMixin, ResNeXt):
    """MMSegmentation's ResNeXt with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


@MODELS.register_module()
class KCLAResNeSt(LayerAttentionMixin, ResNeSt):
    """MMSegmentation's ResNeSt with layer attention: its arguments, and ``attention`` of `LayerAttentionMixin`."""


class _UNetEncoder(ResNet):
    """Gives the output of the stem beside those of the stages."""

    def _make_stem_layer(self, in_channels, stem_channels):
        self.conv1 = build_conv_layer(self.conv_cfg, in_channels, stem_channels, 7, padding=3, bias=False)
        self.norm1_name, norm = build_norm_layer(self.norm_cfg, stem_channels, postfix=1)
        self.add_module(self.norm1_name, norm)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        features = [self.relu(self.norm1(self.conv1(x)))]
        for name in self.res_layers:
            features.append(getattr(self, name)(features[-1]))
        return tuple(features)


@MODELS.register_module()
class KCLAResNetUNet(LayerAttentionMixin, _UNetEncoder):
    """The light UNet encoder of the KCLA paper, arXiv 2606.28405.

    A 7 x 7 convolution to 16 channels at full resolution, then four stages of two basic blocks with 32, 64, 128 and
    128 channels, each halving the size. An image of (N, 3, H, W) gives five feature maps for a `UNetHead`:
    (N, 16, H, W), (N, 32, H/2, W/2), (N, 64, H/4, W/4), (N, 128, H/8, W/8), (N, 128, H/16, W/16), odd sizes rounded up.

    Args:
        attention (dict, optional): See `LayerAttentionMixin`; heads of KCLA default to 16 channels. None is the plain
            ResNet-UNet that the paper compares with. Defaults to ``dict(type='KCLA')``.
        **kwargs: Arguments of MMSegmentation's ResNet other than those that the above fixes, such as ``in_channels``,
            ``norm_cfg`` or ``init_cfg``.

    Raises:
        TypeError: If an argument is unknown, or one of those that are fixed.
    """

    def __init__(self, attention=dict(type='KCLA'), **kwargs):
        fixed = dict(depth=18, stem_channels=16, base_channels=32, num_stages=4, strides=(2, 2, 2, 2),
                     out_indices=(0, 1, 2, 3), deep_stem=False)
        for name in fixed.keys() & kwargs:
            raise TypeError(f'KCLAResNetUNet always has {name}={fixed[name]}, got {kwargs[name]!r}: leave it out')
        super().__init__(attention=attention, **fixed, **kwargs)
        self.feat_dim = 128

    def make_res_layer(self, **kwargs):
        kwargs['planes'] = min(kwargs['planes'], 128)
        return super().make_res_layer(**kwargs)

    def default_head_channels(self, cls):
        return 16 if issubclass(cls, KCLA) else super().default_head_channels(cls)
