"""What the layer attentions of a network attend to. Nothing here costs anything while it is not used."""
from .hook import LayerAttentionHook
from .recording import LayerRecord, find_backbone, memory_cut, recorded
from .weights import depth_weights

__all__ = ['LayerAttentionHook', 'LayerRecord', 'depth_weights', 'find_backbone', 'memory_cut', 'recorded']
