"""MRLA-L, the light multi-head recurrent layer attention, arXiv 2302.03985."""
import torch
import torch.nn.functional as F
from torch import nn

from .base import BaseLayerAttention, channel_conv_weight, conv_weight, pool


class MRLALight(BaseLayerAttention):
    """Light multi-head recurrent layer attention (MRLA-L) of one residual block.

    What the layers before have to say is taken to be in the block's shortcut already, so no state is carried:

    .. code-block:: none

        Q, K = conv1d_q(GAP(x)), conv1d_k(GAP(x))          split into heads of d channels
        y = x + DropPath(BN(sigmoid(Q.K / sqrt d) depthwise3x3(x) + lambda shortcut))

    with a learnable lambda for each channel, drawn from N(0, 1).

    Args:
        head_channels (int): Channels d of a head; ``channels`` must be a multiple of it. Defaults to 32.
        channels, block, previous_channels, stride, drop_path, init_scale, with_cp, norm_layer: See
            `BaseLayerAttention`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from kcla_mm.layer_attention import MRLALight
        >>> x, shortcut = torch.rand(2, 64, 16, 16), torch.rand(2, 64, 16, 16)
        >>> y, _ = MRLALight(64)(x, shortcut=shortcut)
    """

    needs_shortcut = True

    def __init__(self, channels, block=0, previous_channels=None, stride=1, *, head_channels=32, drop_path=0.2,
                 init_scale=1e-3, with_cp=False, norm_layer=nn.BatchNorm2d):
        super().__init__(channels, block, previous_channels, stride, head_channels=head_channels,
                         drop_path=drop_path, init_scale=init_scale, with_cp=with_cp, norm_layer=norm_layer)
        self.query = channel_conv_weight(channels)
        self.key = channel_conv_weight(channels)
        self.value = conv_weight(channels, 1, 3)
        self.shortcut_weight = nn.Parameter(torch.randn(channels, 1, 1))  # lambda

    def attend(self, x, state, shortcut):
        query, key = self.query_key(pool(x))
        gate = torch.sigmoid((query * key).sum(2) / self.head_channels**0.5)
        value = F.conv2d(x, self.value, padding=1, groups=self.channels)
        attention = self.norm(value * self.per_channel(gate)[..., None, None].to(value.dtype)
                              + self.shortcut_weight.to(value.dtype) * shortcut.to(value.dtype))
        return x + self.drop(attention).to(x.dtype), state
