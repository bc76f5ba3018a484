_base_ = './resnet20_kcla_cifar100.py'
model = dict(backbone=dict(depth=110))
