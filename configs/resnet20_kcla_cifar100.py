"""KCLA-ResNet-20 on CIFAR-100: one GPU of 128 images, 300 epochs."""
_base_ = [
    'mmpretrain::_base_/models/resnet50_cifar.py',
    'mmpretrain::_base_/datasets/cifar100_bs16.py',
    'mmpretrain::_base_/schedules/cifar10_bs128.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['kcla_mm'])
model = dict(
    backbone=dict(
        _delete_=True, type='KCLAResNet_CIFAR', depth=20, attention=dict(type='KCLA', init_scale=1.0)),
    head=dict(num_classes=100, in_channels=256))

train_cfg = dict(max_epochs=300)
param_scheduler = dict(milestones=[150, 225])

train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = dict(batch_size=128)
