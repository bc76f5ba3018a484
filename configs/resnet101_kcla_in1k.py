_base_ = './resnet50_kcla_in1k.py'
model = dict(backbone=dict(depth=101))
