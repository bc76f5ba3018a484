"""What every layer attention shares: its interface, its checks, and the arithmetic on pooled descriptors."""
import math
from contextlib import contextmanager, nullcontext
from numbers import Integral, Real

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class BaseLayerAttention(nn.Module):
    """The layer attention of one residual block.

    A network calls it once a block, in order, and hands the state on:
    ``x, state = layer_attention(x, state, shortcut)``. The state is None before the first block; what
    it holds, and for how many blocks, is the subclass's affair. Subclasses define :meth:`attend`.

    Args:
        channels (int): Channels C of the block's output.
        block (int): Index of the block in its stage, from 0. Defaults to 0.
        previous_channels (int, optional): Channels of the previous stage; None in the first stage.
            Defaults to None.
        stride (int): Stride of the stage. Defaults to 1.
        head_channels (int): Channels of a head; C must be a multiple of it.
        drop_path (float): Probability of dropping a sample's attention in training, in [0, 1). 0.2 by default in all
            subclasses.
        init_scale (float): Initial weight of ``norm``, positive: 1.0 to train from scratch, the subclasses' default of
            1e-3 to take over the weights of a plain network.
        with_cp (bool): Recompute the layer in the backward pass instead of keeping its activations. False by default.
        norm_layer (callable): Makes a normalisation with a learnable weight from a number of channels.
            `nn.BatchNorm2d` by default.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If an argument is of the wrong type.
    """

    needs_shortcut = False  # whether `attend` reads the block's identity branch

    def __init__(self, channels, block=0, previous_channels=None, stride=1, *, head_channels, drop_path,
                 init_scale, with_cp, norm_layer):
        super().__init__()
        if isinstance(head_channels, bool) or not isinstance(head_channels, Integral) or head_channels < 1:
            raise ValueError(f'head_channels must be a positive integer, got {head_channels!r}')
        if channels % head_channels:
            divisors = [d for d in range(1, channels + 1) if channels % d == 0]
            raise ValueError(f'head_channels={head_channels} does not divide the {channels} channels of a stage; '
                             f'its divisors are {divisors}')
        for name, value, least in (('block', block, 0), ('stride', stride, 1)):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f'{name} must be an integer of at least {least}, got {value!r}')
        if not is_number(drop_path) or not 0 <= drop_path < 1:
            raise ValueError(f'drop_path must be a number in [0, 1), got {drop_path!r}')
        if not is_number(init_scale) or init_scale <= 0:
            raise ValueError(f'init_scale must be a positive number, got {init_scale!r} '
                             '(at 0 the attention would never learn)')
        self.channels = channels
        self.block = block
        self.previous_channels = previous_channels
        self.stride = stride
        self.head_channels = head_channels
        self.heads = channels // head_channels
        self.drop_path = drop_path
        self.init_scale = init_scale
        self.with_cp = with_cp
        self.norm = norm_layer(channels)
        if getattr(self.norm, 'weight', None) is None:
            raise ValueError(f'norm_layer must make a normalisation with a learnable weight, got {self.norm}')
        self.init_weights()

    def init_weights(self):
        """Sets the weight of ``norm`` to ``init_scale``.

        MMEngine calls this after a network's own initialisers, which reset every normalisation to 1. The other
        parameters are none that those touch: they keep what they were given at construction.
        """
        nn.init.constant_(self.norm.weight, self.init_scale)

    def forward(self, x, state=None, shortcut=None):
        """Adds to a block's output what it reads from the blocks before it.

        Args:
            x (Tensor): Output of the residual block, after its ReLU, of shape (N, C, H, W).
            state: What the previous block's layer attention returned, None at the network's first block.
            shortcut (Tensor, optional): The block's identity branch, after its downsample, of x's shape.
                Only read where ``needs_shortcut`` is True.

        Returns:
            tuple: The output, of x's shape and dtype, and the state for the next block.

        Raises:
            ValueError: If ``shortcut`` is needed but None, or not of x's shape.
        """
        if self.needs_shortcut and (shortcut is None or shortcut.shape != x.shape):
            raise ValueError(f"{type(self).__name__} needs shortcut, the block's identity branch after its downsample, "
                             f'of the shape of x, {tuple(x.shape)}; got '
                             f'{shortcut if shortcut is None else tuple(shortcut.shape)}')
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self.attend, x, state, shortcut, use_reentrant=False,
                              context_fn=lambda: (nullcontext(), _frozen_statistics(self)))
        return self.attend(x, state, shortcut)

    def attend(self, x, state, shortcut):
        """:meth:`forward` without recomputation."""
        raise NotImplementedError

    def query_key(self, descriptor):
        """Query and key of a pooled descriptor, (..., C): (..., heads, head_channels) each."""
        both = channel_conv(descriptor[..., None, :], torch.cat([self.query, self.key]))
        return self.split_heads(both).unbind(-3)

    def split_heads(self, descriptor):
        """(..., C) -> (..., heads, head_channels)."""
        return descriptor.unflatten(-1, (self.heads, self.head_channels))

    def per_channel(self, heads):
        """A number for each head, (N, heads), as one for each channel: (N, C)."""
        return heads[..., None].expand(-1, -1, self.head_channels).flatten(1)

    def weighted_sum(self, maps, weights):
        """Sum of T maps, (N, C, H, W) each, weighted head by head with (N, T, heads): (N, C, H, W).

        Added up one by one: stacking them would copy all maps anew in every block.
        """
        total = None
        for map, weight in zip(maps, weights.unbind(1)):
            weight = self.per_channel(weight)[..., None, None].to(map.dtype)
            total = weight * map if total is None else total.addcmul_(weight.to(total.dtype), map.to(total.dtype))
        return total

    def drop(self, attention):
        """Stochastic depth: drops whole samples in training, and scales up those that stay."""
        weight = self.drop_weight(attention)
        return attention if weight is None else attention * weight

    def drop_weight(self, x):
        """What stochastic depth multiplies each sample with, (N, 1, 1, 1); None where it drops none."""
        if not self.training or self.drop_path == 0:
            return None
        keep = 1 - self.drop_path
        return x.new_empty(len(x), 1, 1, 1).bernoulli_(keep).div_(keep)

    def extra_repr(self):
        return (f'{self.channels}, head_channels={self.head_channels}, drop_path={self.drop_path}, '
                f'init_scale={self.init_scale}')


