"""What the tests of the backbones do to a network, whatever framework it is of."""
import torch

from kcla_mm.layer_attention import BaseLayerAttention


def randomised(network):
    """Draws what initialisation sets to a constant, so that every block and statistic counts."""
    for name, value in network.state_dict().items():
        if 'layer_attention' not in name and value.ndim == 1:
            value.copy_(torch.rand_like(value) + 0.5)
    return network


def evaluating(network):
    network.eval()  # which returns None in the frameworks' ResNets
    return network


def attentions(network):
    """The layer attentions of a network, by name."""
    return {name: m for name, m in network.named_modules() if isinstance(m, BaseLayerAttention)}
