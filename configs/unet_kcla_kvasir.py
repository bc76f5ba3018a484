"""UNet with the light KCLA encoder on Kvasir-SEG, trained as in the paper (arXiv 2606.28405) from scratch."""
_base_ = 'mmseg::_base_/default_runtime.py'
custom_imports = dict(imports=['kcla_mm'])

model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[142.0, 82.1, 60.5],  # of the training images
        std=[81.8, 57.2, 48.5],
        bgr_to_rgb=True,
        size_divisor=1),
    backbone=dict(type='KCLAResNetUNet', attention=dict(type='KCLA', init_scale=1.0)),
    decode_head=dict(
        type='UNetHead',
        in_channels=[16, 32, 64, 128, 128],
        num_classes=2,
        out_channels=1,
        threshold=0.5,
        dropout_ratio=0,
        loss_decode=dict(type='BCEDiceLoss')),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadBinaryMask'),
    # Either flip with probability 0.5, independently of the other.
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='RandomRotate', prob=0.5, degree=(0, 360), pad_val=0, seg_pad_val=0),
    dict(type='Resize', scale=(256, 256)),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(256, 256)),
    dict(type='LoadBinaryMask'),  # after Resize: scores are of the image's own size
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='KvasirSEGDataset', data_root='data/Kvasir-SEG', split='train', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='KvasirSEGDataset', data_root='data/Kvasir-SEG', split='val', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='LesionMetric')
test_evaluator = val_evaluator

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=300, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=1e-2))
param_scheduler = dict(type='CosineAnnealingLR', T_max=50, eta_min=1e-5)  # down in 50 epochs, up in the next 50, ...
auto_scale_lr = dict(base_batch_size=8)

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', interval=10, max_keep_ckpts=1, save_best='DSC', rule='greater'),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
visualizer = dict(type='LesionVisualizer')
log_processor = dict(by_epoch=True)
randomness = dict(seed=0)