def pool(x):
    """Global average pooling, (N, C, H, W) -> (N, C), in float32 at least: half precision would overflow."""
    # A sum, since the gradient of a mean is a map of its own. torch.compile of torch 2.1 knows no promote_types.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.sum((2, 3), dtype=dtype) / (x.shape[2] * x.shape[3])


def without_autocast(device):
    """A context without autocast, which would lower matrix products to half precision, where descriptors overflow."""
    try:
        return torch.autocast(device.type, enabled=False)
    except RuntimeError:  # a device that has no autocast, such as meta
        return nullcontext()


def channel_kernel_size(channels):
    """Odd kernel width of a convolution along ``channels`` channels: ECA-Net, arXiv 1910.03151, equation 12."""
    t = int((math.log2(channels) + 1) / 2)
    return t if t % 2 else t + 1


def channel_conv(descriptor, weight):
    """Convolves along the channel axis: (..., C) with a filter of (1, 1, k), zero padding, no bias -> (..., C).

    F filters, (F, 1, k), make (..., F, C) of (..., 1, C).

    Written as a sum of products because autocast would lower a real convolution to half precision, where queries
    and keys overflow.
    """
    kernel_size = weight.shape[-1]
    windows = F.pad(descriptor, (kernel_size // 2, kernel_size // 2)).unfold(-1, kernel_size, 1)
    filters = weight.to(descriptor.dtype) if len(weight) > 1 else weight.to(descriptor.dtype).flatten()
    return (windows * filters).sum(-1)


def channel_conv_weight(channels):
    """A new filter for :func:`channel_conv`, (1, 1, k), xavier-uniform."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, 1, channel_kernel_size(channels))))


def conv_weight(out_channels, in_channels, kernel_size):
    """A new bias-free 2-D convolution's weight, as `nn.Conv2d` would draw it.

    A bare parameter, so that a network's initialisers for its own convolutions pass it over and draw the same
    numbers as without layer attention.
    """
    weight = torch.empty(out_channels, in_channels, kernel_size, kernel_size)
    return nn.Parameter(nn.init.kaiming_uniform_(weight, a=math.sqrt(5)))


def is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def _frozen_statistics(module):
    """Keeps running statistics as they are: the recomputation sees the same batch a second time."""
    norms = [m for m in module.modules() if getattr(m, 'num_batches_tracked', None) is not None and m.training]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(batches)
