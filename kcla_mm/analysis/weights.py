"""Depth weights: how much of each block's output a layer attention reads."""
import torch
import torch.nn.functional as F

from kcla_mm.layer_attention import KCLA, DLALight, LayerAttention, LinearLayerAttention, MRLABase, MRLALight


def depth_weights(layer, query, key, state, before):
    """How much of each block's output is in what a layer attention reads, its rows summing to 1.

    `KCLA`
        The weights of the blocks in the depth memory. With a = exp(s - l), s the block's score and l its
        log-normaliser, a block's own output has the weight a, and all that was in the memory is scaled by 1 - a, which
        is exp(l_before - l) whether the normaliser before was carried on, or made anew at a stage transition or
        refresh. These are exact within a stage: sum_i w_i x_i is the memory. A transition convolves and normalises the
        memory, and keeps what it is composed of: a head has the plain mean of the weights of the old channels that its
        group of the convolution reads. Where these are of one old head (whenever the previous head's width is a
        multiple of the channels that a group reads, so in all but some RegNets) it has that head's weights. What the
        normalisation adds belongs to no block and is not counted.
    `LayerAttention`, `MRLABase`
        Their softmax.
    `LinearLayerAttention`
        Its kernel's weights, divided by their sum; zero where they all are too small for a number.
    `MRLALight`
        What is left of a block's contribution after the recurrence that the paper derives, the product of |lambda| over
        the later blocks of the stage, 1 for the newest; divided by their sum for each channel, and averaged over the
        channels of a head. The gates of the values are left out: it is the decay that shows.
    `DLALight`, types of one's own
        Not defined: the blocks before enter by a nonlinear cell, not by weights.

    Args:
        layer (BaseLayerAttention): The layer attention.
        query, key (Tensor): Its own, (N, heads, head_channels).
        state: What it returned for the next block.
        before (list[LayerRecord]): The records of the blocks before, in order.

    Returns:
        Tensor: (N, heads, blocks), blocks = len(before) + 1, of float64; zero for those that it does not see. None
        where it is not defined.
    """
    if isinstance(layer, KCLA):
        return _kcla(layer, key, state, before)
    if isinstance(layer, DLALight):
        return None
    if isinstance(layer, MRLALight):
        weights = _decay(layer, before).expand(len(key), -1, -1)
    elif isinstance(layer, LayerAttention):  # and LinearLayerAttention
        queries, keys = layer.query_key(torch.stack(state.descriptors, 1))
        weights = _similarity(layer, queries[:, -1:], keys)
    elif isinstance(layer, MRLABase):
        weights = _similarity(layer, query[:, None], torch.stack(state.keys, 1))
    else:
        return None
    return F.pad(weights, (len(before) + 1 - weights.shape[2], 0))


def _kcla(layer, key, memory, before):
    own = (layer.score(key).double() - memory.log_normaliser.double()).exp().clamp(max=1)[..., None]
    if not before:
        return own
    carried = before[-1].weights
    if layer.memory_conv is not None:
        groups = layer.previous_channels // layer.memory_conv.shape[1]
        channels = carried.repeat_interleave(before[-1].layer.head_channels, 1)
        carried = channels.unflatten(1, (groups, -1)).mean(2).repeat_interleave(layer.heads // groups, 1)
    return torch.cat([(1 - own) * carried, own], 2)


def _similarity(layer, query, keys):
    """Weights (N, heads, T) of a query (N, 1, heads, d) and keys (N, T, heads, d)."""
    query, keys = query.double(), keys.double()
    if isinstance(layer, LinearLayerAttention):
        similarity = ((F.elu(query) + 1) * (F.elu(keys) + 1)).sum(3)
        weights = similarity / similarity.sum(1, keepdim=True).clamp(min=torch.finfo(similarity.dtype).tiny)
    else:
        weights = torch.softmax((query * keys).sum(3) / layer.head_channels**0.5, 1)
    return weights.transpose(1, 2)


def _decay(layer, before):
    """Weights (heads, T) by the products of |lambda| over the stage's later blocks."""
    factors = [layer.shortcut_weight.detach().double().abs().flatten()]
    for record in reversed(before[len(before) - layer.block:]):
        factors.append(record.layer.shortcut_weight.detach().double().abs().flatten())
    newest = torch.ones_like(factors[0])
    products = torch.stack([newest, *factors[:-1]]).cumprod(0).flip(0)  # (T, C), the newest last
    return layer.split_heads(products / products.sum(0)).mean(2).T
