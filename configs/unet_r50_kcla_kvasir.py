"""UNet with a KCLA-ResNet-50 from ImageNet weights on Kvasir-SEG."""
_base_ = './unet_kcla_kvasir.py'
model = dict(
    backbone=dict(
        _delete_=True,
        type='KCLAResNet',
        depth=50,
        init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50')),
    decode_head=dict(in_channels=[256, 512, 1024, 2048], decoder_channels=[64, 128, 256]))
