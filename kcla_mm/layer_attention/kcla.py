"""Key-Correlated Layer Attention (KCLA), arXiv 2606.28405."""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import BaseLayerAttention, is_number, channel_conv, channel_conv_weight, conv_weight, pool
from .read_out import ReadOut, is_lean, read_out

REFRESH_BLOCK = 11  # a stage that is so deep renews its memory at this block
MAX_SCORE = 10.
LOG_EPSILON = math.log(1e-3)  # the published code divides the summed memory by its normaliser + 1e-3


class DepthMemory(NamedTuple):
    """What KCLA carries from block to block, however many there have been.

    Attributes:
        mean (Tensor): Softmax(score)-weighted mean of the blocks' outputs, (N, C, H, W).
        log_normaliser (Tensor): Logarithm of the sum of exp(score), (N, heads), float32 at least.
        steps (tuple[Tensor]): With ``with_cp``, what the backward pass makes ``mean`` of again instead of keeping it: the
            first mean of a stage, then output and weight (N, C) of each block after. The network keeps outputs anyway.
    """
    mean: Tensor
    log_normaliser: Tensor
    steps: tuple = ()


class KCLA(BaseLayerAttention):
    """Key-Correlated Layer Attention of one residual block.

    Since keys of neighbouring layers correlate, a layer's weight can be judged by its own key alone. The weighted
    sum over all layers so far then is one running mean, which each block updates and reads:

    .. code-block:: none

        Q, K = conv1d_q(GAP(x)), conv1d_k(GAP(x))          split into heads
        s = min(tau ||K||, 10)
        l = logaddexp(l, s)                                log-normaliser
        m = m + exp(s - l) (x - m)                         depth memory
        phi = sigmoid(Phi (Q.K / ||K||)) / (1 + 1e-3 exp(-l))
        y = x + DropPath(ReLU(BN(phi * depthwise3x3(m))))

    At the first block of a later stage the memory is first adapted, m = BN(conv1x1(m)), and its normaliser made
    anew from the key of m. In a stage of 12 blocks or more block 11 renews it likewise, without the convolution.

    Its backward pass cannot be differentiated again (no gradients of gradients).

    Args:
        channels (int): Channels C of the block's output.
        block (int): Index of the block in its stage, from 0. Defaults to 0.
        previous_channels (int, optional): Channels of the previous stage, whose memory the first block of a stage
            takes over; None in the first stage. Defaults to None.
        stride (int): Stride of the stage. Defaults to 1.
        head_channels (int): Channels of a head; C must be a multiple of it. Defaults to 64.
        drop_path (float): Probability of dropping a sample's attention in training, in [0, 1). Defaults to 0.2.
        init_scale (float): Initial weight of the last normalisation. 1.0 is the paper's, for training from scratch;
            the default starts so near the plain network that its weights can be taken over. Defaults to 1e-3.
        temperatures (Sequence[float]): tau of the first and of the last head; those between are spaced evenly in
            their logarithm. Both positive; near 0, keys are ignored. Fixed ones are not in the state dict. Defaults to
            (0.7, 1 / 0.7).
        learnable_temperature (bool): Train the logarithm of each head's tau. Defaults to False.
        gate (bool): Weight the heads by phi; False leaves only its factor 1 / (1 + 1e-3 exp(-l)). Defaults to True.
        cross_stage (bool): Carry the memory from stage to stage; False starts each stage anew. Defaults to True.
        refresh (bool): Renew the memory within a stage of 12 blocks or more; False never does. Defaults to True.
        with_cp (bool): Keep no map for the backward pass, but make the depth memory again. Defaults to False.
        norm_layer (callable): Makes a normalisation with a learnable weight from a number of channels.
            Defaults to `nn.BatchNorm2d`.

    Raises:
        ValueError: If an argument is out of its range: ``head_channels`` that does not divide C, ``init_scale``
            that is not positive, ``temperatures`` that are not two positive numbers, ... In a pass, if ``memory`` is of
            another batch.

    Example:
        >>> import torch
        >>> from kcla_mm.layer_attention import KCLA
        >>> x = torch.rand(2, 128, 16, 16)
        >>> y, memory = KCLA(128)(x)
        >>> y, memory = KCLA(128, block=1)(y, memory)
        >>> y.shape, memory.mean.shape, memory.log_normaliser.shape
        (torch.Size([2, 128, 16, 16]), torch.Size([2, 128, 16, 16]), torch.Size([2, 2]))
    """

    def __init__(self, channels, block=0, previous_channels=None, stride=1, *, head_channels=64, drop_path=0.2,
                 init_scale=1e-3, temperatures=(0.7, 1 / 0.7), learnable_temperature=False, gate=True,
                 cross_stage=True, refresh=True, with_cp=False, norm_layer=nn.BatchNorm2d):
        super().__init__(channels, block, previous_channels, stride, head_channels=head_channels,
                         drop_path=drop_path, init_scale=init_scale, with_cp=with_cp, norm_layer=norm_layer)
        log_temperature = _log_temperatures(temperatures, self.heads)
        if learnable_temperature:
            self.log_temperature = nn.Parameter(log_temperature)
        else:
            self.register_buffer('log_temperature', log_temperature, persistent=False)
        self.query = channel_conv_weight(channels) if gate else None
        self.key = channel_conv_weight(channels)
        self.value = conv_weight(channels, 1, 3)
        self.gate = nn.Parameter(nn.init.xavier_uniform_(torch.empty(self.heads, self.heads))) if gate else None

        starts_stage = block == 0
        adapts = starts_stage and cross_stage and previous_channels is not None
        self.starts_memory = starts_stage and not adapts
        self.memory_conv = self.memory_norm = self.memory_key = None
        if adapts:
            # A group is a head, but where heads do not divide the previous channels (RegNet) as near as it can be.
            self.memory_groups = math.gcd(self.heads, previous_channels)
            self.memory_conv = conv_weight(channels, previous_channels // self.memory_groups, 1)
        if adapts or refresh and block == REFRESH_BLOCK:
            self.memory_norm = norm_layer(channels)
            self.memory_key = channel_conv_weight(channels)

    def forward(self, x, memory=None, shortcut=None):
        if memory is not None and not torch.jit.is_tracing() and len(memory.mean) != len(x):  # it might be broadcast
            raise ValueError(f'memory is of {len(memory.mean)} samples and x of {len(x)}: every pass of a network starts '
                             'with memory=None')
        # What has a backward pass of its own recomputes on its own, too.
        return (self.attend if is_lean(self.norm, x) else super().forward)(x, memory, shortcut)

    def attend(self, x, memory, shortcut=None):
        query, key = self.query_key(pool(x))
        score = log_normaliser = self.score(key)
        if memory is None or self.starts_memory:
            memory = update = None
        else:
            if self.memory_norm is not None:
                memory = self.renew(memory)
            log_normaliser = torch.logaddexp(memory.log_normaliser, score)
            update = self.per_channel(torch.exp(score - log_normaliser))
        scale = torch.sigmoid(log_normaliser - LOG_EPSILON)  # 1 / (1 + 1e-3 exp(-l))
        if self.gate is not None:
            scale = scale * self.head_gate(query, key)
        return self.read_out(x, memory, log_normaliser, update, self.per_channel(scale))

    def read_out(self, x, memory, log_normaliser, update, scale):
        """The output and the new memory; ``update`` and ``scale``, (N, C), are for each channel."""
        mean = None if memory is None else memory.mean.to(x.dtype)
        if is_lean(self.norm, x) and (self.norm.training or torch.is_grad_enabled()):
            steps = ()
            if self.with_cp and mean is not None:
                steps = memory.steps if memory.steps and mean is memory.mean else (mean, )
            drop = self.drop_weight(x)
            y, mean = ReadOut.apply(x, mean, update, self.value, scale, self.norm.weight, self.norm.bias,
                                    drop if drop is None else drop.flatten(1).to(scale.dtype), self.norm, steps)
            return y, DepthMemory(x if mean is None else mean, log_normaliser, steps and (*steps, x, update))
        mean = x if mean is None else torch.lerp(mean, x, update[..., None, None].to(x.dtype))
        if is_lean(self.norm, x):
            y = read_out(x, mean, self.value, scale, self.norm)
        else:
            value = F.conv2d(mean, self.value, padding=1, groups=self.channels)
            attention = self.norm(value * scale[..., None, None].to(value.dtype))
            y = x + self.drop(F.relu(attention, inplace=True))
        return y, DepthMemory(mean, log_normaliser)

    def query_key(self, descriptor):
        if self.gate is None:  # no gate, no query
            return None, self.split_heads(channel_conv(descriptor, self.key))
        return super().query_key(descriptor)

    def score(self, key):
        """Score of a layer, (N, heads), from the length of its key, (N, heads, head_channels)."""
        length = torch.linalg.vector_norm(key, dim=2)
        return (length * self.log_temperature.to(length.dtype).exp()).clamp(max=MAX_SCORE)

    def head_gate(self, query, key):
        """The heads' gate phi, (N, heads), from query and key, (N, heads, head_channels) each."""
        length = torch.linalg.vector_norm(key, dim=2)
        # A zero key stays zero, and its gradient finite, whatever it is divided by.
        alignment = (query * key).sum(2) / length.masked_fill(length == 0, 1)
        return torch.sigmoid((self.gate.to(alignment.dtype) * alignment[:, None]).sum(2))  # autocast lowers a matmul

    def renew(self, memory):
        """Fits the memory to a new stage, or refreshes it within a deep one."""
        mean = memory.mean
        if self.memory_conv is not None:
            mean = F.conv2d(mean, self.memory_conv, stride=self.stride, groups=self.memory_groups)
        mean = self.memory_norm(mean)
        key = self.split_heads(channel_conv(pool(mean), self.memory_key))
        return DepthMemory(mean, self.score(key))


def _log_temperatures(temperatures, heads):
    """Logarithms of the heads' temperatures, (heads,)."""
    try:
        first, last = temperatures
    except (TypeError, ValueError):
        first = last = None
    if not all(is_number(t) and t > 0 for t in (first, last)):
        raise ValueError(f'temperatures must be two positive numbers, got {temperatures!r}')
    return torch.linspace(math.log(first), math.log(last), heads)
