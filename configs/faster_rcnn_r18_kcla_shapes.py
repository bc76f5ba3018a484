"""A small Faster R-CNN, from scratch on drawn shapes: minutes on two CPU cores. `make demo` draws, trains and tests."""
_base_ = [
    'mmdet::_base_/models/faster-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['kcla_mm'])

# Nothing is pretrained: all of the backbone learns, and layer attention at the paper's full strength.
model = dict(
    backbone=dict(
        type='KCLAResNet',
        attention=dict(type='KCLA', init_scale=1.0),
        depth=18,
        frozen_stages=-1,
        norm_eval=False,
        init_cfg=None),
    neck=dict(in_channels=[64, 128, 256, 512], out_channels=96),
    rpn_head=dict(in_channels=96, feat_channels=96, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=96, roi_layer=dict(sampling_ratio=2)),
        bbox_head=dict(in_channels=96, fc_out_channels=256, num_classes=3)),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=200)))

data_root = 'data/shapes/'
metainfo = dict(classes=('circle', 'square', 'triangle'), palette=[(220, 20, 60), (0, 130, 200), (60, 180, 75)])
train_pipeline = [
    dict(type='LoadImageFromFile', backend_args=None),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(192, 192), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile', backend_args=None),
    dict(type='Resize', scale=(192, 192), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(
    batch_size=4,
    dataset=dict(
        data_root=data_root,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        metainfo=metainfo,
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=8,
    dataset=dict(
        data_root=data_root,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='val/'),
        metainfo=metainfo,
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=4, val_interval=2)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=30),
    dict(type='CosineAnnealingLR', by_epoch=False),
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(max_keep_ckpts=1))
randomness = dict(seed=0)
