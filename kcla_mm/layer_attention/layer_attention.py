"""Standard layer attention, which compares a block with all blocks before it, arXiv 2302.03985."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .base import BaseLayerAttention, channel_conv, channel_conv_weight, conv_weight, pool


class LayerMaps(NamedTuple):
    """What a block reads: the outputs of all blocks of its stage so far.

    Attributes:
        maps (tuple[Tensor]): Outputs of the blocks, (N, C, H, W) each.
        descriptors (tuple[Tensor]): Their global averages, (N, C) each, float32 at least.
    """
    maps: tuple = ()
    descriptors: tuple = ()


class LayerAttention(BaseLayerAttention):
    """Standard layer attention of one residual block.

    Block t attends to the outputs x_1, ..., x_t of its stage, which are all kept; keys and values of all of them are
    made anew by each block's own filters:

    .. code-block:: none

        Q, K_i = conv1d_q(GAP(x_t)), conv1d_k(GAP(x_i))    split into heads of d channels
        w_i = softmax_i(Q.K_i / sqrt d)
        y = x_t + DropPath(ReLU(BN(sum_i w_i depthwise3x3(x_i))))

    A head reads its own channels of every layer. The published code mixes heads and layers up from the second layer of
    a stage on, so that some heads never see the newest layer.

    Args:
        head_channels (int): Channels d of a head; ``channels`` must be a multiple of it. Defaults to 16.
        channels, block, previous_channels, stride, drop_path, init_scale, with_cp, norm_layer: See
            `BaseLayerAttention`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from kcla_mm.layer_attention import LayerAttention
        >>> x = torch.rand(2, 64, 16, 16)
        >>> y, layers = LayerAttention(64)(x)
        >>> y, layers = LayerAttention(64, block=1)(y, layers)
        >>> len(layers.maps)
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
        layers, query, keys = self.look_back(x, layers)
        weights = torch.softmax((query * keys).sum(3) / self.head_channels**0.5, 1)
        attention = F.relu(self.norm(self.read(layers, weights)), inplace=True)
        return x + self.drop(attention).to(x.dtype), layers

    def look_back(self, x, layers):
        """Stores x; returns all layers, the query (N, 1, heads, d) and the T keys (N, T, heads, d)."""
        if layers is None or self.block == 0:
            layers = LayerMaps()
        layers = LayerMaps(layers.maps + (x, ), layers.descriptors + (pool(x), ))
        query = channel_conv(layers.descriptors[-1][:, None], self.query)
        keys = channel_conv(torch.stack(layers.descriptors, 1), self.key)
        return layers, self.split_heads(query), self.split_heads(keys)

    def read(self, layers, weights):
        """The values of all layers, weighted by (N, T, heads). One convolution, as it is linear and depthwise."""
        return F.conv2d(self.weighted_sum(layers.maps, weights), self.value, padding=1, groups=self.channels)
