import json
import sys

import pytest
import torch
from mmengine.config import Config

CONFIG = """
_base_ = 'mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py'
custom_imports = dict(imports=['kcla_mm', 'plugins'])
model = dict(
    backbone=dict(
        type='KCLAResNet', attention=dict(type='KCLA', init_scale=1.0, drop_path=0.), depth=18, frozen_stages=-1,
        norm_cfg=dict(requires_grad=True), norm_eval=True, init_cfg=None),
    neck=dict(in_channels=[64, 128, 256, 512], out_channels=64),
    bbox_head=dict(num_classes=3, in_channels=64, feat_channels=64, stacked_convs=1))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(
    batch_size=1, num_workers=0, persistent_workers=False, sampler=dict(shuffle=False), batch_sampler=None,
    dataset=dict(
        data_root='data/shapes/', ann_file='annotations/instances_train.json', data_prefix=dict(img='train/'),
        metainfo=dict(classes=('circle', 'square', 'triangle')), filter_cfg=dict(filter_empty_gt=False),
        pipeline=train_pipeline))
val_dataloader = val_evaluator = val_cfg = None
train_cfg = dict(max_epochs=1)
optim_wrapper = dict(optimizer=dict(lr=0.02), clip_grad=None, paramwise_cfg=None)
param_scheduler = []
custom_hooks = [dict(type='RecordLosses'), dict(type='LayerAttentionHook', interval=2)]
default_hooks = dict(logger=dict(interval=2))
randomness = dict(seed=0)
"""


def test_two_processes_train_as_one_does_on_the_same_data(run_tool, shapes):
    """FCOS divides its losses by sums over all processes, so two images in one process or in two are the same step."""
    (shapes / 'fcos.py').write_text(CONFIG)
    run_tool('train.py', 'fcos.py', '--work-dir', 'one', '--cfg-options', 'train_dataloader.batch_size=2', cwd=shapes)
    run_tool('train.py', 'fcos.py', '--work-dir', 'two', '--launcher', 'pytorch', cwd=shapes,
             launcher=[sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2'])
    cfg = Config.fromfile(shapes / 'two/fcos.py', import_custom_modules=False)
    assert not cfg.model_wrapper_cfg.find_unused_parameters

    expected = json.loads((shapes / 'one/losses-0.json').read_text())
    losses = [json.loads((shapes / f'two/losses-{rank}.json').read_text()) for rank in (0, 1)]
    assert len(expected) == len(losses[0]) == len(losses[1]) == 4
    for one, first, second in zip(expected, *losses):
        assert first['loss'] != pytest.approx(second['loss'], rel=1e-2)
        for name in ('loss', 'loss_cls', 'loss_bbox', 'loss_centerness'):
            assert (first[name] + second[name]) / 2 == pytest.approx(one[name], rel=1e-4)
    for folder in ('one', 'two'):
        lines = [json.loads(line) for path in (shapes / folder).glob('*/vis_data/scalars.json')
                 for line in path.read_text().splitlines()]
        assert [line['step'] for line in lines] == [2, 4], 'the main process alone logs'
        assert all(-1 <= line['layer_attention/stage4/key_alignment'] <= 1 for line in lines)
    one, two = [torch.load(shapes / name / 'epoch_1.pth', weights_only=False)['state_dict'] for name in ('one', 'two')]
    assert any('layer_attention' in key for key in one)
    torch.testing.assert_close(dict(two), dict(one), rtol=1e-4, atol=1e-5)
