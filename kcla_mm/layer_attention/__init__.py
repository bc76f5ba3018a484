"""Layer attentions in plain PyTorch: a block of a network attends to the blocks before it.

Each is a module for one residual block, with one interface, :class:`BaseLayerAttention`.
"""
import inspect

from torch import nn

from .base import BaseLayerAttention
from .dla_light import DLALight
from .kcla import KCLA, DepthMemory
from .layer_attention import LayerAttention
from .linear_layer_attention import LinearLayerAttention
from .mrla_base import MRLABase
from .mrla_light import MRLALight

__all__ = ['KCLA', 'LayerAttention', 'LinearLayerAttention', 'MRLABase', 'MRLALight', 'DLALight', 'BaseLayerAttention',
           'DepthMemory', 'LAYER_ATTENTIONS', 'create_layer_attention', 'layer_attention_class']

LAYER_ATTENTIONS = {cls.__name__: cls
                    for cls in (KCLA, LayerAttention, LinearLayerAttention, MRLABase, MRLALight, DLALight)}


def layer_attention_class(type):
    """The class of a layer attention's name, or of itself; see :func:`create_layer_attention`."""
    cls = LAYER_ATTENTIONS.get(type, type) if isinstance(type, str) else type
    if not (inspect.isclass(cls) and issubclass(cls, BaseLayerAttention)):
        raise ValueError(f'attention type must be one of {sorted(LAYER_ATTENTIONS)}, got {type!r}')
    return cls


def create_layer_attention(type, channels, block=0, previous_channels=None, stride=1, norm_layer=nn.BatchNorm2d, /,
                           **options):
    """Makes the layer attention of one residual block.

    Args:
        type (str or type): A name in `LAYER_ATTENTIONS`, or a subclass of `BaseLayerAttention`.
        channels, block, previous_channels, stride, norm_layer: The block's place and its normalisation, see
            `BaseLayerAttention`.
        **options: Arguments of that layer attention, such as ``head_channels`` or ``drop_path``.

    Returns:
        BaseLayerAttention: The module.

    Raises:
        ValueError: If ``type`` or an option's value is not known.
        TypeError: If an option is not one of that layer attention.
    """
    cls = layer_attention_class(type)
    accepted = {name for name, parameter in inspect.signature(cls).parameters.items()
                if parameter.kind is parameter.KEYWORD_ONLY} - {'norm_layer'}
    unknown = sorted(set(options) - accepted)
    if unknown:
        raise TypeError(f'{cls.__name__} has no argument {", ".join(map(repr, unknown))}; '
                        f'it accepts {", ".join(sorted(accepted))}')
    return cls(channels, block, previous_channels, stride, norm_layer=norm_layer, **options)
