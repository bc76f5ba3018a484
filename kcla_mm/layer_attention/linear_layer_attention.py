"""Linear layer attention: a kernel in place of the softmax, arXiv 2606.28405."""
import torch
import torch.nn.functional as F
from torch import nn

from .layer_attention import LayerAttention


class LinearLayerAttention(LayerAttention):
    """Linear layer attention of one residual block, without a normaliser.

    .. code-block:: none

        Q, K_i = conv1d_q(GAP(x_t)), conv1d_k(GAP(x_i))    split into heads of d channels
        w_i = e(Q).e(K_i),  e = elu + 1
        y = x_t + DropPath(BN(sum_i w_i depthwise3x3(x_i)))

    As in `LayerAttention`, the outputs of all blocks of a stage are kept, since each block has a key filter of its own.

    Args:
        head_channels (int): Channels d of a head; ``channels`` must be a multiple of it. Defaults to 8.
        channels, block, previous_channels, stride, drop_path, init_scale, with_cp, norm_layer: See
            `BaseLayerAttention`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from kcla_mm.layer_attention import LinearLayerAttention
        >>> x = torch.rand(2, 64, 16, 16)
        >>> y, layers = LinearLayerAttention(64)(x)
        >>> y, layers = LinearLayerAttention(64, block=1)(y, layers)
    """

    def __init__(self, channels, block=0, previous_channels=None, stride=1, *, head_channels=8, drop_path=0.2,
                 init_scale=1e-3, with_cp=False, norm_layer=nn.BatchNorm2d):
        super().__init__(channels, block, previous_channels, stride, head_channels=head_channels,
                         drop_path=drop_path, init_scale=init_scale, with_cp=with_cp, norm_layer=norm_layer)

    def attend(self, x, layers, shortcut=None):
        layers, query, keys = self.look_back(x, layers)
        weights = ((F.elu(query) + 1) * (F.elu(keys) + 1)).sum(3)
        # In half precision the weighted sum could overflow, the weighted mean cannot: scale it afterwards.
        total = weights.sum(1, keepdim=True)
        mean = self.read(layers, weights / total.clamp(min=torch.finfo(total.dtype).tiny))
        attention = self.norm((mean * self.per_channel(total[:, 0])[..., None, None]).to(self.norm.weight.dtype))
        return x + self.drop(attention).to(x.dtype), layers
