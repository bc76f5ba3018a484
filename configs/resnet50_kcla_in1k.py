"""KCLA-ResNet-50 on ImageNet: 8 GPUs of 32 images, 100 epochs; the steps of the zoo after 3 epochs of warm-up."""
_base_ = 'mmpretrain::resnet/resnet50_8xb32_in1k.py'
custom_imports = dict(imports=['kcla_mm'])
model = dict(backbone=dict(type='KCLAResNet', attention=dict(type='KCLA', init_scale=1.0)))

param_scheduler = [
    dict(type='LinearLR', start_factor=0.25, by_epoch=True, end=3, convert_to_iter_based=True),
    dict(type='MultiStepLR', by_epoch=True, milestones=[30, 60, 90], gamma=0.1),
]
