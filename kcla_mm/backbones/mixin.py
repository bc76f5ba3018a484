"""Joins layer attention to the ResNets of MMDetection, MMSegmentation and MMPretrain."""
import inspect
import logging
import threading
from collections import OrderedDict

import torch
from mmcv.cnn import build_norm_layer
from mmengine.logging import print_log
from torch import nn
from torch.utils.checkpoint import checkpoint

from kcla_mm.layer_attention import create_layer_attention, layer_attention_class


class _ForwardPass(threading.local):
    """The forward pass under way in this thread: what a stage takes over from the one before it."""
    __slots__ = ()  # a __dict__ beside the thread's would hide the values from torch.compile of torch 2.1

    def __init__(self):
        self.running = False
        self.state = None
        self.shortcut = None  # the identity branch of the block under way, where its attention needs it


_forward_pass = _ForwardPass()


class LayerAttentionStage(nn.Sequential):
    """A stage of residual blocks, each followed by its layer attention, a child of the block's."""

    def __init__(self, stage, backbone_name):
        super().__init__(*stage)
        self.backbone_name = backbone_name
        self.initialises_blocks = hasattr(stage, 'init_weights')

    def init_weights(self):
        """Initialises what the plain stage does, and the layer attentions."""
        for block in self:
            (block if self.initialises_blocks else block.layer_attention).init_weights()

    def forward(self, x):
        if not _forward_pass.running:
            raise RuntimeError(f'a stage of {self.backbone_name} was called by hand, which would go round layer '
                               'attention: call the whole backbone, or build it with attention=None (to recompute '
                               'activations, use with_cp=True: a single stage cannot be called again)')
        state = _forward_pass.state
        for block in self:
            attention = block.layer_attention
            x, shortcut = _with_shortcut(block, x) if attention.needs_shortcut else (block(x), None)
            x, state = attention(x, state, shortcut)
        _forward_pass.state = state
        return x


