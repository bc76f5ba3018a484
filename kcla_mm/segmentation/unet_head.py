"""The decoder of UNet, arXiv 1505.04597."""
import math

import torch
from mmcv.cnn import ConvModule
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.losses import accuracy
from mmseg.models.utils import resize
from mmseg.registry import MODELS
from torch import nn


@MODELS.register_module()
class UNetHead(BaseDecodeHead):
    """A UNet decoder for the list of features of any backbone.

    From the deepest feature map up: resize it to the size of the next one, concatenate the two, and convolve twice
    (3 x 3, normalisation, activation). The sizes come from the feature maps, so odd ones work. The result has the size
    of the first feature map, and is resized to that of the image or mask where it is compared with one.

    Args:
        in_channels (Sequence[int]): Channels of the feature maps, the first (largest) to the last (deepest); at least
            two.
        decoder_channels (Sequence[int], optional): Channels of the decoder at each feature map but the deepest, in the
            same order. Defaults to those of the feature maps.
        in_index (Sequence[int], optional): Which of the backbone's feature maps. Defaults to all: 0, 1, 2, ...
        norm_cfg (dict): Normalisation. Defaults to ``dict(type='BN')``.
        **kwargs: Arguments of MMSegmentation's `BaseDecodeHead`, such as ``num_classes``, ``dropout_ratio`` and
            ``loss_decode``; with ``out_channels=1`` and ``threshold``, one map tells two classes apart.

    Raises:
        ValueError: If the numbers of feature maps and of channels don't agree, or ``threshold`` is not between 0 and 1;
            in the first forward pass, if the backbone's feature maps are others.
    """

    def __init__(self, in_channels, decoder_channels=None, in_index=None, norm_cfg=dict(type='BN'), **kwargs):
        if not isinstance(in_channels, (list, tuple)) or len(in_channels) < 2:
            raise ValueError(f'in_channels must be a list of at least two numbers, got {in_channels!r}')
        if decoder_channels is None:
            decoder_channels = in_channels[:-1]
        if not isinstance(decoder_channels, (list, tuple)) or len(decoder_channels) != len(in_channels) - 1:
            raise ValueError(f'decoder_channels must have {len(in_channels) - 1} numbers, one less than in_channels='
                             f'{in_channels}, got {decoder_channels!r}')
        reads_all = in_index is None
        if in_index is None:
            in_index = list(range(len(in_channels)))
        elif not isinstance(in_index, (list, tuple)) or len(in_index) != len(in_channels):
            raise ValueError(f'in_index must have {len(in_channels)} numbers, as in_channels={in_channels}, got '
                             f'{in_index!r}')
        super().__init__(in_channels, decoder_channels[0], in_index=in_index, input_transform='multiple_select',
                         norm_cfg=norm_cfg, **kwargs)
        self.reads_all = reads_all
        if self.out_channels == 1 and not 0 < self.threshold < 1:
            raise ValueError(f'threshold must be between 0 and 1, got {self.threshold}')
        layer = dict(kernel_size=3, padding=1, conv_cfg=self.conv_cfg, norm_cfg=norm_cfg, act_cfg=self.act_cfg)
        deeper = [*decoder_channels[1:], in_channels[-1]]
        self.blocks = nn.ModuleList(
            nn.Sequential(ConvModule(below + skip, out, **layer), ConvModule(out, out, **layer))
            for below, skip, out in zip(deeper, in_channels, decoder_channels))

    def forward(self, inputs):
        """Decodes feature maps, (N, C_i, H_i, W_i) each, into logits, (N, out_channels, H_0, W_0)."""
        channels = [x.shape[1] for x in inputs]
        read = [channels[i] for i in self.in_index if i < len(channels)]
        if read != list(self.in_channels) or (self.reads_all and len(read) != len(channels)):
            raise ValueError(f'in_channels={list(self.in_channels)}, in_index={list(self.in_index)} of UNetHead do not '
                             f'fit the backbone, whose feature maps have {channels} channels')
        features = self._transform_inputs(inputs)
        sizes = [tuple(x.shape[2:]) for x in features]
        if sizes[0] < sizes[-1]:
            raise ValueError(f'in_index={list(self.in_index)} of UNetHead must go from the largest feature map to the '
                             f'smallest, got maps of {sizes}')
        *skips, x = features
        for block, skip in zip(reversed(self.blocks), reversed(skips)):
            x = resize(x, size=skip.shape[2:], mode='bilinear', align_corners=self.align_corners)
            x = block(torch.cat([skip, x], 1))
        return self.cls_seg(x)

    def loss_by_feat(self, seg_logits, batch_data_samples):
        """Losses and the accuracy that is logged, which `BaseDecodeHead` does not know how to tell from one map."""
        losses = super().loss_by_feat(seg_logits, batch_data_samples)
        if self.out_channels == 1:
            target = self._stack_batch_gt(batch_data_samples)
            logits = resize(seg_logits, size=target.shape[2:], mode='bilinear', align_corners=self.align_corners)
            limit = torch.full_like(logits, math.log(self.threshold / (1 - self.threshold)))
            losses['acc_seg'] = accuracy(torch.cat([limit, logits], 1), target.squeeze(1),
                                         ignore_index=self.ignore_index)
        return losses
