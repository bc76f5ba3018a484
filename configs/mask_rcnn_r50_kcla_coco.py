_base_ = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['kcla_mm'])
model = dict(backbone=dict(type='KCLAResNet'))