class LayerAttentionMixin:
    """Gives a ResNet of MMDetection, MMSegmentation or MMPretrain layer attention.

    ``class MyNet(LayerAttentionMixin, MyResNet)`` takes every argument of ``MyResNet``, and ``attention``. The plain
    network's parameters keep their names; block b of stage s gains a child ``layer{s}.{b}.layer_attention``. So a
    frozen stage freezes its attention, ``norm_eval`` covers its normalisation, and the weights of the plain network
    load. Under one seed the plain network's parameters start from the same values with attention and without.

    ``MyResNet`` has to build its stages with ``make_res_layer``, as the frameworks' own ResNets do.

    Args:
        *args, **kwargs: Arguments of the plain network.
        attention (dict, optional): ``type``, a name such as 'KCLA' (the default) or a class, and arguments of that
            layer attention, such as ``head_channels``: see `kcla_mm.layer_attention`. Its ``norm_cfg`` defaults to
            the backbone's, but trainable: freshly drawn parameters have nothing that could be kept. None is the plain
            network. Defaults to ``dict(type='KCLA')``.

    Raises:
        TypeError: If an argument is unknown, or if the network does not build its stages with ``make_res_layer``.
        ValueError: If an argument of the layer attention is out of its range.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[1:cls.__mro__.index(LayerAttentionMixin)]
        networks = [base.__name__ for base in before
                    if issubclass(base, nn.Module) and not issubclass(base, LayerAttentionMixin)]
        if networks:
            raise TypeError(f'LayerAttentionMixin must come before the network: class {cls.__name__}('
                            f'LayerAttentionMixin, {networks[0]})')

    def __init__(self, *args, attention=dict(type='KCLA'), **kwargs):
        if not (attention is None or isinstance(attention, dict)):
            raise TypeError(f"attention must be None or a dict such as dict(type='KCLA'), got {attention!r}")
        self.attention = attention if attention is None else dict(attention)
        self._stage_channels = []
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            if 'unexpected keyword argument' not in str(error):
                raise
            raise TypeError(f'{error}; {type(self).__name__} accepts {", ".join(_accepted_arguments(type(self)))}') \
                from None
        stages = [getattr(self, name) for name in getattr(self, 'res_layers', [])]
        if attention is not None and not (stages and all(isinstance(s, LayerAttentionStage) for s in stages)):
            raise TypeError(f'{type(self).__name__} does not build its stages with make_res_layer: '
                            'layer attention cannot be joined to it')

    def make_res_layer(self, **kwargs):
        """Builds a stage as the plain network does, and joins layer attention to its blocks."""
        stage = super().make_res_layer(**kwargs)
        if self.attention is None:
            return stage
        channels = kwargs['out_channels'] if 'out_channels' in kwargs else kwargs['planes'] * kwargs['block'].expansion
        previous_channels = self._stage_channels[-1] if self._stage_channels else None
        self._stage_channels.append(channels)
        with torch.random.fork_rng(devices=[]):  # the plain network draws what it would draw without attention
            for index, block in enumerate(stage):
                block.layer_attention = self._make_layer_attention(
                    channels, index, previous_channels, kwargs.get('stride', 1), kwargs['norm_cfg'])
                if block.layer_attention.needs_shortcut and block.downsample is not None:
                    block.downsample = _Downsample(OrderedDict(block.downsample.named_children()))
        return LayerAttentionStage(stage, type(self).__name__)

    def _make_layer_attention(self, channels, block, previous_channels, stride, norm_cfg):
        options = {'type': 'KCLA', **self.attention}
        norm_cfg = options.pop('norm_cfg', None) or dict(norm_cfg, requires_grad=True)
        try:
            cls = layer_attention_class(options.pop('type'))
            if 'head_channels' in inspect.signature(cls).parameters:
                options.setdefault('head_channels', self.default_head_channels(cls))
            return create_layer_attention(cls, channels, block, previous_channels, stride,
                                          lambda c: build_norm_layer(norm_cfg, c)[1], **options)
        except (TypeError, ValueError) as error:
            raise type(error)(f'attention={self.attention}: {error}') from None

    def default_head_channels(self, cls):
        """The head width of a layer attention, a subclass of `BaseLayerAttention`, where ``attention`` says none."""
        return inspect.signature(cls).parameters['head_channels'].default

    def forward(self, *args, **kwargs):
        """As the plain network's."""
        outer = _forward_pass.running, _forward_pass.state
        _forward_pass.running, _forward_pass.state = True, None
        try:
            return super().forward(*args, **kwargs)
        finally:
            _forward_pass.running, _forward_pass.state = outer

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if hasattr(self, 'stem') and not hasattr(self.stem[0], 'conv'):
            _count_layers_of_stem(state_dict, f'{prefix}stem.')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        keys = [key for key in state_dict if key.startswith(prefix + 'layer')]
        if self.attention is not None and keys and not any('.layer_attention.' in key for key in keys):
            init_scale = getattr(self, self.res_layers[0])[0].layer_attention.init_scale
            print_log(f'The checkpoint has no layer attention: that of {type(self).__name__} starts at '
                      f'init_scale={init_scale}, {"near" if init_scale <= 0.01 else "far from"} the plain network.',
                      logger='current', level=logging.WARNING)


def _count_layers_of_stem(state_dict, prefix):
    """Renames a deep stem of MMPretrain's, of units with a conv and a bn, to MMDetection's and MMSegmentation's names.

    They count convolution, normalisation and ReLU: ``stem.1.bn.weight`` becomes ``stem.4.weight``.
    """
    for key in [key for key in state_dict if key.startswith(prefix)]:
        unit, _, rest = key[len(prefix):].partition('.')
        layer, _, name = rest.partition('.')
        if layer in ('conv', 'bn'):
            state_dict[f'{prefix}{3 * int(unit) + (layer == "bn")}.{name}'] = state_dict.pop(key)


class _Downsample(nn.Sequential):
    """A block's downsample that keeps its output for `_with_shortcut`. (Not a hook: torch 2.1 compiles it away.)"""

    def forward(self, x):
        _forward_pass.shortcut = super().forward(x)
        return _forward_pass.shortcut


def _with_shortcut(block, x):
    """Output and identity branch of a residual block, the branch computed only once."""
    if block.downsample is None:
        return block(x), x
    if block.with_cp and x.requires_grad:
        # What is kept within the block's own checkpoint would have no gradient: checkpoint both outputs.
        return checkpoint(_without_cp, block, x, use_reentrant=False)
    try:
        return block(x), _forward_pass.shortcut
    finally:
        _forward_pass.shortcut = None


def _without_cp(block, x):
    """`_with_shortcut` of a block that keeps its activations."""
    block.with_cp = False
    try:
        return _with_shortcut(block, x)
    finally:
        block.with_cp = True


def _accepted_arguments(cls):
    """Names of the arguments that a network accepts, through all classes that hand theirs on."""
    names = []
    for base in cls.__mro__:
        if '__init__' not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return sorted(set(names))
