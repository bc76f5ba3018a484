"""MRLA-B, the multi-head recurrent layer attention, arXiv 2302.03985."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .base import BaseLayerAttention, channel_conv_weight, conv_weight, pool


class KeysValues(NamedTuple):
    """What a block reads: keys and values of all blocks of its stage so far.

    Attributes:
        keys (tuple[Tensor]): Of each block, (N, heads, d), float32 at least.
        values (tuple[Tensor]): Of each block, (N, C, H, W).
    """
    keys: tuple = ()
    values: tuple = ()


class MRLABase(BaseLayerAttention):
    """Multi-head recurrent layer attention (MRLA-B) of one residual block.

    Block t attends to all blocks of its stage so far, whose keys and values are made once and kept:

    .. code-block:: none

        Q, K_t = conv1d_q(GAP(x)), conv1d_k(GAP(x))        split into heads of d channels
        V_t = depthwise3x3(x)
        y = x + DropPath(ReLU(BN(sum_i softmax_i(Q.K_i / sqrt d) V_i)))

    Args:
        head_channels (int): Channels d of a head; ``channels`` must be a multiple of it. Defaults to 16.
        channels, block, previous_channels, stride, drop_path, init_scale, with_cp, norm_layer: See
            `BaseLayerAttention`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from kcla_mm.layer_attention import MRLABase
        >>> x = torch.rand(2, 64, 16, 16)
        >>> y, layers = MRLABase(64)(x)
        >>> y, layers = MRLABase(64, block=1)(y, layers)
        >>> len(layers.values)
        2
    """

    def __init__(self, channels, block=0, previous_channels=None, stride=1, *, head_channels=16, drop_path=0.2,
                 init_scale=1e-3, with_cp=False, norm_layer=nn.BatchNorm2d):
        super().__init__(channels, block, previous_channels, stride, head_channels=head_channels,
                         drop_path=drop_path, init_scale=init_scale, with_cp=with_cp, norm_layer=norm_layer)
        self.query = channel_conv_weight(channels)
        self.key = channel_conv_weight(channels)
        self.value = conv_weight(channels, 1, 3)

    def attend(self, x, layers, shortcut=None):
        if layers is None or self.block == 0:
            layers = KeysValues()
        query, key = self.query_key(pool(x))
        value = F.conv2d(x, self.value, padding=1, groups=self.channels)
        layers = KeysValues(layers.keys + (key, ), layers.values + (value, ))
        scores = (query[:, None] * torch.stack(layers.keys, 1)).sum(3) / self.head_channels**0.5
        attention = self.norm(self.weighted_sum(layers.values, torch.softmax(scores, 1)))
        return x + self.drop(F.relu(attention, inplace=True)).to(x.dtype), layers
