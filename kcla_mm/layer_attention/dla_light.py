"""DLA-L, the light dynamic layer attention, arXiv 2406.13392."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import conv_weight, pool, without_autocast
from .mrla_light import MRLALight

REDUCTION = 16  # of the hidden layers in the dynamic sharing unit


class DynamicSharingUnit(nn.Module):
    """What all blocks of a stage share: an LSTM-like cell on pooled descriptors, and a filter for the shortcuts.

    .. code-block:: none

        i, f, g = split(w_x(input) + w_h(hidden))          each w: Linear(C, C / 16), ReLU, Linear(C / 16, 3 C)
        cell = sigmoid(f) cell + sigmoid(i) tanh(g)
        hidden = sigmoid(cell)

    Args:
        channels (int): Channels C.
    """

    def __init__(self, channels):
        super().__init__()
        self.input = _Perceptron(channels)
        self.hidden = _Perceptron(channels)
        self.value = conv_weight(channels, 1, 3)

    def forward(self, descriptor, hidden, cell):
        """The next hidden state and cell; all of (N, C)."""
        with without_autocast(descriptor.device):
            i, f, g = (self.input(descriptor) + self.hidden(hidden)).chunk(3, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(cell), cell


class SharedCell(NamedTuple):
    """What DLA-L carries from block to block of a stage.

    Attributes:
        unit (DynamicSharingUnit): The stage's unit, a child of its first block's layer attention alone.
        hidden (Tensor): Its hidden state for each sample, (N, C), float32 at least.
        cell (Tensor): Its cell for each sample, as ``hidden``.
    """
    unit: DynamicSharingUnit
    hidden: Tensor
    cell: Tensor


class DLALight(MRLALight):
    """Light dynamic layer attention (DLA-L) of one residual block.

    It is `MRLALight` with a shortcut that depends on the blocks before. A unit shared by the blocks of a stage reads
    each block's output, and weights from its state the shortcut's channels:

    .. code-block:: none

        hidden, cell = unit(GAP(x), hidden, cell)          both 0 at the start of a stage
        c, _ = unit(GAP(shortcut), hidden, cell)           does not change the state
        y = MRLALight(x, shortcut c + unit.depthwise3x3(shortcut))

    Every sample has a state of its own; the published code gives the first one's to the whole batch.

    Args:
        head_channels (int): Channels d of a head; ``channels`` must be a multiple of it. Defaults to 32.
        channels, block, previous_channels, stride, drop_path, init_scale, with_cp, norm_layer: See
            `BaseLayerAttention`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> from kcla_mm.layer_attention import DLALight
        >>> x, shortcut = torch.rand(2, 64, 16, 16), torch.rand(2, 64, 16, 16)
        >>> y, state = DLALight(64)(x, None, shortcut)
        >>> y, state = DLALight(64, block=1)(y, state, y)
    """

    def __init__(self, channels, block=0, previous_channels=None, stride=1, *, head_channels=32, drop_path=0.2,
                 init_scale=1e-3, with_cp=False, norm_layer=nn.BatchNorm2d):
        super().__init__(channels, block, previous_channels, stride, head_channels=head_channels,
                         drop_path=drop_path, init_scale=init_scale, with_cp=with_cp, norm_layer=norm_layer)
        self.unit = DynamicSharingUnit(channels) if block == 0 else None

    def attend(self, x, state, shortcut):
        descriptor = pool(x)
        if self.unit is not None:
            state = SharedCell(self.unit, torch.zeros_like(descriptor), torch.zeros_like(descriptor))
        elif state is None:
            raise ValueError(f'DLALight of block {self.block} needs the state that the block before it returned: '
                             'the unit that it shares is that of block 0')
        unit = state.unit
        state = SharedCell(unit, *unit(descriptor, state.hidden, state.cell))
        weight, _ = unit(pool(shortcut), state.hidden, state.cell)
        shortcut = shortcut * weight[..., None, None].to(shortcut.dtype) \
            + F.conv2d(shortcut, unit.value, padding=1, groups=self.channels)
        return super().attend(x, None, shortcut)[0], state


class _Perceptron(nn.Module):
    """Linear(C, C / 16), ReLU, Linear(C / 16, 3 C) as bare parameters, which no network's initialisers touch."""

    def __init__(self, channels):
        super().__init__()
        hidden = max(channels // REDUCTION, 1)
        self.reduce_weight, self.reduce_bias = nn.Linear(channels, hidden).parameters()
        self.expand_weight, self.expand_bias = nn.Linear(hidden, 3 * channels).parameters()

    def forward(self, descriptor):
        dtype = descriptor.dtype
        hidden = F.relu(F.linear(descriptor, self.reduce_weight.to(dtype), self.reduce_bias.to(dtype)))
        return F.linear(hidden, self.expand_weight.to(dtype), self.expand_bias.to(dtype))
