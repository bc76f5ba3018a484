"""Records what the layer attentions of a network do in a forward pass."""
from contextlib import contextmanager
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from kcla_mm.backbones import LayerAttentionMixin
from kcla_mm.layer_attention import KCLA, BaseLayerAttention, MRLALight
from kcla_mm.layer_attention.base import pool

from .weights import depth_weights


class LayerRecord(NamedTuple):
    """What a layer attention did in a forward pass of N images. What its type does not have is None.

    Attributes:
        name (str): Its name in the network.
        layer (BaseLayerAttention): The module.
        stage (int): Its stage, from 1.
        query, key (Tensor): (N, heads, head_channels) each.
        gate (Tensor): The heads' gate, (N, heads).
        weights (Tensor): How much it reads of each block so far, (N, heads, blocks): see :func:`depth_weights`.
        branch (Tensor): ``||y - x|| / ||x||`` of its input x and output y, (N, ).
    """
    name: str
    layer: BaseLayerAttention
    stage: int
    query: Optional[Tensor]
    key: Optional[Tensor]
    gate: Optional[Tensor]
    weights: Optional[Tensor]
    branch: Tensor


def find_backbone(model):
    """The backbone of a model that has layer attention, the first one if there are several.

    Args:
        model (nn.Module): A detector, segmenter, classifier or backbone, also within a wrapper such as
            DistributedDataParallel.

    Returns:
        LayerAttentionMixin: The backbone.

    Raises:
        ValueError: If there is none.
    """
    for module in model.modules():
        if isinstance(module, LayerAttentionMixin) and module.attention is not None:
            return module
    backbone = getattr(getattr(model, 'module', model), 'backbone', None)
    raise ValueError(f'the model has no layer attention: its backbone is {type(backbone).__name__}, and should be one '
                     'such as KCLAResNet, with an attention that is not None')


@contextmanager
def recorded(network):
    """Within this context each forward pass of a network is recorded.

    The records hold numbers of each head, no feature maps.

    Args:
        network (nn.Module): A network with layer attentions, called in the order in which it holds them.

    Yields:
        list[LayerRecord]: Those of the latest forward pass, in the order of the layers.
    """
    names = {module: name for name, module in network.named_modules() if isinstance(module, BaseLayerAttention)}
    first = next(iter(names))
    records = []

    def record(layer, inputs, outputs):
        if layer is first:
            records.clear()
        records.append(_record(names[layer], layer, inputs, outputs, records))

    handles = [layer.register_forward_hook(record) for layer in names]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def memory_cut(layer):
    """Within this context a layer attention is called as if there were no blocks before it.

    Args:
        layer (BaseLayerAttention): The first one of a stage.
    """
    handle = layer.register_forward_pre_hook(lambda module, inputs: (inputs[0], None, *inputs[2:]))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _record(name, layer, inputs, outputs, before):
    x, (y, state) = inputs[0], outputs
    stage = before[-1].stage + (layer.block == 0) if before else 1
    query = key = None
    if hasattr(layer, 'query') and hasattr(layer, 'key'):  # a type of one's own need not have them
        query, key = layer.query_key(pool(x))
    return LayerRecord(name, layer, stage, query, key, _gate(layer, query, key),
                       depth_weights(layer, query, key, state, before), _length(y - x) / _length(x))


def _gate(layer, query, key):
    if isinstance(layer, KCLA) and layer.gate is not None:
        return layer.head_gate(query, key)
    if isinstance(layer, MRLALight):
        return torch.sigmoid((query * key).sum(2) / layer.head_channels**0.5)
    return None


def _length(x):
    return torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
